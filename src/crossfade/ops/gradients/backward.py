"""The gradients of the operators, on tensors: what each saves, and which operator it goes back by.

W ranks; G is the gradient of a rank's output, dA, dB and dbias are those of its operands. Where all ranks have the same output, all
have the same G (as in Megatron and DTensor), and where all have the same bias, each gets its whole gradient.

=======================  ==============================  =================================  =================
operator                 dA                              dB                                 dbias
=======================  ==============================  =================================  =================
`matmul_reduce_scatter`  all_gather_matmul(G, b^T)       a^T (all ranks' G)                 sum of all G
`matmul_all_reduce`      G b^T                           a^T G                              sum of G
`all_gather_matmul`      matmul_reduce_scatter(G, b^T)   (all ranks' a)^T G                 sum of G
`matmul_all_to_all`      all_to_all_matmul(G, b^T)       a^T (the rows of G that came back) sum of those
`replicated_matmul`      matmul_all_reduce(G, b^T)       a^T G                              sum of G
=======================  ==============================  =================================  =================

Saved are ``a`` where dB is needed (of an all-gather all ranks' ``a``, or this rank's), and ``b`` where dA is. What is gathered for
dA is what dB needs, so it moves once. Where dA's operator sums over ranks, dB's product is enqueued inside of it, behind dA's last
product and before the wait for the other ranks: it runs while the last parts are under way.

Rows that are needed until dB is done go into reserved memory, if there is any (`reserve_scratch`): rows that copy engines bring
into a lane's slots cost a copy by a kernel to keep, and rows for memory of `PeerGroup.empty` are put there at once. One such piece
for each lane is enough, since a lane's calls come one behind the other. dB lies in memory as ``b`` does, so
that a linear layer's weight gets a gradient of its own layout, without a copy.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from crossfade.device.borrowed import torch_or_raise
from crossfade.ops import forward
from crossfade.ops.calls.counts import Counts
from crossfade.ops.calls.job import Layout, Operator, Shape, check_operands, layout_of
from crossfade.ops.calls.products import multiply
from crossfade.ops.choice.candidate import Candidate
from crossfade.ops.choice.choose import choose_for
from crossfade.peers import collectives
from crossfade.peers.arguments import packed
from crossfade.peers.groups import group_of

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from crossfade.peers.group import PeerGroup
    from crossfade.peers.groups import GroupLike

Chosen = Candidate | str | None


class Needs(NamedTuple):
    """Which operands get a gradient."""

    a: bool
    b: bool
    bias: bool


class Grads(NamedTuple):
    """The gradients, None where none is needed."""

    a: Tensor | None
    b: Tensor | None
    bias: Tensor | None


class Gradient(ABC):
    """One call of an operator, whose gradient may be asked for, more than once."""

    name: str  # of the operator

    def __init__(
        self,
        group: PeerGroup,
        lane: int,
        candidate: Chosen = None,
        backward_candidate: Chosen = None,
        *,
        counts: Sequence[Sequence[int]] | None = None,  # all-to-all
        save_gathered: bool = True,  # all-gather
    ) -> None:
        self._group = group
        self._given = counts
        self._counts = Counts((), group.rank)
        self._is_saved = save_gathered
        self._options: dict[str, Any] = {"lane": lane}
        if candidate is not None:
            self._options["candidate"] = candidate
        self._back: dict[str, Any] = {"lane": lane, "candidate": backward_candidate}
        self._shape: tuple[int, ...] = ()
        self._layout = Layout.ROWS

    def forward(
        self, a: Tensor, b: Tensor, bias: Tensor | None, needs: Needs
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """The output, and what `backward` is to be given: rows and ``b``, as far as it needs them."""
        out, rows = self._compute(a, b, bias, needs)
        self._shape, self._layout = tuple(a.shape), layout_of(self.name, b)
        return out, rows if needs.b else None, b if needs.a else None

    def resume(self, shape: tuple[int, ...], grad: Tensor, layout: Layout) -> None:
        """In the place of `forward`, where an equal call did that: what `backward` has to know of it."""
        self._shape, self._layout = shape, layout

    def backward(self, grad: Tensor, rows: Tensor | None, b: Tensor | None, needs: Needs) -> Grads:
        """The gradients. To be called without a gradient's own recording, by all ranks in one order on a lane."""
        return self._backward(packed(self._group, grad).flatten(0, -2), rows, b, needs)

    @abstractmethod
    def _compute(self, a: Tensor, b: Tensor, bias: Tensor | None, needs: Needs) -> tuple[Tensor, Tensor]: ...

    @abstractmethod
    def _backward(self, grad: Tensor, rows: Tensor | None, b: Tensor | None, needs: Needs) -> Grads: ...

    def _like_a(self, grad: Tensor | None) -> Tensor | None:
        return None if grad is None else grad.view(self._shape)

    def _rest(self, grad: Tensor, rows: Tensor | None, needs: Needs) -> Rest:
        return Rest(self._group, grad, rows, self._layout, needs_bias=needs.bias)


