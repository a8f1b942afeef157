"""Processor sharing in virtual time against a fluid model that recomputes everything at every change."""

from __future__ import annotations

from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossfade.schedule.cores import Cores


@given(
    st.integers(1, 4),
    st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20), st.sampled_from([1.0, 2.0])), min_size=1, max_size=8),
)
def test_processor_sharing_equals_a_fluid_reference(num_cores: int, jobs: list[tuple[int, int, float]]) -> None:
    """Jobs are (start, work, factor); the reference recomputes everybody's rest at every change."""
    cores, ends = Cores(num_cores), dict[int, float]()

    def finish(number: int) -> None:
        ends[number] = cores.now_us

    for number, (start, work, factor) in sorted(enumerate(jobs), key=lambda job: job[1][0]):
        while cores.next_end_us() <= start:
            cores.finish_next()
        cores.advance(start)
        cores.start(work, partial(finish, number), factor)
    while cores.next_end_us() < float("inf"):
        cores.finish_next()
    for number, end in fluid(num_cores, jobs).items():
        assert ends[number] == pytest.approx(end, abs=1e-6)


def fluid(num_cores: int, jobs: list[tuple[int, int, float]]) -> dict[int, float]:
    rest = {number: work * factor for number, (_, work, factor) in enumerate(jobs)}
    now, ends = 0.0, dict[int, float]()
    while len(ends) < len(jobs):
        for number, (start, _, _) in enumerate(jobs):
            if number not in ends and start <= now and rest[number] <= 1e-9:
                ends[number] = now
        active = [number for number, (start, _, _) in enumerate(jobs) if start <= now and number not in ends]
        rate = min(1.0, num_cores / max(1, len(active)))
        changes = [start - now for start, _, _ in jobs if start > now] + [rest[number] / rate for number in active]
        if changes:
            for number in active:
                rest[number] -= rate * min(changes)
            now += min(changes)
    return ends


def test_slowing_work_down_half_way_stretches_what_is_left() -> None:
    cores, ends = Cores(1), list[float]()
    work = cores.start(10.0, lambda: ends.append(cores.now_us))
    cores.advance(4.0)
    cores.slow_down(work, 2.0)
    cores.advance(10.0)
    cores.slow_down(work, 1.0)
    cores.finish_next()
    assert ends == [pytest.approx(4 + 6 + 3)]
    assert cores.next_end_us() == float("inf")
