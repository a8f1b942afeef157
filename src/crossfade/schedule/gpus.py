"""GPUs in the simulator: work on streams, each piece alone on its stream, slowed down by what else its GPU and its links do.

Kernels of k actors on one GPU take k times as long each. A transfer takes what its link takes alone, times the crowding that was
measured where others leave the same GPU or reach the same one (its fair share of the busier end where none was). A kernel beside a
transfer, and a transfer beside a kernel, take the factors measured beside matrix products. A collective counts, for others, as a
transfer from each of its GPUs to the next one, and is slowed down as the slowest of these.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from crossfade.schedule import links
from crossfade.schedule.cores import Cores, Work
from crossfade.schedule.cost import CostModel
from crossfade.types import Transport

__all__ = ["Exchange", "GpuClock", "Kernels", "Push", "push_time_us"]

_MANY = 1 << 30
_BESIDE = "gemm"


@dataclass(frozen=True, slots=True)
class Kernels:
    """What a method does on its actor's GPUs."""

    gpus: tuple[int, ...]  # their indices; none for a copy to the host, which nothing slows down
    time_us: float  # how long it takes alone


@dataclass(frozen=True, slots=True)
class Push:
    """A transfer from one GPU to another."""

    transport: Transport  # by which means
    # source, target: indices of the GPUs; equal for a copy within one.
    source: int
    target: int
    size_bytes: int  # of the value

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """From one GPU to the other."""
        return [(self.source, self.target)]


@dataclass(frozen=True, slots=True)
class Exchange:
    """A collective of several GPUs, each once."""

    transport: Transport  # by which means
    gpus: tuple[int, ...]  # their indices
    size_bytes: int  # what each brings
    time_us: float  # how long it takes alone

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """From each GPU to the next one."""
        return list(zip(self.gpus, (*self.gpus[1:], self.gpus[0]), strict=True))


def push_time_us(costs: CostModel, push: Push) -> float:
    """Time of a transfer by itself: measured where that was, else by the model's figures for its transport."""
    if push.source != push.target:
        try:
            source, target = costs.gpu_uuid(push.source), costs.gpu_uuid(push.target)
            return links.alone_us(costs.topology, push.transport, source, target, push.size_bytes)
        except KeyError:
            pass  # not measured
    return costs.push_time_us(push.transport, push.size_bytes, is_within=push.source == push.target)


class GpuClock:
    """The streams of all GPUs."""

    def __init__(self, costs: CostModel) -> None:
        self._costs = costs
        self._works = Cores(_MANY)
        self._running: dict[Work, Kernels | Push | Exchange] = {}

    @property
    def num_events(self) -> int:
        """Entries that its heaps have seen."""
        return self._works.num_events

    def next_end_us(self) -> float:
        """When something ends if nothing changes before; infinity when nothing runs."""
        return self._works.next_end_us()

    def finish_next(self) -> None:
        """Ends what ends next."""
        self._works.finish_next()

    def start(self, what: Kernels | Push | Exchange, now_us: float, done: Callable[[], None]) -> None:
        """Starts work; ``done`` is called at its end."""
        self._works.advance(now_us)
        alone_us = push_time_us(self._costs, what) if isinstance(what, Push) else what.time_us
        ended = partial(self._ended, what, done)
        work = self._works.start(alone_us, ended)
        self._running[work] = what
        self._update_factors()

    def _ended(self, what: Kernels | Push | Exchange, done: Callable[[], None]) -> None:
        del self._running[next(work for work, each in self._running.items() if each is what)]
        self._update_factors()
        done()

    def _update_factors(self) -> None:
        """Gives everything that runs its factor."""
        kernels = [each for each in self._running.values() if isinstance(each, Kernels)]
        moves = [each for each in self._running.values() if not isinstance(each, Kernels)]
        for work, what in self._running.items():
            factor = (
                self._of_kernels(what, moves, kernels)
                if isinstance(what, Kernels)
                else self._of_move(what, moves, kernels)
            )
            self._works.slow_down(work, factor)

    def _of_kernels(self, what: Kernels, moves: list[Push | Exchange], kernels: list[Kernels]) -> float:
        sharing = max((sum(gpu in each.gpus for each in kernels) for gpu in what.gpus), default=1)
        beside = [
            move.transport for move in moves if not {gpu for pair in move.pairs for gpu in pair}.isdisjoint(what.gpus)
        ]
        slowdowns = (self._costs.device_slowdown(transport, _BESIDE).compute for transport in dict.fromkeys(beside))
        return sharing * max(slowdowns, default=1.0)

    def _of_move(self, what: Push | Exchange, moves: list[Push | Exchange], kernels: list[Kernels]) -> float:
        others = [self._named(pair) for move in moves if move is not what for pair in move.pairs]
        crowding = max(
            links.crowding(self._costs.topology, what.transport, self._named(pair), others, what.size_bytes)
            for pair in what.pairs
        )
        is_beside = any(gpu in each.gpus for each in kernels for pair in what.pairs for gpu in pair)
        return crowding * (self._costs.device_slowdown(what.transport, _BESIDE).transfer if is_beside else 1.0)

    def _named(self, pair: tuple[int, int]) -> tuple[str, str]:
        return self._costs.gpu_uuid(pair[0]), self._costs.gpu_uuid(pair[1])
