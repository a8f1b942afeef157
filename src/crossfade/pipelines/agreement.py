"""One rank decides where to cut, and all do what it has decided: by their own measurements ranks would cut in different places.

Ranks tell each other JSON, as numbers over their group: nothing is unpickled.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from crossfade.errors import GraphError
from crossfade.p2p.opening import ranks_of


def decided_by_first(group: ProcessGroup | None, decide: Callable[[], Any]) -> Any:
    """Returns on all ranks of a group what ``decide`` returns on its first one, which can be written as JSON; without
    torch.distributed, just that. Where it raises, all raise a `GraphError` with the same message.
    """
    if not dist.is_available() or not dist.is_initialized():
        return decide()
    decided, reason, raised = None, "", None
    if dist.get_rank(group) == 0:
        try:
            decided = decide()
        except Exception as error:  # whatever it is, the other ranks wait for a word
            raised, reason = error, str(error) or type(error).__name__
    decided, reason = _gather(group, [decided, reason])[0]
    if raised is not None:
        raise raised
    if reason:
        raise GraphError(reason)
    return decided


def gathered(group: ProcessGroup | None, find: Callable[[], Any]) -> list[Any]:
    """Returns on all ranks of a group what each of them found, which can be written as JSON, all at the same time; without
    torch.distributed, what this one did.
    """
    if not dist.is_available() or not dist.is_initialized():
        return [find()]
    dist.barrier(group)
    return _gather(group, find())


def _gather(group: ProcessGroup | None, value: Any) -> list[Any]:
    chosen: Any = dist.group.WORLD if group is None else group
    device = torch.device("cpu" if "cpu" in str(dist.get_backend_config(chosen)) else "cuda")
    gather = ranks_of(chosen, device).gather
    data = json.dumps(value).encode()
    lengths = [length for (length,) in gather([len(data)])]
    rows = gather([*data, *bytes(max(lengths) - len(data))])
    return [json.loads(bytes(row[:length])) for row, length in zip(rows, lengths, strict=True)]
