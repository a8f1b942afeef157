"""One call of an operator: its shape, what it may be given, what an algorithm gets of it, and how that begins and ends on its lane.

Letters, for all of this room: W ranks, r this one, p another; ``a`` (M, K), ``b`` (K, N), and the product (M, N) of each rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from crossfade.errors import DeviceError
from crossfade.ops.calls.products import multiply
from crossfade.peers.arguments import check_overlap, check_tensor, describe, packed
from crossfade.peers.lane import Lane
from crossfade.peers.steps import end

if TYPE_CHECKING:
    from torch import Tensor

    from crossfade.ops.calls.counts import Counts
    from crossfade.peers.group import PeerGroup


class Operator(StrEnum):
    """The functions for which an algorithm is chosen."""

    REDUCE_SCATTER = "matmul_reduce_scatter"
    ALL_REDUCE = "matmul_all_reduce"
    ALL_GATHER = "all_gather_matmul"
    ALL_TO_ALL = "matmul_all_to_all"


class Layout(StrEnum):
    """How ``b`` lies in memory; ``a`` is row-major."""

    ROWS = "nn"
    """Row-major: contiguous."""
    COLUMNS = "nt"
    """The transpose of a contiguous matrix, such as the weight of a linear layer."""


ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}
"""Bytes of an element."""


@dataclass(frozen=True, slots=True)
class Shape:
    """One product and its collective. All ranks have equal ones.

    Attributes:
        operator: the function's name, such as ``matmul_reduce_scatter``; one of `Operator` where it is to be done.
        m: rows of this rank's product; for ``all_gather_matmul`` those of all ranks. Where ranks have different numbers of rows
            (``matmul_all_to_all``) the most that one of them may have, so that all choose alike.
        n, k: its columns, and what is summed over.
        dtype: of the elements, as torch calls it, such as ``bfloat16``.
        layout: one of `Layout`.
        num_ranks: W.

    Raises:
        ValueError: a length is negative, or there is no rank, or a type is none of `ITEM_BYTES`.
    """

    operator: str
    m: int
    n: int
    k: int
    dtype: str
    layout: str
    num_ranks: int

    def __post_init__(self) -> None:
        if min(self.m, self.n, self.k) < 0 or self.num_ranks < 1:
            raise ValueError(f"{self} does not exist\nhint: lengths are not negative, and there is at least one rank")
        if self.dtype not in ITEM_BYTES:
            raise ValueError(f"there is no type {self.dtype!r} here\nhint: one of {', '.join(ITEM_BYTES)}")

    @property
    def item_bytes(self) -> int:
        """Of one element."""
        return ITEM_BYTES[self.dtype]

    @property
    def rows_of_a(self) -> int:
        """Of this rank's ``a``."""
        return self.m // self.num_ranks if self.operator == Operator.ALL_GATHER else self.m

    @property
    def bucket(self) -> Shape:
        """The shape that stands for this one and for others like it in choices: N and K are the same, M is not less.

        The rows of each rank are rounded up to 1, 2, 3, 4, 6, 8, 12, 16, ...: so M is a multiple of W, and at most half as large
        again (or W - 1 more).
        """
        rows = -(-self.m // self.num_ranks)
        return replace(self, m=self.num_ranks * _step_up(rows))

    def __str__(self) -> str:
        return f"{self.operator} {self.m},{self.n},{self.k} {self.dtype} {self.layout} x{self.num_ranks}"


def _step_up(rows: int) -> int:
    """The least of 0, 1, 2, 3, 4, 6, 8, 12, ... that is not less."""
    if rows <= 2:
        return rows
    power = 1 << (rows - 1).bit_length()
    middle = power // 4 * 3
    return middle if rows <= middle else power


def takes_fused(operator: Operator, lane: int, *, has_bias: bool) -> bool:
    """Whether torch's fused operators take such calls; where they do not, the algorithm ``fused`` is ``plain``."""
    return not lane and not (operator == Operator.REDUCE_SCATTER and has_bias)


class Once:
    """Work that is enqueued at its first call, and never again.

    It belongs to one call of an operator. An algorithm that captures itself, to be replayed by later calls, must not capture it
    too: then it is left for the end of the operator, where the stream is as it was at the beginning.
    """

    def __init__(self, work: Callable[[], object] | None, is_capturing: Callable[[], bool] | None = None) -> None:
        self._work = work
        self._is_capturing = is_capturing if work is not None else None
        self._is_captured = self._is_capturing is not None and self._is_capturing()

    def __bool__(self) -> bool:
        return self._work is not None

    def __call__(self) -> None:
        """Enqueues it, unless that was done."""
        if self._work is not None and self._is_capturing is not None and self._is_capturing() != self._is_captured:
            return
        work, self._work = self._work, None
        if work is not None:
            work()


_NOTHING = Once(None)


@dataclass(frozen=True, slots=True)
class Job:
    """One call of an operator."""

    name: str  # of the operator, for errors
    group: PeerGroup  # whose ranks do it
    lane: int  # the number of the lane
    a: Tensor
    b: Tensor  # (K, N), contiguous or the transpose of a contiguous one
    bias: Tensor | None  # (N,), or None where this rank adds none
    out: Tensor  # 2 dimensions, contiguous; what the operator gives
    gathered: Tensor | None = None  # all-gather: (W M, K), contiguous; gets all ranks' ``a``
    counts: Counts | None = None  # all-to-all: the rows from each rank to each
    has_bias: bool = False  # the caller gave one, which another rank may add
    is_new_out: bool = False  # the caller has not seen ``out`` yet
    fill: Once = _NOTHING  # the caller's own work: called where the stream would else wait for other ranks

    @property
    def num_columns(self) -> int:
        """N."""
        return self.b.shape[1]

    def empty(self, *shape: int) -> Tensor:
        """A tensor of the operands' type and device, with nothing in it yet."""
        return self.a.new_empty(shape)


Algorithm = Callable[..., None]
"""How an operator is done: fills the outputs of a `Job`; takes the parameters of a candidate by name."""


class OnLane(NamedTuple):
    """Where exchanges are enqueued."""

    lane: Lane  # of the job
    stream: int  # the caller's
    local: int  # the lane's own, behind the beginning of the call


@contextmanager
def on_lane(job: Job) -> Iterator[OnLane]:
    """A call that uses the lane: in step with all ranks, or the lane is broken.

    At its end the stream waits for the lane's local one, so what the call used may be used again behind it on the stream.
    """
    group, lane = job.group, job.group.lane(job.lane)
    stream = group.current_stream()
    lane.begin(stream, is_captured=group.is_capturing())
    try:
        yield OnLane(lane, stream, lane.fork_local(stream))
        lane.join_local(stream)
        end(lane, stream)
    except BaseException as error:
        lane.cut_off(error)
        raise
    # On a CPU a captured graph holds what it touches, by an action that does nothing; on a GPU torch's allocator sees to it.
    group.do(partial(_nothing, job))
    group.check_call(lane)


def multiply_rows(job: Job, a: Tensor, out: Tensor) -> None:
    """``out`` becomes the product of these rows of the job; on a CPU in its place in a captured graph."""
    if out.numel():
        job.group.do(lambda: multiply(a, job.b, out, job.bias))


def whole(job: Job, body: Callable[[], None]) -> None:
    """A call that is torch's alone; a lane whose ranks have died refuses it like any other."""
    lane = job.group.lane(job.lane)
    lane.check()
    job.group.do(body)
    job.group.check_call(lane)


def _nothing(job: Job) -> None: ...


def refuse_in_capture(group: PeerGroup, what: str) -> None:
    """Raises `DeviceError` if the current stream is being captured: ``what`` loads or makes something that is not there yet."""
    if group.is_capturing():
        raise DeviceError(
            f"{what}, and the current stream is being captured",
            hint="prepare() the operator for this shape and lane first (crossfade.ops.prepare), or call it once",
        )


# what operators may be given

DTYPES = tuple(ITEM_BYTES)
"""Element types of operators; all but float64 are added in float32."""


class Given(NamedTuple):
    """What was given, checked."""

    a: Tensor  # (M, K): all leading dimensions are rows
    b: Tensor  # (K, N), in one of the layouts
    bias: Tensor | None  # (N,), contiguous, or None


def check_operands(name: str, group: PeerGroup, a: Tensor, b: Tensor, bias: Tensor | None) -> Given:
    """Checks the inputs of an operator."""
    check_tensor(group, f"a of {name}", a)
    check_tensor(group, f"b of {name}", b)
    _check_type(name, a)
    if a.dim() < 2 or b.dim() != 2 or a.shape[-1] != b.shape[0]:
        raise ValueError(
            f"a of {name} is of shape {list(a.shape)} and b of {list(b.shape)}\nhint: they have to be (..., K) and (K, N)"
        )
    if b.dtype != a.dtype:
        raise ValueError(f"a of {name} is {a.dtype}, and b is {b.dtype}\nhint: give both the same type")
    layout_of(name, b)
    if bias is not None:
        check_tensor(group, f"bias of {name}", bias)
        if bias.dtype != a.dtype or tuple(bias.shape) != (b.shape[1],):
            raise ValueError(
                f"bias of {name} is {describe(bias)}\nhint: it has to be {a.dtype} of shape [{b.shape[1]}]"
            )
    rows = packed(group, a).flatten(0, -2)
    return Given(rows, b, None if bias is None else packed(group, bias))


def _check_type(name: str, a: Tensor) -> None:
    dtype = str(a.dtype).removeprefix("torch.")
    if dtype in DTYPES:
        return
    if dtype.startswith("float8"):
        raise TypeError(
            f"{name} takes no {a.dtype}\nhint: torch._scaled_mm into bfloat16, then a collective of crossfade.peers; "
            "there is no overlapped fp8 product"
        )
    raise TypeError(f"{name} takes no {a.dtype}\nhint: one of {', '.join(DTYPES)}")


def layout_of(name: str, b: Tensor) -> Layout:
    """The layout of ``b``."""
    if b.is_contiguous():
        return Layout.ROWS
    if b.t().is_contiguous():
        return Layout.COLUMNS
    raise ValueError(
        f"b of {name} has strides {list(b.stride())}, and is neither row-major nor the transpose of a contiguous matrix\n"
        "hint: b.contiguous()"
    )


def check_out(
    name: str,
    group: PeerGroup,
    given: Given,
    out: Tensor | None,
    shape: tuple[int, ...],
    what: str = "out",
    place: int | None = None,
) -> Tensor:
    """Checks an output, or makes it; gives a contiguous tensor to fill, which `store` brings into the output.

    ``place`` is where it may lie, in bytes behind ``a``; None for apart from it.
    """
    if out is None:
        return given.a.new_empty(shape)
    check_tensor(group, f"{what} of {name}", out)
    if tuple(out.shape) != shape or out.dtype != given.a.dtype:
        raise ValueError(
            f"{what} of {name} is {describe(out)}\nhint: it has to be {given.a.dtype} of shape {list(shape)}"
        )
    for each in given:
        if each is not None:
            flat = each if each.is_contiguous() else each.t()
            check_overlap(name, flat, out, place if each is given.a else None)
    return out if out.is_contiguous() else out.new_empty(shape)


def store(group: PeerGroup, out: Tensor | None, filled: Tensor) -> Tensor:
    """The output that the caller gave, with what is in ``filled``; or ``filled``, if the caller gave none."""
    if out is None or out is filled:
        return filled
    given = out
    group.do(lambda: given.copy_(filled))
    return given


def rows_for_each(name: str, group: PeerGroup, num_rows: int) -> int:
    """How many rows each rank gets."""
    if num_rows % group.num_ranks:
        raise ValueError(
            f"a of {name} has {num_rows} rows\nhint: their number has to be a multiple of the number of ranks, "
            f"{group.num_ranks}"
        )
    return num_rows // group.num_ranks
