"""Calibration on GPUs with a clock and nothing else: benches and a crew in this thread."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import Any

from crossfade.profile.context import Context, make_shared
from crossfade.profile.crew import StepFailed
from crossfade.profile.measures import MEASURES
from crossfade.profile.steps import NCCL, Step
from tests.helpers.clocked import Clocked, ClockedDriver, Op, Speeds


class ClockedBench:
    """`crossfade.profile.bench.Bench` on the machine."""

    def __init__(self, machine: Clocked, device: int) -> None:
        self.driver = ClockedDriver(machine, device)
        self._machine = machine
        self.joined: str | None = None
        self.is_closed = False

    def now_us(self) -> float:
        return self._machine.now_us

    def pause(self) -> None:
        self._machine.now_us += 50.0

    def fill(self, address: int, size_bytes: int) -> None: ...

    def work(self, kind: str, stream: int) -> None:
        op = Op(kind, self._machine.speeds.work_us[kind], (self.driver.device,))
        self.driver.enqueue(stream, op, "kernel")

    def kernel(self, stream: int) -> None:
        self.driver.enqueue(stream, Op("kernel", 2.0), "kernel")

    def join(self, store: str, rank: int, num_ranks: int) -> None:
        self.joined = store

    def exchange(self, sends: Sequence[tuple[int, int]], receives: Sequence[tuple[int, int]], stream: int) -> None:
        assert self.joined is not None
        speeds = self._machine.speeds
        size_bytes = max(sum(size for _, size in sends), sum(size for _, size in receives))
        duration_us = speeds.overhead_us + size_bytes / speeds.nccl_gbs / 1e3
        self.driver.enqueue(stream, Op("nccl", duration_us, (self.driver.device,)), "kernel")

    def close(self) -> None:
        self.is_closed = True


class ClockedCrew:
    """`crossfade.profile.crew.Crew` in this thread. ``problems`` say what is wrong with steps, by their text."""

    def __init__(
        self, num_ranks: int, speeds: Speeds | None = None, problems: Mapping[str, str | BaseException] | None = None
    ) -> None:
        self.machine = Clocked(speeds)
        self.shared = make_shared(num_ranks)
        self.benches = [ClockedBench(self.machine, rank) for rank in range(num_ranks)]
        self.contexts = [Context(bench, rank, num_ranks, self.shared) for rank, bench in enumerate(self.benches)]
        self.steps: list[Step] = []
        self.num_meetings = 0
        self.num_closed = 0
        self._problems = dict(problems or {})

    def run(self, step: Step) -> Any:
        problem = self._problems.get(str(step))
        if isinstance(problem, BaseException):
            raise problem
        if problem is not None:
            raise StepFailed(problem)
        self.steps.append(step)
        if step.transport == NCCL and self.benches[0].joined is None:
            self._together(Step("join", tuple(range(len(self.contexts))), work="store"))
        return self._together(step)

    def _together(self, step: Step) -> Any:
        for context in self.contexts:
            context.num_meetings = self.num_meetings
        running = {rank: MEASURES[step.measure](self.contexts[rank], step) for rank in step.ranks}
        told: dict[int, Any] | None = None
        while True:
            said: dict[int, Any] = {}
            results: dict[int, Any] = {}
            for rank, generator in running.items():
                kind, value = _resume(generator, told)
                (said if kind == "say" else results)[rank] = value
            if results:
                assert not said, "ranks do not end together"
                return results[step.ranks[0]]
            told = said
            self.num_meetings += 1
            for rank in step.ranks:
                self.contexts[rank].num_meetings = self.num_meetings
            self.machine.store(self.machine.mapped(self.shared[0]), self.num_meetings, self.machine.now_us)

    def close(self) -> None:
        self.num_closed += 1
        if self.num_closed == 1:
            self._together(Step("close", tuple(range(len(self.contexts)))))
            for memory in self.shared:
                memory.close()

    @property
    def held(self) -> list[str]:
        return [each for bench in self.benches for each in bench.driver.ledger.held()]


def _resume(generator: Generator[Any, Any, Any], told: dict[int, Any] | None) -> tuple[str, Any]:
    try:
        return "say", next(generator) if told is None else generator.send(told)
    except StopIteration as stop:
        return "done", stop.value
