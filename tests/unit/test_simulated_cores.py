"""The cores of the simulator: which core work starts on, and that everything has a place of its own in the order of events."""

from __future__ import annotations

from functools import partial
from itertools import permutations

from hypothesis import given
from hypothesis import strategies as st

from crossfade.schedule.cores import Cores
from crossfade.schedule.cost import CostModel
from crossfade.schedule.gpus import Flow, GpuClock, Kernels
from crossfade.types import Transport


@given(
    num_cores=st.integers(1, 4),
    balance_us=st.sampled_from([0.0, 2.0, 1e9]),
    moves=st.lists(st.tuples(st.booleans(), st.integers(0, 4), st.booleans()), max_size=40),
)
def test_work_starts_on_the_core_that_has_least(
    num_cores: int, balance_us: float, moves: list[tuple[bool, int, bool]]
) -> None:
    """Of those that have had work, and on another one where all of these have some."""
    cores = Cores(num_cores, balance_us)
    for starts, work_us, roams in moves:
        if not starts:
            if cores.next_end_us() < float("inf"):
                cores.finish_next()
            continue
        known = {} if 0 not in cores._hosts else cores._hosts[0].cores
        loads = {number: len(core.works) for number, core in known.items()}
        least = min(loads, key=lambda number: (loads[number], number), default=None)
        if least is None or (loads[least] and len(loads) < num_cores):
            least = len(loads)
        assert cores.start(float(work_us), lambda: None, roams=roams).core.number == least


def test_what_ends_at_the_same_time_on_gpus_and_between_hosts_ends_in_some_order() -> None:
    for order in permutations(["kernels", "flow", "kernels", "flow"]):
        clock, ended = GpuClock(CostModel()), list[int]()
        for number, name in enumerate(order):
            what = Flow(Transport.TCP, f"a{number}", f"b{number}", 10, 5.0) if name == "flow" else Kernels((), 5.0)
            clock.start(what, 0.0, partial(ended.append, number))
        while clock.next_end_us() < float("inf"):
            clock.finish_next()
        assert sorted(ended) == [0, 1, 2, 3]
