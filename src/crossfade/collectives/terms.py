"""Collectives as pure functions: which tensors fit together, what each party gets, and the error where they do not fit.

Letters: n parties, rank r of them, k tensors of each (k is 1 but for an allreduce of several). Imported only where torch is
installed.

Before any data moves, each party makes an *offer*: dtypes and shapes of its tensors, or the error for which it has none, or the
`Failure` that it was given in the place of a value. From all n offers every party draws the same conclusion: to move their tensors,
or one failure for all. So a party whose tensor does not fit stops no other, and the graph continues.
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

_CPU = torch.device("cpu")
STAGED = " on the CPU"  # marks a tensor in a layout that is copied to the device first, and its result back
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
"""Half-precision floats are reduced in float32 and rounded once, at the end; gloo does not know the others."""


@dataclass(frozen=True, slots=True)
class Terms:
    """One collective of a plan: its kind, how tensors are reduced, and its parties in rank order."""

    id: str  # c0, c1, ...
    kind: CollectiveKind
    op: ReduceOp | None  # for kinds that reduce
    root: int  # the rank whose tensor a broadcast gives to all
    parties: tuple[str, ...]

    @property
    def label(self) -> str:
        """Its name in errors."""
        return f"{self.kind} (collective {self.id})"


@dataclass(frozen=True, slots=True)
class Offer:
    """The detached tensors that one party brings: none with a failure, and none from a party that only receives."""

    tensors: tuple[torch.Tensor, ...]
    failure: Failure | None = None

    def layout(self, device: torch.device | None = _CPU) -> bytes:
        """Dtypes and shapes, the same bytes for tensors that fit together; marks CPU tensors of a party whose device is a GPU."""
        is_gpu = device is not None and device != _CPU
        return _layout(tuple((each.dtype, each.shape, is_gpu and not each.is_cuda) for each in self.tensors))

    def complaint(self) -> bytes:
        """The failure as a message."""
        return message_of(self.failure).to_bytes()


@lru_cache(maxsize=1024)
def _layout(tensors: tuple[tuple[torch.dtype, torch.Size, bool], ...]) -> bytes:
    return json.dumps(
        [[f"{dtype}{STAGED if is_staged else ''}", *shape] for dtype, shape, is_staged in tensors]
    ).encode()


def make_offer(terms: Terms, rank: int, values: Sequence[object], device: torch.device | None = _CPU) -> Offer:
    """The offer of one party for the values in its registers. Never raises.

    Tensors may be on ``device``, where they are moved, or on the CPU; with None, anywhere.
    """
    for value in values:
        if isinstance(value, Failure):
            return Offer((), value)
    if terms.kind is CollectiveKind.BROADCAST and rank != terms.root:
        return Offer(())
    party = terms.parties[rank]
    try:
        for value in values:
            problem = _problem(terms, value, device)
            if problem is not None:
                kind, what, hint = problem
                return Offer((), _failure(kind(f"{party} brings {what}\nhint: {hint}"), party, terms))
        tensors = (value.detach().resolve_conj().resolve_neg() for value in values if isinstance(value, torch.Tensor))
        return Offer(tuple(tensors))
    except Exception as error:  # no memory for what a view stands for; or a nested tensor, which has no shape
        return Offer((), _failure(error, party, terms))


def _problem(terms: Terms, value: object, device: torch.device | None) -> tuple[type[Exception], str, str] | None:
    """The fault of a value by itself: the kind of error, a description, a hint."""
    if not isinstance(value, torch.Tensor):
        return TypeError, f"a {type(value).__name__}", "return a torch tensor from the method; torch.from_numpy(array)"
    is_near = device is None or value.device == device or value.device == _CPU
    if not is_near or not is_dense(value):
        kind = f"a {'nested' if value.is_nested else value.layout} tensor on {value.device}".replace("torch.", "")
        return TypeError, kind, f"this collective takes dense tensors on {_place(device)}, tensor.to_dense()"
    shape = tuple(value.shape)
    if terms.kind in (CollectiveKind.ALLGATHER, CollectiveKind.REDUCESCATTER) and not shape:
        return ValueError, "a tensor without dimensions", "give it one: tensor.unsqueeze(0)"
    num_parties = len(terms.parties)
    if terms.kind is CollectiveKind.REDUCESCATTER and shape[0] % num_parties:
        what = f"a tensor of shape {shape}, whose dim 0 does not divide into {num_parties} equal parts"
        return ValueError, what, "pad dim 0 to a multiple of the number of actors"
    if terms.op is None:
        return None
    if value.dtype not in _DIRECT and value.dtype not in _WIDER:
        return (
            TypeError,
            f"a tensor of {value.dtype}, which is not reduced",
            "convert it: tensor.to(torch.int64), view_as_real",
        )
    if terms.op is ReduceOp.AVG and not value.dtype.is_floating_point:
        return TypeError, f"a tensor of {value.dtype}, which has no average", "reduce with SUM, or convert to a float"
    return None


def _place(device: torch.device | None) -> str:
    return "the CPU: tensor.cpu()" if device in (_CPU, None) else f"its actor's GPU or the CPU: tensor.to('{device}')"


def _failure(error: Exception, party: str, terms: Terms) -> Failure:
    return Failure.capture(error, actor=party, node=terms.label)


def conclude(terms: Terms, layouts: Sequence[bytes], complaints: Sequence[bytes | None]) -> Failure | None:
    """The failure for which the parties cannot continue, or None: the same at all of them.

    Layouts and complaints are those of the offers, by rank; a complaint is None for a party that can take part.
    """
    for complaint in complaints:
        if complaint is not None:
            failure = decode(memoryview(bytearray(complaint)), shared=bytes)
            return failure if isinstance(failure, Failure) else _failure(TypeError(repr(failure)), "?", terms)
    if terms.kind is CollectiveKind.BROADCAST or len(set(layouts)) == 1:
        return None
    shown = "; ".join(f"{party} brings {_shown(each)}" for party, each in zip(terms.parties, layouts, strict=True))
    odd = next(rank for rank, layout in enumerate(layouts) if layout != layouts[0])
    error = ValueError(f"the tensors do not fit together: {shown}\nhint: all actors bring the same shapes and dtypes")
    return _failure(error, terms.parties[odd], terms)


def _shown(layout: bytes) -> str:
    shown = [(dtype.removeprefix("torch."), tuple(shape)) for dtype, *shape in json.loads(layout)]
    return ", ".join(f"{d.removesuffix(STAGED)} {shape}{STAGED if d.endswith(STAGED) else ''}" for d, shape in shown)


def layout_of(layout: bytes) -> tuple[torch.dtype, tuple[int, ...]]:
    """Dtype and shape of the first tensor of a layout."""
    dtype, *shape = json.loads(layout)[0]
    found: Any = getattr(torch, dtype.removeprefix("torch.").removesuffix(STAGED))
    return found, tuple(shape)


def staged_in(layout: bytes) -> list[bool]:
    """For each tensor of a layout, whether it is on the CPU and not on the device."""
    return [dtype.endswith(STAGED) for dtype, *_ in json.loads(layout)]


def reduced_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which tensors are reduced."""
    return _WIDER.get(dtype, dtype)