class Rest:
    """dB and dbias: products and sums that need no other rank, to be enqueued at any time. dbias is the sum of ``grad``'s rows."""

    def __init__(
        self, group: PeerGroup, grad: Tensor, rows: Tensor | None, layout: Layout, *, needs_bias: bool
    ) -> None:
        self._work: list[Callable[[], object]] = []
        self._do = group.do
        self.b: Tensor | None = None
        self.bias: Tensor | None = None
        if rows is not None:
            self._plan_b(grad, packed(group, rows).flatten(0, -2), layout)
        if needs_bias:
            self.bias = grad.new_empty(grad.shape[1])
            self._work.append(partial(torch_or_raise().sum, grad, 0, out=self.bias))

    def _plan_b(self, grad: Tensor, rows: Tensor, layout: Layout) -> None:
        depth, columns = rows.shape[1], grad.shape[1]
        if layout is Layout.COLUMNS:
            out = grad.new_empty(columns, depth)
            self.b = out.t()
            self._work.append(partial(multiply, grad.t(), rows, out, None))
        else:
            self.b = grad.new_empty(depth, columns)
            self._work.append(partial(multiply, rows.t(), grad, self.b, None))

    def enqueue(self) -> None:
        """On the current stream."""
        for work in self._work:
            self._do(work)


class ReduceScatter(Gradient):
    """`matmul_reduce_scatter`."""

    name = Operator.REDUCE_SCATTER

    def _compute(self, a: Tensor, b: Tensor, bias: Tensor | None, needs: Needs) -> tuple[Tensor, Tensor]:
        return forward.reduce_scatter(a, b, self._group, bias=bias, **self._options), a

    def _backward(self, grad: Tensor, rows: Tensor | None, b: Tensor | None, needs: Needs) -> Grads:
        group, lane = self._group, self._back["lane"]
        da = gathered = None
        if needs.b or (needs.a and needs.bias):
            gathered = find_scratch(group, lane, (group.num_ranks * len(grad), grad.shape[1]), grad)
        if b is not None:
            da = forward.all_gather(grad, b.t(), group, gathered=gathered, **self._back)
        elif gathered is not None:
            collectives.all_gather(grad, group, gathered, lane=lane)
        if gathered is None:
            rest = self._rest(grad, None, needs)
            rest.enqueue()
            if rest.bias is not None:
                collectives.all_reduce(rest.bias, group, rest.bias, lane=lane)
        else:
            rest = self._rest(gathered, rows, needs)
            rest.enqueue()
        return Grads(self._like_a(da), rest.b, rest.bias)


class AllReduce(Gradient):
    """`matmul_all_reduce`. All ranks have the same G, so nothing has to move."""

    name = Operator.ALL_REDUCE

    def _compute(self, a: Tensor, b: Tensor, bias: Tensor | None, needs: Needs) -> tuple[Tensor, Tensor]:
        return forward.all_reduce(a, b, self._group, bias=bias, **self._options), a

    def _backward(self, grad: Tensor, rows: Tensor | None, b: Tensor | None, needs: Needs) -> Grads:
        da = None
        if b is not None:
            da = grad.new_empty(len(grad), b.shape[0])
            self._group.do(partial(multiply, grad, b.t(), da, None))
        rest = self._rest(grad, rows, needs)
        rest.enqueue()
        return Grads(self._like_a(da), rest.b, rest.bias)


class AllGather(Gradient):
    """`all_gather_matmul`."""

    name = Operator.ALL_GATHER

    def _compute(self, a: Tensor, b: Tensor, bias: Tensor | None, needs: Needs) -> tuple[Tensor, Tensor]:
        gathered = None
        if self._is_saved and needs.b:
            num_rows, depth = check_operands(self.name, self._group, a, b, bias).a.shape
            gathered = a.new_empty(self._group.num_ranks * num_rows, depth)
        out = forward.all_gather(a, b, self._group, bias=bias, gathered=gathered, **self._options)
        return out, a if gathered is None else gathered

    def _backward(self, grad: Tensor, rows: Tensor | None, b: Tensor | None, needs: Needs) -> Grads:
        lane = self._back["lane"]
        if rows is not None and not self._is_saved:
            flat = packed(self._group, rows).flatten(0, -2)
            place = find_scratch(self._group, lane, (self._group.num_ranks * len(flat), flat.shape[1]), flat)
            rows = collectives.all_gather(flat, self._group, place, lane=lane)
        rest = self._rest(grad, rows, needs)
        if b is None:
            rest.enqueue()
            return Grads(None, rest.b, rest.bias)
        da = forward.reduce_scatter(grad, b.t(), self._group, meanwhile=rest.enqueue, **self._back)
        return Grads(self._like_a(da), rest.b, rest.bias)


