"""How long each candidate takes, predicted from measured figures, term by term.

Letters: W ranks; a product (M, K) by (K, N); a *block* is the M / W rows that belong to one rank, a *piece* a run of rows of a
block. By symmetry every rank does the same at the same time, so one rank's program stands for all: a piece from a peer arrives when
this rank's own piece of that number does.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from crossfade.ops.calls.job import Operator, Shape
from crossfade.ops.calls.products import in_order, shares
from crossfade.ops.choice.candidate import Candidate
from crossfade.ops.choice.figures import TILE_M, TILE_N, Figures, Line

LAUNCHES = "launches"
"""The term for time in which the device waits for the host."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """A time and its terms, which add up to it."""

    total_us: float  # all of it
    terms: tuple[tuple[str, float], ...]

    def __str__(self) -> str:
        rows = [*self.terms, ("total", self.total_us)]
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {time_us:10.1f} us" for name, time_us in rows)


@dataclass(frozen=True, slots=True)
class _Done:
    """An operation in its place."""

    term: str  # what its time counts as
    start_us: float  # start_us, end_us: when it runs
    end_us: float
    cause: int | None  # the operation that it waited for last; None for the host, which enqueued it then


class Program:
    """Operations in the order in which one host enqueues them. Each begins when it is enqueued, the one before it on its stream
    has ended, and so have those that it waits for.
    """

    def __init__(self) -> None:
        self._done: list[_Done] = []
        self._last_on: dict[str, int] = {}
        self._host_us = 0.0

    def add(
        self, term: str, stream: str, duration_us: float, *, launch_us: float = 0.0, after: Iterable[int] = ()
    ) -> int:
        """Enqueues one."""
        self._host_us += launch_us
        before = [*after, *([self._last_on[stream]] if stream in self._last_on else [])]
        cause = max(before, key=lambda number: self._done[number].end_us, default=None)
        start_us = self._host_us
        if cause is not None and self._done[cause].end_us >= start_us:
            start_us = self._done[cause].end_us
        else:
            cause = None
        self._last_on[stream] = len(self._done)
        self._done.append(_Done(term, start_us, start_us + duration_us, cause))
        return self._last_on[stream]

    def finish(self) -> Prediction:
        """The time until all have ended. Its terms come in the order in which they first occur on the path to it."""
        terms: dict[str, float] = {}
        at = max(range(len(self._done)), key=lambda number: self._done[number].end_us, default=None)
        path: list[_Done] = []
        while at is not None:
            path.append(self._done[at])
            at = path[-1].cause
        if path and path[-1].start_us:
            terms[LAUNCHES] = path[-1].start_us
        for each in reversed(path):
            terms[each.term] = terms.get(each.term, 0.0) + each.end_us - each.start_us
        return Prediction(path[0].end_us if path else 0.0, tuple((name, us) for name, us in terms.items() if us))


_OPERATORS = frozenset(str(each) for each in Operator)
"""What is predicted; of `matmul_signaled` the communication is the user's."""
_GATHERS = Operator.ALL_GATHER
_SUMS = (Operator.REDUCE_SCATTER, Operator.ALL_REDUCE)


