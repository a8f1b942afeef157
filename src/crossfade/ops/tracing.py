"""What the operators do while torch.compile traces them: each becomes one operator of torch's, which it does not look into.

Gradients are not asked for here: the operators of torch's have theirs (`crossfade.ops.compiled`). This is traced itself, so it
keeps to what torch.compile follows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from crossfade.device.borrowed import torch_or_raise
from crossfade.ops.shape import Operator

if TYPE_CHECKING:
    import torch

    from crossfade.ops.candidate import Candidate
    from crossfade.peers.group import PeerGroup

__all__ = ["Traced", "is_traced", "trace_all_to_all", "trace_join", "trace_share"]


def is_traced() -> bool:
    """Whether torch.compile is tracing the caller. While it compiles what it has traced, operators that run are not."""
    return bool(torch_or_raise().compiler.is_dynamo_compiling())


class Traced:
    """One call that is traced.

    Args:
        group: of the call.
        lane: likewise.
        candidate: likewise.
        backward_candidate: likewise.
    """

    def __init__(
        self,
        group: PeerGroup,
        lane: int,
        candidate: Candidate | str | None = None,
        backward_candidate: Candidate | str | None = None,
    ) -> None:
        self._where = (group.key, lane, _text(candidate), _text(backward_candidate))

    def call(
        self,
        name: str,
        a: torch.Tensor,
        b: torch.Tensor,
        bias: torch.Tensor | None,
        out: torch.Tensor | None = None,
        meanwhile: Callable[[], object] | None = None,
    ) -> torch.Tensor:
        """An operator that has an output only. An output that was given is filled by a copy."""
        made: torch.Tensor = getattr(_operators(), name)(a, b, bias, *self._where)
        if meanwhile is not None:
            meanwhile()
        return _stored(made, out)

    def all_gather(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        bias: torch.Tensor | None,
        out: torch.Tensor | None,
        gathered: torch.Tensor | None,
        *,
        save_gathered: bool,
    ) -> torch.Tensor:
        """`all_gather_matmul`."""
        is_saved = save_gathered and b.requires_grad and torch_or_raise().is_grad_enabled()
        name = str(Operator.ALL_GATHER)
        made, rows = getattr(_operators(), name)(a, b, bias, *self._where, is_saved or gathered is not None)
        _stored(rows, gathered)
        return _stored(made, out)

    def all_to_all(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        bias: torch.Tensor | None,
        out: torch.Tensor | None,
        counts: Sequence[Sequence[int]] | None,
    ) -> torch.Tensor:
        """`matmul_all_to_all`."""
        flat = None if counts is None else [count for row in counts for count in row]
        made = getattr(_operators(), str(Operator.ALL_TO_ALL))(a, b, bias, *self._where, flat)
        return _stored(made, out)


def trace_all_to_all(group: PeerGroup, counts: torch.Tensor, lane: int) -> torch.Tensor:
    """`crossfade.peers.collectives.all_to_all` of what has no gradient."""
    return _operators().all_to_all(counts, group.key, lane)  # type: ignore[no-any-return]


def trace_share(x: torch.Tensor, group: PeerGroup, dim: int, lane: int) -> torch.Tensor:
    """`crossfade.ops.regions.split`."""
    return _operators().split(x, group.key, dim, lane)  # type: ignore[no-any-return]


def trace_join(x: torch.Tensor, group: PeerGroup, dim: int, lane: int) -> torch.Tensor:
    """`crossfade.ops.regions.gather`."""
    return _operators().gather(x, group.key, dim, lane)  # type: ignore[no-any-return]


def _operators() -> Any:
    from crossfade.ops import compiled

    return compiled.OPERATORS


def _text(candidate: Candidate | str | None) -> str | None:
    return candidate if candidate is None or isinstance(candidate, str) else str(candidate)


def _stored(made: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    return made if out is None else out.copy_(made)
