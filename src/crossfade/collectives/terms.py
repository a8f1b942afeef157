"""What actors do together with their tensors, as pure functions: what fits, what comes out, what to say where it does not.

Whoever moves the tensors (`collectives.gloo` between processes, `collectives.local` in one thread) asks
here. Imported only where torch is installed. Letters: n parties, rank r of them, k tensors of each (k is 1 but for an
allreduce of several).

Before any data moves, each party makes an *offer*: dtypes and shapes of its tensors, or what is wrong with them, or the
`Failure` that it was given in the place of a value. From all n offers every party draws the same conclusion: to go on, or one
failure for all. So a party whose tensor does not fit stops nobody, and the graph goes on.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from crossfade.channels.values.codec import decode, message_of
from crossfade.channels.values.tensors import is_dense
from crossfade.errors import Failure
from crossfade.types import CollectiveKind, ReduceOp

__all__ = [
    "STAGED",
    "WHOLE_NUMBERS",
    "Meeting",
    "Offer",
    "conclude",
    "finish_reduction",
    "layout_of",
    "make_offer",
    "pieces_of",
    "reduce_in_order",
    "reduced_dtype",
    "reference",
    "result_shape",
    "shard",
    "staged_in",
]

_CPU = torch.device("cpu")
STAGED = " on the CPU"
"""What a layout says of a tensor that has to be brought to the device, and its result back."""
WHOLE_NUMBERS = (
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint16,
    torch.uint32,
)
"""Dtypes of whole numbers that can be reduced."""
_DIRECT = {torch.float32, torch.float64, torch.int8, torch.uint8, torch.int32, torch.int64}
_WIDER = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.int16: torch.int32,
    torch.uint16: torch.int32,
    torch.uint32: torch.int64,
}
"""Half-precision floats are reduced in float32 and rounded once, at the end; the rest is what gloo does not know."""


@dataclass(frozen=True, slots=True)
class Meeting:
    """What is done together, in words that this room knows.

    Attributes:
        id: c0, c1, ...
        kind: what.
        op: how tensors are reduced, for kinds that reduce.
        root: the rank whose tensor a broadcast gives to all.
        parties: who, in rank order.
    """

    id: str
    kind: CollectiveKind
    op: ReduceOp | None
    root: int
    parties: tuple[str, ...]

    @property
    def label(self) -> str:
        """How errors call it."""
        return f"{self.kind} (collective {self.id})"


@dataclass(frozen=True, slots=True)
class Offer:
    """What one party brings.

    Attributes:
        tensors: the tensors, detached; nothing from a party that only receives, and nothing with a failure.
        failure: why there are none.
    """

    tensors: tuple[torch.Tensor, ...]
    failure: Failure | None = None

    def layout(self, device: torch.device = _CPU) -> bytes:
        """Dtypes and shapes, the same bytes for tensors that fit together; which of them are not on the device but on the CPU."""
        if device == _CPU:
            return _layout(tuple((each.dtype, each.shape, False) for each in self.tensors))
        return _layout(tuple((each.dtype, each.shape, not each.is_cuda) for each in self.tensors))

    def complaint(self) -> bytes:
        """The failure as a message."""
        return message_of(self.failure).to_bytes()


@lru_cache(maxsize=1024)
def _layout(tensors: tuple[tuple[torch.dtype, torch.Size, bool], ...]) -> bytes:
    return json.dumps(
        [[f"{dtype}{STAGED if is_staged else ''}", *shape] for dtype, shape, is_staged in tensors]
    ).encode()


def make_offer(meeting: Meeting, rank: int, values: Sequence[object], device: torch.device | None = _CPU) -> Offer:
    """What a party brings, given the values in its registers. Never raises.

    Args:
        meeting: what is done.
        rank: the party's.
        values: in its registers.
        device: where tensors are moved (CPU tensors may be brought to it); None for anywhere.
    """
    for value in values:
        if isinstance(value, Failure):
            return Offer((), value)
    if meeting.kind is CollectiveKind.BROADCAST and rank != meeting.root:
        return Offer(())
    party = meeting.parties[rank]
    try:
        for value in values:
            problem = _problem(meeting, value, device)
            if problem is not None:
                kind, what, hint = problem
                return Offer((), _failure(kind(f"{party} brings {what}\nhint: {hint}"), party, meeting))
        tensors = (value.detach().resolve_conj().resolve_neg() for value in values if isinstance(value, torch.Tensor))
        return Offer(tuple(tensors))
    except Exception as error:  # no memory for what a view stands for; or a nested tensor, which has no shape
        return Offer((), _failure(error, party, meeting))


def _problem(meeting: Meeting, value: object, device: torch.device | None) -> tuple[type[Exception], str, str] | None:
    """What is wrong with a value by itself: the kind of error, what it is, a hint."""
    if not isinstance(value, torch.Tensor):
        return TypeError, f"a {type(value).__name__}", "return a torch tensor from the method; torch.from_numpy(array)"
    is_near = device is None or value.device == device or value.device == _CPU
    if not is_near or not is_dense(value):
        kind = f"a {'nested' if value.is_nested else value.layout} tensor on {value.device}".replace("torch.", "")
        return TypeError, kind, f"this collective takes dense tensors on {_place(device)}, tensor.to_dense()"
    shape = tuple(value.shape)
    if meeting.kind in (CollectiveKind.ALLGATHER, CollectiveKind.REDUCESCATTER) and not shape:
        return ValueError, "a tensor without dimensions", "give it one: tensor.unsqueeze(0)"
    num_parties = len(meeting.parties)
    if meeting.kind is CollectiveKind.REDUCESCATTER and shape[0] % num_parties:
        what = f"a tensor of shape {shape}, whose dim 0 does not divide into {num_parties} equal parts"
        return ValueError, what, "pad dim 0 to a multiple of the number of actors"
    if meeting.op is None:
        return None
    if value.dtype not in _DIRECT and value.dtype not in _WIDER:
        return (
            TypeError,
            f"a tensor of {value.dtype}, which is not reduced",
            "convert it: tensor.to(torch.int64), view_as_real",
        )
    if meeting.op is ReduceOp.AVG and not value.dtype.is_floating_point:
        return TypeError, f"a tensor of {value.dtype}, which has no average", "reduce with SUM, or convert to a float"
    return None


def _place(device: torch.device | None) -> str:
    return "the CPU: tensor.cpu()" if device in (_CPU, None) else f"its actor's GPU or the CPU: tensor.to('{device}')"


def _failure(error: Exception, party: str, meeting: Meeting) -> Failure:
    return Failure.capture(error, actor=party, node=meeting.label)


def conclude(meeting: Meeting, layouts: Sequence[bytes], complaints: Sequence[bytes | None]) -> Failure | None:
    """Why the parties cannot go on, or None: the same at all of them.

    Args:
        meeting: what they do.
        layouts: what each offers, as `Offer.layout` has it.
        complaints: what those who cannot say, as `Offer.complaint` has it.
    """
    for complaint in complaints:
        if complaint is not None:
            failure = decode(memoryview(bytearray(complaint)), shared=bytes)
            return failure if isinstance(failure, Failure) else _failure(TypeError(repr(failure)), "?", meeting)
    if meeting.kind is CollectiveKind.BROADCAST or len(set(layouts)) == 1:
        return None
    shown = "; ".join(f"{party} brings {_shown(each)}" for party, each in zip(meeting.parties, layouts, strict=True))
    odd = next(rank for rank, layout in enumerate(layouts) if layout != layouts[0])
    error = ValueError(f"the tensors do not fit together: {shown}\nhint: all actors bring the same shapes and dtypes")
    return _failure(error, meeting.parties[odd], meeting)


def _shown(layout: bytes) -> str:
    shown = [(dtype.removeprefix("torch."), tuple(shape)) for dtype, *shape in json.loads(layout)]
    return ", ".join(f"{d.removesuffix(STAGED)} {shape}{STAGED if d.endswith(STAGED) else ''}" for d, shape in shown)


def layout_of(layout: bytes) -> tuple[torch.dtype, tuple[int, ...]]:
    """Dtype and shape of the first tensor of a layout."""
    dtype, *shape = json.loads(layout)[0]
    found: Any = getattr(torch, dtype.removeprefix("torch.").removesuffix(STAGED))
    return found, tuple(shape)


def staged_in(layout: bytes) -> list[bool]:
    """Which tensors of a layout are on the CPU, and not on the device."""
    return [dtype.endswith(STAGED) for dtype, *_ in json.loads(layout)]


def reduced_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which tensors are reduced."""
    return _WIDER.get(dtype, dtype)


