"""One rank decides where to cut, and all do what it has decided: by their own measurements ranks would cut in different places."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed import ProcessGroup

from crossfade.errors import GraphError

__all__ = ["decided_by_first", "told_by_all"]

T = TypeVar("T")


def decided_by_first(group: ProcessGroup | None, decide: Callable[[], T]) -> T:
    """Returns on all ranks of a group what ``decide`` returns on its first one; without torch.distributed, just that.

    Args:
        group: the default group, if None.
        decide: called on the first rank only; what it returns can be pickled.

    Raises:
        GraphError: it raised there; the message is the same on all ranks.
    """
    if not dist.is_available() or not dist.is_initialized():
        return decide()
    told: list[Any] = [None, None]
    raised: Exception | None = None
    if dist.get_rank(group) == 0:
        try:
            told[0] = decide()
        except Exception as error:
            raised, told[1] = error, str(error) or type(error).__name__
    dist.broadcast_object_list(told, group=group, group_src=0)
    if raised is not None:
        raise raised
    if told[1] is not None:
        raise GraphError(told[1])
    decided: T = told[0]
    return decided


def told_by_all(group: ProcessGroup | None, find: Callable[[], T]) -> list[T]:
    """Returns on all ranks of a group what each of them found, all at the same time; without torch.distributed, what this one did.

    Args:
        group: the default group, if None.
        find: what it returns can be pickled.
    """
    if not dist.is_available() or not dist.is_initialized():
        return [find()]
    dist.barrier(group)
    told: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(told, find(), group)
    return told
