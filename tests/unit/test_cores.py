"""The shared cores against a plain model that recomputes everything at every change."""

from __future__ import annotations

from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossfade.schedule.cores import Cores

Job = tuple[int, int, float, bool]
"""Start, work, factor, whether it roams."""


@given(
    st.integers(1, 4),
    st.sampled_from([0, 3, 1_000]),
    st.lists(
        st.tuples(st.integers(0, 20), st.integers(1, 20), st.sampled_from([1.0, 2.0]), st.booleans()),
        min_size=1,
        max_size=8,
    ),
)
def test_shared_cores_equal_a_plain_reference(num_cores: int, balance_us: int, jobs: list[Job]) -> None:
    cores, ends = Cores(num_cores, balance_us), dict[int, float]()

    def finish(number: int) -> None:
        ends[number] = cores.now_us

    for number, (start, work, factor, roams) in sorted(enumerate(jobs), key=lambda job: job[1][0]):
        while cores.next_end_us() <= start + 1e-9:
            cores.finish_next()
        cores.advance(start)
        cores.start(work, partial(finish, number), factor, roams=roams)
    while cores.next_end_us() < float("inf"):
        cores.finish_next()
    for number, end in plain(num_cores, balance_us, jobs).items():
        assert ends[number] == pytest.approx(end, abs=1e-6)


def plain(num_cores: int, balance_us: int, jobs: list[Job]) -> dict[int, float]:
    """Each core is a list of jobs; the rest of every job is kept, and reduced at every change."""
    coming = sorted(enumerate(jobs), key=lambda job: job[1][0])
    rest = {number: work * factor for number, (_, work, factor, _) in coming}
    cores: list[list[int]] = [[] for _ in range(num_cores)]
    idle_since = [0.0] * num_cores
    now, ends = 0.0, dict[int, float]()

    def take_over(place: int) -> None:
        crowded = [core for core in cores if len(core) > 1]
        with_roaming = [core for core in crowded if any(jobs[number][3] for number in core)]
        core = max(with_roaming or crowded, key=len)
        number = next((number for number in core if jobs[number][3]), core[-1])
        core.remove(number)
        cores[place].append(number)

    while len(ends) < len(jobs):
        changes = [coming[0][1][0] - now] if coming else []
        changes += [rest[number] * len(core) for core in cores for number in core]
        if any(len(core) > 1 for core in cores):
            changes += [
                max(0.0, since + balance_us - now) for core, since in zip(cores, idle_since, strict=True) if not core
            ]
        step = min(changes)
        for core in cores:
            for number in core:
                rest[number] -= step / len(core)
        now += step
        for place, core in enumerate(cores):
            for number in [number for number in core if rest[number] < 1e-9]:
                core.remove(number)
                ends[number] = now
                if not core:
                    idle_since[place] = now
                    if any(len(c) > 1 and any(jobs[n][3] for n in c) for c in cores):
                        take_over(place)
                break
            else:
                continue
            break
        else:
            due = [
                place
                for place, core in enumerate(cores)
                if not core and idle_since[place] + balance_us <= now + 1e-9 and any(len(c) > 1 for c in cores)
            ]
            if due:
                take_over(due[0])
            elif coming and coming[0][1][0] <= now + 1e-9:
                min(cores, key=len).append(coming.pop(0)[0])
    return ends


@pytest.mark.parametrize(
    ("work_us", "balance_us", "roams", "ends_us"),
    [
        (10.0, 1e9, False, [10.0, 20.0, 20.0]),
        (10.0, 0.0, False, [10.0, 15.0, 15.0]),
        # At 14, seven of the ten are done of both; the idle core takes one of them over.
        (10.0, 4.0, False, [10.0, 17.0, 17.0]),
        (10.0, 1e9, True, [10.0, 15.0, 15.0]),
    ],
)
def test_three_pieces_of_work_on_two_cores(
    work_us: float, balance_us: float, roams: bool, ends_us: list[float]
) -> None:
    cores, ends = Cores(2, balance_us), list[float]()
    for _ in range(3):
        cores.start(work_us, lambda: ends.append(cores.now_us), roams=roams)
    while cores.next_end_us() < float("inf"):
        cores.finish_next()
    assert ends == pytest.approx(ends_us)


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