def finish_reduction(terms: Terms, tensor: torch.Tensor) -> torch.Tensor:
    """An average from a sum, in place."""
    return tensor.div_(len(terms.parties)) if terms.op is ReduceOp.AVG else tensor


def result_shape(terms: Terms, shape: Sequence[int]) -> tuple[int, ...]:
    """The shape of each rank's result for tensors of this shape (the root's)."""
    match terms.kind:
        case CollectiveKind.ALLGATHER:
            return (len(terms.parties) * shape[0], *shape[1:])
        case CollectiveKind.REDUCESCATTER:
            return (shape[0] // len(terms.parties), *shape[1:])
        case _:
            return tuple(shape)


def shard(terms: Terms, tensor: torch.Tensor, rank: int) -> torch.Tensor:
    """Part ``rank`` of the equal parts of dim 0."""
    size = tensor.shape[0] // len(terms.parties)
    return tensor[rank * size : (rank + 1) * size].clone()


def reference(terms: Terms, offers: Sequence[Offer]) -> list[list[torch.Tensor]]:
    """The results of each rank, by plain torch: tensors are reduced one after another in rank order."""
    ranks = range(len(terms.parties))
    firsts = [offer.tensors[0] for offer in offers if offer.tensors]
    match terms.kind:
        case CollectiveKind.ALLREDUCE:
            columns = zip(*(offer.tensors for offer in offers), strict=True)
            reduced = [reduce_in_order(terms, column) for column in columns]
            return [[tensor.clone() for tensor in reduced] for _ in ranks]
        case CollectiveKind.ALLGATHER:
            return [[torch.cat(firsts)] for _ in ranks]
        case CollectiveKind.REDUCESCATTER:
            whole = reduce_in_order(terms, firsts)
            return [[shard(terms, whole, rank)] for rank in ranks]
        case CollectiveKind.BROADCAST:
            return [[offers[terms.root].tensors[0].clone()] for _ in ranks]


def reduce_in_order(terms: Terms, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """One tensor after another, in a dtype that is wide enough, rounded once."""
    wide = reduced_dtype(tensors[0].dtype)
    result = tensors[0].to(wide, copy=True, memory_format=torch.contiguous_format)
    for tensor in tensors[1:]:
        match terms.op:
            case ReduceOp.PRODUCT:
                result.mul_(tensor.to(wide))
            case ReduceOp.MIN:
                torch.minimum(result, tensor.to(wide), out=result)
            case ReduceOp.MAX:
                torch.maximum(result, tensor.to(wide), out=result)
            case _:
                result.add_(tensor.to(wide))
    return finish_reduction(terms, result).to(tensors[0].dtype)