def pieces_of(tensors: Sequence[torch.Tensor]) -> dict[torch.dtype, list[int]]:
    """Which of several tensors travel together: positions by the dtype in which they are reduced."""
    pieces: dict[torch.dtype, list[int]] = {}
    for index, tensor in enumerate(tensors):
        pieces.setdefault(reduced_dtype(tensor.dtype), []).append(index)
    return pieces


def finish_reduction(meeting: Meeting, tensor: torch.Tensor) -> torch.Tensor:
    """An average from a sum, in place."""
    return tensor.div_(len(meeting.parties)) if meeting.op is ReduceOp.AVG else tensor


def result_shape(meeting: Meeting, shape: Sequence[int]) -> tuple[int, ...]:
    """The shape of what each rank gets for tensors of this shape (the root's)."""
    match meeting.kind:
        case CollectiveKind.ALLGATHER:
            return (len(meeting.parties) * shape[0], *shape[1:])
        case CollectiveKind.REDUCESCATTER:
            return (shape[0] // len(meeting.parties), *shape[1:])
        case _:
            return tuple(shape)


def shard(meeting: Meeting, tensor: torch.Tensor, rank: int) -> torch.Tensor:
    """Part ``rank`` of the equal parts of dim 0."""
    size = tensor.shape[0] // len(meeting.parties)
    return tensor[rank * size : (rank + 1) * size].clone()


def reference(meeting: Meeting, offers: Sequence[Offer]) -> list[list[torch.Tensor]]:
    """What each rank gets, by plain torch: tensors are reduced one after another in rank order."""
    ranks = range(len(meeting.parties))
    firsts = [offer.tensors[0] for offer in offers if offer.tensors]
    match meeting.kind:
        case CollectiveKind.ALLREDUCE:
            columns = zip(*(offer.tensors for offer in offers), strict=True)
            reduced = [reduce_in_order(meeting, column) for column in columns]
            return [[tensor.clone() for tensor in reduced] for _ in ranks]
        case CollectiveKind.ALLGATHER:
            return [[torch.cat(firsts)] for _ in ranks]
        case CollectiveKind.REDUCESCATTER:
            whole = reduce_in_order(meeting, firsts)
            return [[shard(meeting, whole, rank)] for rank in ranks]
        case CollectiveKind.BROADCAST:
            return [[offers[meeting.root].tensors[0].clone()] for _ in ranks]


def reduce_in_order(meeting: Meeting, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """One tensor after another, in a dtype that is wide enough, rounded once."""
    wide = reduced_dtype(tensors[0].dtype)
    result = tensors[0].to(wide, copy=True, memory_format=torch.contiguous_format)
    for tensor in tensors[1:]:
        match meeting.op:
            case ReduceOp.PRODUCT:
                result.mul_(tensor.to(wide))
            case ReduceOp.MIN:
                torch.minimum(result, tensor.to(wide), out=result)
            case ReduceOp.MAX:
                torch.maximum(result, tensor.to(wide), out=result)
            case _:
                result.add_(tensor.to(wide))
    return finish_reduction(meeting, result).to(tensors[0].dtype)
