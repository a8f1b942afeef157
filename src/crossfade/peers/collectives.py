"""The collectives, on tensors. Each enqueues on torch's current stream and returns; on a CPU it is done when it returns.

W ranks. Every function takes a process group of torch.distributed (None for the default one), whose buffers its first call opens,
or what `open_group` gave; it gives the output, and takes ``out`` to write into. All ranks call the functions of
one lane in one order, with equal shapes and types (this is not checked: it would cost more than the collective). Calls on
different lanes may be in flight at the same time; where streams share hardware queues, they too must be enqueued in one order on
all ranks.

===============  ================  ====================
function         input             output
===============  ================  ====================
all_gather       (n, ...)          (W * n, ...)
all_to_all       (W * n, ...)      (W * n, ...)
reduce_scatter   (W * n, ...)      (n, ...)
all_reduce       (...)             (...)
broadcast        (...)             (...)
===============  ================  ====================

An ``out`` of `PeerGroup.empty` is written by the other ranks themselves, so that an all-gather or all-to-all moves each byte once,
and an all-reduce keeps to one direction. All ranks give such an ``out``, or none does.

A sum is added up in the order of the ranks, so all ranks get the same bits, each time; float16 and bfloat16 are added in float32
and rounded once.
"""

from __future__ import annotations

import itertools
import operator
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from crossfade.marks import mark
from crossfade.peers import steps
from crossfade.peers.arguments import (
    SUMMABLE,
    check_overlap,
    check_tensor,
    describe,
    extent_of,
    kind_of,
    packed,
    part_length,
)
from crossfade.peers.group import PeerGroup
from crossfade.peers.groups import group_of
from crossfade.peers.lane import Lane

if TYPE_CHECKING:
    from torch import Tensor

    from crossfade.peers.groups import GroupLike

__all__ = [
    "SUMMABLE",
    "all_gather",
    "all_reduce",
    "all_reduce_coalesced",
    "all_to_all",
    "broadcast",
    "reduce_scatter",
    "reduce_scatter_coalesced",
]


def all_gather(tensor: Tensor, group: GroupLike = None, out: Tensor | None = None, *, lane: int = 0) -> Tensor:
    """All ranks' tensors, one behind the other along the first dimension. The input may be this rank's part of ``out``."""
    group = group_of(group, tensor)
    check_tensor(group, "the input of all_gather", tensor)
    shape = (group.num_ranks * tensor.shape[0], *tensor.shape[1:]) if tensor.dim() else (group.num_ranks,)
    item = _item(group, "all_gather", tensor, out, shape, -group.rank * tensor.nbytes)
    return _move(group, "all_gather", item, lane, tensor.nbytes, steps.all_gather)