@dataclass(frozen=True, slots=True)
class Model:
    """Predicts from figures."""

    figures: Figures  # equal on all ranks, so that all predict alike

    def predict(self, shape: Shape, candidate: Candidate) -> Prediction | None:
        """How long a candidate takes, eager, with all ranks starting together; None where the model knows nothing of it."""
        if shape.operator in _OPERATORS and candidate.name == "plain":
            return self._plain(shape)
        if shape.operator in _OPERATORS and candidate.name == "rounds":
            return self._rounds(shape, **candidate.arguments)
        return None

    def product_us(self, shape: Shape, rows: float | None = None) -> float:
        """Time of the product of some of the rows, alone: its waves of tiles, or what its memory takes if that is more."""
        rows = shape.m if rows is None else rows
        size_bytes = shape.item_bytes * (rows * shape.k + shape.k * shape.n + rows * shape.n)
        num_waves = _ceil(_ceil(rows / TILE_M) * _ceil(shape.n / TILE_N) / self.figures.num_sms)
        return max(num_waves * self.figures.wave_us(shape.k), size_bytes / self._memory_rate)

    def collective_us(self, shape: Shape) -> float:
        """Time of the vendor's collective, alone."""
        figures, others = self.figures, shape.num_ranks - 1
        lines: dict[str, tuple[Line, int]] = {
            Operator.REDUCE_SCATTER: (figures.reduce_scatter, others),
            Operator.ALL_REDUCE: (figures.all_reduce, 2 * others),
            Operator.ALL_GATHER: (figures.all_gather, others),
            Operator.ALL_TO_ALL: (figures.all_to_all, others),
        }
        line, num_blocks = lines[shape.operator]
        return line.time_us(num_blocks * self._block_bytes(shape)) if others else 0.0

    def bound(self, shape: Shape) -> Prediction:
        """What no algorithm can beat, with the vendor's product and the faster of its collective and of copies.

        For what communicates the product: ``max(T_gemm + t_comm(last piece), t_gemm(first piece) + T_comm)``, where a piece is the
        rows of one wave. Where the product's operand is gathered: ``max(T_gemm, T_comm + t_gemm(last piece))``, since it
        can begin with what is there.
        """
        rows = min(shape.m, self.figures.num_sms * TILE_N // max(shape.n, 1) * TILE_M or TILE_M)
        piece_us, product_us = self.product_us(shape, rows), self.product_us(shape)
        num_exchanges = 2 if shape.operator == Operator.ALL_REDUCE else 1
        copies_us = num_exchanges * (shape.num_ranks - 1) * self.figures.copy.time_us(self._block_bytes(shape))
        comm_us = min(copies_us, self.collective_us(shape))
        last_us = 0.0
        if shape.num_ranks > 1 and shape.operator != _GATHERS:
            last_us = num_exchanges * self.figures.copy.time_us(rows * shape.n * shape.item_bytes)
        first = _added(("product", product_us), ("last piece's communication", last_us))
        second = _added(("one piece's product", piece_us), ("communication", comm_us))
        return max(first, second, key=lambda each: each.total_us)

    @property
    def _memory_rate(self) -> float:
        return self.figures.memory_gbs * 1e3

    def _block_bytes(self, shape: Shape) -> float:
        """Of what one rank sends to one other."""
        columns = shape.k if shape.operator == _GATHERS else shape.n
        return shape.m / shape.num_ranks * columns * shape.item_bytes

    def _sum_us(self, shape: Shape, num_bytes: float) -> float:
        """Time to add the parts of all ranks, so many bytes each; the sum is stored once, or twice where others fetch it."""
        num_moved = shape.num_ranks + (2 if shape.operator == Operator.ALL_REDUCE else 1)
        return num_moved * num_bytes / self._memory_rate

    def _plain(self, shape: Shape) -> Prediction:
        program, launch_us = Program(), self.figures.launch_kernel_us
        parts = [("product", self.product_us(shape)), ("collective", self.collective_us(shape))]
        for term, time_us in reversed(parts) if shape.operator == _GATHERS else parts:
            program.add(term, "compute", time_us, launch_us=launch_us)
        return program.finish()

    def _rounds(self, shape: Shape, *, rounds: int, lag: int, taper: int) -> Prediction:
        """A product for each block and round, moved by the copy engine; the own block comes last, or first if it is gathered."""
        if shape.operator == _GATHERS:
            return self._gathering(shape, rounds)
        if shape.operator in _SUMS:
            return self._summing(shape, shares(rounds, taper), lag)
        return self._exchanging(shape, rounds)

    def _summing(self, shape: Shape, shares: Sequence[int], lag: int) -> Prediction:
        """Rounds of such lengths; the own rows of each come so many rounds late, and add what has arrived."""
        figures, others, program = self.figures, shape.num_ranks - 1, Program()
        arrived: dict[int, int] = {}
        for number, is_own in in_order(len(shares), lag):
            share = shares[number] / sum(shares)
            part_bytes = self._block_bytes(shape) * share
            product_us = self.product_us(shape, shape.m / shape.num_ranks * share)
            slowdown = figures.product_beside_copies if arrived else 1.0
            if not is_own:
                for _ in range(others):
                    done = program.add("products", "compute", product_us, launch_us=figures.launch_kernel_us)
                    arrived[number] = self._push(program, part_bytes, [done])
                    product_us *= slowdown
                continue
            program.add("own product", "compute", product_us * slowdown, launch_us=figures.launch_kernel_us)
            if not others:
                continue
            here = self._signal(program, f"round {number}", [arrived[number]])
            launch_us = figures.launch_kernel_us + figures.launch_wait_us
            added = program.add("sum", "compute", self._sum_us(shape, part_bytes), launch_us=launch_us, after=[here])
            if shape.operator == Operator.ALL_REDUCE:
                known = self._signal(program, f"sums {number}", [added])
                for _ in range(others):
                    self._push(program, part_bytes, [known], "copies of sums")
        return program.finish()

    def _push(self, program: Program, size_bytes: float, after: Sequence[int], term: str = "copies") -> int:
        """One copy by the copy engine, behind these."""
        figures = self.figures
        time_us = figures.copy.time_us(size_bytes) * figures.copies_beside_product + figures.stream_write_us
        launch_us = figures.launch_copy_us + figures.launch_wait_us
        return program.add(term, "push", time_us, launch_us=launch_us, after=list(after))

    def _exchanging(self, shape: Shape, rounds: int) -> Prediction:
        """Each rank's rows are pushed as they are done, then come the own ones."""
        figures, others, program = self.figures, shape.num_ranks - 1, Program()
        part_bytes, launch_us = self._block_bytes(shape) / rounds, figures.launch_kernel_us
        product_us = self.product_us(shape, shape.m / shape.num_ranks / rounds)
        arrived: list[int] = []
        for number in range(rounds):
            for _ in range(others):
                slowdown = figures.product_beside_copies if arrived else 1.0
                done = program.add("products", "compute", product_us * slowdown, launch_us=launch_us)
                arrived = [self._push(program, part_bytes, [done])]
            slowdown = figures.product_beside_copies if arrived else 1.0
            program.add("own product", "compute", product_us * slowdown, launch_us=launch_us)
            if others:
                self._signal(program, f"round {number}", arrived)
        if others:
            self._signal(program, "the end", arrived)
        return program.finish()

    def _signal(self, program: Program, stream: str, after: list[int]) -> int:
        """The peers' last copies have arrived, and a stream here knows it."""
        return program.add("signal", stream, self.figures.signal_us, after=after)

    def _gathering(self, shape: Shape, rounds: int) -> Prediction:
        """The own block's product runs while the others' blocks arrive, in so many pieces each, whose products follow."""
        figures, others, program = self.figures, shape.num_ranks - 1, Program()
        push_us = figures.copy.time_us(self._block_bytes(shape) / rounds) * figures.copies_beside_product
        slowdown = figures.product_beside_copies if others else 1.0
        arrived: list[int] = []
        for number in range(others * rounds):
            pushed = program.add("copies", "push", push_us + figures.stream_write_us, launch_us=figures.launch_copy_us)
            arrived.append(self._signal(program, f"piece {number}", [pushed]))
        rows = shape.m / shape.num_ranks
        program.add(
            "own product", "compute", self.product_us(shape, rows) * slowdown, launch_us=figures.launch_kernel_us
        )
        for number, here in enumerate(arrived):
            time_us = self.product_us(shape, rows / rounds) * (1.0 if number == len(arrived) - 1 else slowdown)
            launch_us = figures.launch_kernel_us + figures.launch_wait_us
            program.add("products", "compute", time_us, launch_us=launch_us, after=[here])
        return program.finish()


def _ceil(value: float) -> int:
    return -int(-value // 1)


def _added(*terms: tuple[str, float]) -> Prediction:
    return Prediction(sum(time_us for _, time_us in terms), tuple(term for term in terms if term[1]))
