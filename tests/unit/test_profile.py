"""Calibration on GPUs with a clock and nothing else: the steps, what each measures, and what a whole one leaves behind."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import msgspec
import pytest

from crossfade.profile.calibrate import calibrate, start_from
from crossfade.profile.context import STAGED_LAYOUT
from crossfade.profile.measures import cover
from crossfade.profile.steps import COPY, NCCL, STAGED, WORKS, Step, steps_for
from crossfade.topology import LinkKind, Topology
from tests.helpers.clocked import Speeds
from tests.helpers.clocked_crew import ClockedCrew
from tests.helpers.made_up import MB, A, B, found, measured


def near(value: object) -> object:
    return pytest.approx(value, rel=1e-6)


def test_steps_of_four_gpus_the_most_useful_first() -> None:
    steps = steps_for(found(4))
    kinds = [step.measure for step in steps]
    assert kinds[:4] == ["launch"] * 4
    assert kinds[4:10] == ["signals"] * 6
    alone = steps[10:46]
    assert {(step.transport, step.transfers[0]) for step in alone} == {
        (transport, (a, b)) for transport in (COPY, STAGED, NCCL) for a in range(4) for b in range(4) if a != b
    }
    assert [(step.transport, step.work) for step in steps[46:52]] == [
        (transport, work) for transport in (COPY, STAGED, NCCL) for work in WORKS
    ]
    crowds = {(step.transport, step.transfers) for step in steps[52:]}
    assert (COPY, ((0, 1), (0, 2), (0, 3))) in crowds
    assert (NCCL, ((0, 1), (1, 2), (2, 3), (3, 0))) in crowds
    assert not any(transport == STAGED and len({a for a, _ in pairs}) < len(pairs) for transport, pairs in crowds)


def test_gpus_that_cannot_reach_each_other_are_not_copied_between() -> None:
    assert {step.transport for step in steps_for(found(2, LinkKind.HOST))} == {"", STAGED, NCCL}


def test_one_gpu_has_no_links() -> None:
    assert steps_for(found(1)) == [Step("launch", (0,))]


def test_steps_are_data_and_text() -> None:
    step = Step("beside", (0, 1), NCCL, ((0, 1),), (64 * MB,), "gemm")
    assert msgspec.convert(json.loads(json.dumps(asdict(step))), Step) == step
    assert str(step) == "nccl 0 -> 1 beside gemm"
    assert {str(each) for each in steps_for(found(3))} >= {
        "launch cost on GPU 0",
        "signals between GPU 0 and 1",
        "copy 3 at once",
    }


def test_a_launch_is_the_host_s_time() -> None:
    costs = ClockedCrew(1).run(Step("launch", (0,)))
    wanted = {"copy": 4.0, "write": 1.5, "wait": 1.5, "record": 0.5, "wait event": 0.5, "kernel": 5.0, "graph": 6.0}
    assert costs == near(wanted)


def test_a_signal_is_half_a_round_trip() -> None:
    crew = ClockedCrew(3, Speeds(memory_op_us=7.0))
    assert crew.run(Step("signals", (1, 2))) == near(7.0)
    assert crew.run(Step("signals", (0, 2))) == near(7.0)
    assert crew.run(Step("signals", (1, 2))) == near(7.0)  # the counters go on from where they are


def transfers(transport: str, *pairs: tuple[int, int], size_mb: int = 64) -> Step:
    ranks = tuple(sorted({rank for pair in pairs for rank in pair}))
    return Step("transfers", ranks, transport, pairs, (size_mb * MB,))


def staged_us(size_bytes: int) -> float:
    """Chunks go up one behind the other, a signal takes 3 us, they come down in turn; one of them holds up the rest."""
    each_us = [2 + length / 50e3 for length in STAGED_LAYOUT.lengths(size_bytes)]
    return max(sum(each_us[: number + 1]) + 3 + sum(each_us[number:]) for number in range(len(each_us)))


@pytest.mark.parametrize(
    ("step", "time_us"),
    [
        (transfers(COPY, (0, 1)), 2 + 64 * MB / 400e3),
        (transfers(COPY, (1, 0), size_mb=256), 2 + 256 * MB / 400e3),
        (transfers(COPY, (0, 1), (1, 0)), 2 + 64 * MB / 400e3),
        (transfers(COPY, (0, 1), (0, 2), (0, 3)), 3 * (2 + 64 * MB / 400e3)),
        (transfers(COPY, (1, 0), (2, 0), (3, 0)), 3 * (2 + 64 * MB / 400e3)),
        (transfers(NCCL, (0, 1)), 2 + 64 * MB / 200e3),
        (transfers(NCCL, (2, 0), (3, 0)), 2 + 128 * MB / 200e3),
        (transfers(STAGED, (0, 1), size_mb=3), staged_us(3 * MB)),
        (transfers(STAGED, (0, 1)), staged_us(64 * MB)),
    ],
    ids=str,
)
def test_transfers_take_what_they_take(step: Step, time_us: float) -> None:
    crew = ClockedCrew(4)
    assert crew.run(step) == [[step.sizes[0], near(time_us)]]


def test_staged_transfers_of_one_gpu_to_one_and_then_to_another() -> None:
    crew = ClockedCrew(3)
    first = crew.run(transfers(STAGED, (0, 1)))
    assert crew.run(transfers(STAGED, (0, 2))) == [[64 * MB, near(first[0][1])]]
    assert crew.run(transfers(STAGED, (0, 1), (1, 2), (2, 0))) == [[64 * MB, near(first[0][1])]]


SLOW = {
    ("nccl", "gemm"): 1.74,
    ("gemm", "nccl"): 1.05,
    ("gemm", "copy"): 1.02,
    ("copy", "memory"): 1.3,
    ("memory", "copy"): 1.1,
}


@pytest.mark.parametrize(
    ("transport", "work", "communication", "computation"),
    [(NCCL, "gemm", 1.74, 1.05), (COPY, "gemm", 1.0, 1.02), (COPY, "memory", 1.3, 1.1), (STAGED, "gemm", 1.0, 1.0)],
)
def test_factors_are_those_of_what_is_covered(
    transport: str, work: str, communication: float, computation: float
) -> None:
    step = Step("beside", (0, 1), transport, ((0, 1),), (64 * MB,), work)
    factors = ClockedCrew(2, Speeds(slow=SLOW)).run(step)
    assert factors == near({"communication": communication, "computation": computation})


def test_cover_outlasts() -> None:
    assert cover(100.0, 30.0, 50) == 9  # 2.5 x 100 in pieces of 30
    assert cover(100.0, 30.0, 4) == 4
    assert cover(1.0, 300.0, 50) == 1


def test_a_whole_calibration() -> None:
    topology, crew = found(4), ClockedCrew(4)
    steps = steps_for(topology)
    progress = list(calibrate(topology, steps, crew))
    assert [each.num_done for each in progress] == list(range(1, len(steps) + 1))
    assert not any(each.problem for each in progress)
    done = progress[-1].topology
    assert all(link.transports == (COPY, NCCL, STAGED) and link.signal_us == near(3.0) for link in done.links)
    assert done.link(A, B).duration_us(COPY, 64 * MB) == near(2 + 64 * MB / 400e3)
    assert {(each.transport, each.work) for each in done.slowdowns} == {
        (t, w) for t in (COPY, STAGED, NCCL) for w in WORKS
    }
    assert {launch.device for launch in done.launches} == {device.uuid for device in done.devices}
    assert max(crowd.most_out for crowd in done.crowds) == 3
    assert Topology.from_json(done.to_json()) == done
    assert crew.num_closed == 1
    assert crew.held == []
    assert all(bench.is_closed for bench in crew.benches)


def test_a_step_that_fails_does_not_stop_the_others() -> None:
    steps = steps_for(found(2))
    crew = ClockedCrew(2, problems={"copy 0 -> 1": "GPU 1 caught fire"})
    progress = list(calibrate(found(2), steps, crew))
    assert [(str(each.step), each.problem) for each in progress if each.problem] == [
        ("copy 0 -> 1", "GPU 1 caught fire")
    ]
    done = progress[-1].topology
    assert done.link(A, B).transports == (NCCL, STAGED)
    assert done.link(B, A).transports == (COPY, NCCL, STAGED)


def test_what_failed_twice_is_not_tried_again() -> None:
    steps = [step for step in steps_for(found(3)) if step.kind == ("transfers", NCCL)]
    crew = ClockedCrew(3, problems={str(step): "no NCCL here" for step in steps})
    problems = [each.problem for each in calibrate(found(3), steps, crew)]
    assert problems[:2] == ["no NCCL here"] * 2
    assert set(problems[2:]) == {"left out: the same failed before"}
    assert crew.steps == []


def test_no_step_begins_after_the_limit_and_what_came_before_is_kept() -> None:
    steps, times_s = steps_for(found(2)), iter([0.0, *range(1, 100)])
    progress = list(calibrate(found(2), steps, ClockedCrew(2), limit_s=4, clock_s=lambda: next(times_s)))
    assert [bool(each.problem) for each in progress] == [False] * 3 + [True] * (len(steps) - 3)
    assert progress[-1].problem == "left out: 4 s are over"
    assert progress[-1].topology.link(A, B).signal_us == near(3.0)


def test_an_interrupt_closes_the_crew_and_keeps_what_came() -> None:
    crew = ClockedCrew(2, problems={"copy 1 -> 0": KeyboardInterrupt()})
    kept = found(2)
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012
        for progress in calibrate(found(2), steps_for(found(2)), crew):
            kept = progress.topology
    assert crew.num_closed == 1
    assert kept.link(A, B).transports == (COPY,)


def test_older_figures_stay_where_the_machine_is_the_same() -> None:
    assert start_from(found(3), measured()) == measured()
    assert start_from(found(3), None) == found(3)
    assert start_from(found(2), measured()) == found(2)
    assert start_from(found(3, LinkKind.PCIE), measured()) == found(3, LinkKind.PCIE)
    replaced = replace(measured(), devices=(replace(measured().devices[0], name="another"), *measured().devices[1:]))
    assert start_from(found(3), replaced) == found(3)