def all_to_all(tensor: Tensor, group: GroupLike = None, out: Tensor | None = None, *, lane: int = 0) -> Tensor:
    """Part p of the first dimension goes to rank p; the parts that arrive are one behind the other, by rank."""
    group = group_of(group, tensor)
    check_tensor(group, "the input of all_to_all", tensor)
    part_length(group, "all_to_all", tensor)
    item = _item(group, "all_to_all", tensor, out, tuple(tensor.shape), None)
    return _move(group, "all_to_all", item, lane, tensor.nbytes // group.num_ranks, steps.all_to_all)


def broadcast(
    tensor: Tensor,
    root: int,
    group: GroupLike = None,
    out: Tensor | None = None,
    *,
    lane: int = 0,
) -> Tensor:
    """The tensor of rank ``root``; the others give one of that shape and type, which may be ``out``, and is not read."""
    group = group_of(group, tensor)
    check_tensor(group, "the input of broadcast", tensor)
    root = operator.index(root)
    if not 0 <= root < group.num_ranks:
        raise ValueError(f"there is no rank {root} to broadcast from\nhint: the group has {group.num_ranks} ranks")

    item = _item(group, "broadcast", tensor, out, tuple(tensor.shape), 0)

    def enqueue(lanes: list[Lane], stream: int) -> None:
        target, source = item.target.data_ptr(), item.source.data_ptr()
        steps.broadcast(lanes[0], stream, root, target, source, tensor.nbytes)

    return _call(group, "broadcast", [item], [lane], enqueue)[0]


def reduce_scatter(tensor: Tensor, group: GroupLike = None, out: Tensor | None = None, *, lane: int = 0) -> Tensor:
    """This rank's part, along the first dimension, of the sum of all ranks' tensors. ``out`` may be that part of the input."""
    return reduce_scatter_coalesced([tensor], group, [out], lanes=[lane])[0]


def all_reduce(tensor: Tensor, group: GroupLike = None, out: Tensor | None = None, *, lane: int = 0) -> Tensor:
    """The sum of all ranks' tensors. ``out`` may be the input."""
    return all_reduce_coalesced([tensor], group, [out], lanes=[lane])[0]


def reduce_scatter_coalesced(
    tensors: Sequence[Tensor],
    group: GroupLike = None,
    outs: Sequence[Tensor | None] | None = None,
    *,
    lanes: Sequence[int] | None = None,
) -> list[Tensor]:
    """`reduce_scatter` of several tensors, several at a time: one on each of these lanes (default: all).

    Beside computation that holds all SMs this is much faster than one after another, for the sums of all lanes wait for SMs once.
    """

    def place(group: PeerGroup, tensor: Tensor) -> tuple[tuple[int, ...], int]:
        length = part_length(group, "reduce_scatter", tensor)
        return (length, *tensor.shape[1:]), group.rank * tensor.nbytes // group.num_ranks

    return _sum("reduce_scatter", tensors, group, outs, lanes, steps.reduce_scatter, place)


def all_reduce_coalesced(
    tensors: Sequence[Tensor],
    group: GroupLike = None,
    outs: Sequence[Tensor | None] | None = None,
    *,
    lanes: Sequence[int] | None = None,
) -> list[Tensor]:
    """`all_reduce` of several tensors, several at a time (see `reduce_scatter_coalesced`)."""
    return _sum("all_reduce", tensors, group, outs, lanes, steps.all_reduce, lambda _, t: (tuple(t.shape), 0))


def _move(
    group: PeerGroup, name: str, item: _Item, lane: int, size_bytes: int, function: Callable[..., None]
) -> Tensor:
    """Of one tensor, on one lane; ``size_bytes`` go from each rank to each."""

    def enqueue(lanes: list[Lane], stream: int) -> None:
        offset = group.shared_offset(item.target)
        function(lanes[0], stream, item.target.data_ptr(), item.source.data_ptr(), size_bytes, offset)

    return _call(group, name, [item], [lane], enqueue)[0]


def _sum(
    name: str,
    tensors: Sequence[Tensor],
    given: GroupLike,
    outs: Sequence[Tensor | None] | None,
    lanes: Sequence[int] | None,
    function: Callable[[Sequence[Lane], int, Sequence[steps.Job]], None],
    place: Callable[[PeerGroup, Tensor], tuple[tuple[int, ...], int]],
) -> list[Tensor]:
    """``place`` gives the shape of a tensor's output, and where in the tensor that may lie."""
    group, items = group_of(given, *tensors[:1]), []
    for tensor, out in zip(tensors, [None] * len(tensors) if outs is None else outs, strict=True):
        check_tensor(group, f"the input of {name}", tensor)
        kind_of(name, tensor)
        items.append(_item(group, name, tensor, out, *place(group, tensor)))

    def enqueue(chosen: list[Lane], stream: int) -> None:
        jobs = [
            steps.Job(
                each.target.data_ptr(),
                each.source.data_ptr(),
                each.out.numel(),
                kind_of(name, each.out),
                group.shared_offset(each.target),
            )
            for each in items
        ]
        function(chosen, stream, jobs)

    if len(items) > 1:
        _check_apart(name, items)
    numbers = range(group.num_lanes) if lanes is None else lanes
    return _call(group, name, items, list(numbers), enqueue)


def _check_apart(name: str, items: Sequence[_Item]) -> None:
    """Several at a time are read and written in no order: nothing of one may lie where another is written. What is not contiguous
    is packed before, and put into place behind.
    """
    outs = sorted((*extent_of(item.out), number) for number, item in enumerate(items) if _is_direct(item.out))
    hint = "hint: give each tensor an out of its own, or none"
    for (_, end, one), (first, _, other) in itertools.pairwise(outs):
        if first < end:
            raise ValueError(f"outs {one} and {other} of {name} overlap\n{hint}")
    firsts = [first for first, _, _ in outs]
    for number, item in enumerate(items):
        if _is_direct(item.tensor):
            first, end = extent_of(item.tensor)
            for _, out_end, other in outs[max(0, bisect_right(firsts, first) - 1) : bisect_left(firsts, end)]:
                if other != number and first < out_end:
                    raise ValueError(f"tensor {number} of {name} lies in out {other}\n{hint}")


def _is_direct(tensor: Tensor) -> bool:
    return tensor.is_contiguous() and tensor.numel() > 0


@dataclass(slots=True)
class _Item:
    """A tensor, its output, and what stands for them where they are not contiguous."""

    tensor: Tensor
    out: Tensor
    source: Tensor
    target: Tensor


def _item(
    group: PeerGroup, name: str, tensor: Tensor, out: Tensor | None, shape: tuple[int, ...], place: int | None
) -> _Item:
    """Checks ``out``, or makes it. ``place``: where it may lie, seen from the input."""
    if out is None:
        out = tensor.new_empty(shape)
    else:
        check_tensor(group, f"out of {name}", out)
        if tuple(out.shape) != shape or out.dtype != tensor.dtype:
            raise ValueError(
                f"out of {name} is {describe(out)}\nhint: it has to be {tensor.dtype} of shape {list(shape)}"
            )
        check_overlap(name, tensor, out, place)
    return _Item(tensor, out, tensor, out)


def _call(
    group: PeerGroup,
    name: str,
    items: list[_Item],
    lanes: list[int],
    enqueue: Callable[[list[Lane], int], None],
) -> list[Tensor]:
    """Packs what is not contiguous, enqueues, unpacks."""
    if not lanes or len(set(lanes)) < len(lanes):
        raise ValueError(f"the lanes of {name} are {lanes}\nhint: give at least one, and each once")
    chosen = [each for lane in lanes for each in group.lanes_of(lane)]
    stream, is_captured = group.current_stream(), group.is_capturing()
    for lane in chosen:
        lane.begin(stream, is_captured=is_captured)
    for item in items:
        item.source = packed(group, item.tensor)
        item.target = item.out if item.out.is_contiguous() else item.out.new_empty(item.out.shape)
    try:
        with mark(name):
            enqueue(chosen, stream)
            for lane in chosen:
                steps.end(lane, stream)
    except BaseException as error:
        for lane in chosen:
            lane.cut_off(error)
        raise
    for item in items:
        _keep(group, item.source, item.target)
        if item.target is not item.out:
            group.do(partial(item.out.copy_, item.target))
    for lane in chosen:
        group.check_call(lane)
    return [item.out for item in items]


def _keep(group: PeerGroup, *tensors: Tensor) -> None:
    """What a captured call on a CPU touches lives as long as its graph, in an action that does nothing.

    (On a GPU torch's own allocator sees to it.)
    """
    group.do(lambda: tensors and None)