class AllToAll(Gradient):
    """`matmul_all_to_all`."""

    name = Operator.ALL_TO_ALL

    def _compute(self, a: Tensor, b: Tensor, bias: Tensor | None, needs: Needs) -> tuple[Tensor, Tensor]:
        out = forward.all_to_all(a, b, self._group, self._given, bias=bias, **self._options)
        self._settle(len(out), b.shape[1], b.shape[0], b.dtype, layout_of(self.name, b))
        return out, a

    def resume(self, shape: tuple[int, ...], grad: Tensor, layout: Layout) -> None:
        """Also settles the counts, and how the gradient goes back."""
        super().resume(shape, grad, layout)
        self._settle(prod(grad.shape[:-1]), grad.shape[-1], shape[-1], grad.dtype, layout)

    def _settle(self, num_rows: int, columns: int, depth: int, dtype: torch.dtype, layout: Layout) -> None:
        """What goes back, and how. ``num_rows``: of the output, by which they are counted where the caller gave no counts."""
        group, given = self._group, self._given
        if given is None:
            self._counts = Counts.even(num_rows // group.num_ranks, group.rank, group.num_ranks)
        else:
            self._counts = Counts(tuple(tuple(map(int, row)) for row in given), group.rank)
        chosen = self._back["candidate"] or self._options.get("candidate")
        if chosen is None:
            most, kind = self._counts.most_sent, str(dtype).removeprefix("torch.")
            shape = Shape(Operator.ALL_TO_ALL, most, columns, depth, kind, layout, group.num_ranks)
            chosen = choose_for(shape, group)
        self._back["candidate"] = Candidate.parse(chosen) if isinstance(chosen, str) else chosen

    def _backward(self, grad: Tensor, rows: Tensor | None, b: Tensor | None, needs: Needs) -> Grads:
        turned = self._counts.turned()
        returned = grad.new_empty(sum(turned.received), grad.shape[1])
        matrix = grad.new_empty(grad.shape[1], 0) if b is None else b.t()
        da = forward.all_to_all_first(grad, matrix, self._group, turned, gathered=returned, **self._back)
        rest = self._rest(returned, rows, needs)
        rest.enqueue()
        return Grads(None if b is None else self._like_a(da), rest.b, rest.bias)


class Replicated(Gradient):
    """`replicated_matmul`: the product alone. All ranks have the same ``a``, so dA is the sum over ranks."""

    name = "replicated_matmul"

    def _compute(self, a: Tensor, b: Tensor, bias: Tensor | None, needs: Needs) -> tuple[Tensor, Tensor]:
        return forward.replicated(a, b, self._group, bias=bias), a

    def _backward(self, grad: Tensor, rows: Tensor | None, b: Tensor | None, needs: Needs) -> Grads:
        rest = self._rest(grad, rows, needs)
        if b is None:
            rest.enqueue()
            return Grads(None, rest.b, rest.bias)
        da = forward.all_reduce(grad, b.t(), self._group, meanwhile=rest.enqueue, **self._back)
        return Grads(self._like_a(da), rest.b, rest.bias)


# memory that the other ranks write, for rows that a gradient gathers


def reserve_scratch(group: GroupLike, size_bytes: int, lane: int = 0) -> None:
    """Sets a piece of the group's heap apart for the gradients of a lane's calls. All ranks call it, in one order with `empty`.

    Args:
        group: opened with ``heap_bytes`` for it.
        size_bytes: of the largest gathered rows: M times N of a `matmul_reduce_scatter`, or W M times K of an `all_gather_matmul`
            that gathers again. Longer ones, and those of other lanes, are gathered through slots.
        lane: which lane of the group.

    Raises:
        ChannelClosed: the group is closed.
        DeviceError: the heap is used up.
        ValueError: there is no such lane.
    """
    group = group_of(group)
    group.lane(lane)
    group.belongings[_scratch_name(lane)] = group.empty(size_bytes, dtype=torch_or_raise().uint8)


def find_scratch(group: PeerGroup, lane: int, shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Reserved memory for rows of this shape, where there is enough, or new memory. To be used before the lane's next call only."""
    piece: Tensor | None = group.belongings.get(_scratch_name(lane))
    size_bytes = prod(shape) * like.itemsize
    if piece is None or piece.numel() < size_bytes or not size_bytes:
        return like.new_empty(shape)
    return piece[:size_bytes].view(like.dtype).view(shape)


def _scratch_name(lane: int) -> str:
    return f"crossfade.ops.scratch of lane {lane}"
