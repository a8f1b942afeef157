"""The processes of a calibration: they meet, and none is left behind however a step or its owner ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import crossfade
from crossfade.host.processes import await_end, open_pidfd
from crossfade.profile.calibrate import calibrate
from crossfade.profile.crew import Processes, StepFailed
from crossfade.profile.steps import Step
from tests.helpers.made_up import found

ROOT = Path(__file__).resolve().parents[2]
SOURCE = Path(crossfade.__file__).parents[1]
MODULE = "tests.helpers.profile_worker"
LIMIT_S = 20.0

pytestmark = pytest.mark.timeout(90)


@pytest.fixture
def crew() -> Iterator[Processes]:
    made = Processes(2, MODULE)
    yield made
    made.close()


def both(measure: str, limit_s: float = LIMIT_S) -> Step:
    return Step(measure, (0, 1), limit_s=limit_s)


def ends(pids: list[int]) -> list[int]:
    """Descriptors by which to see the ends of processes."""
    return [open_pidfd(pid) for pid in pids]


def are_gone(pidfds: list[int]) -> bool:
    gone = all(await_end(pidfd, 10) for pidfd in pidfds)
    for pidfd in pidfds:
        os.close(pidfd)
    return gone


def test_ranks_meet_and_the_gate_counts_the_meetings(crew: Processes) -> None:
    seen = crew.run(both("meets"))
    assert seen == [[[[0, [0, n]], [1, [1, n]]], n + 1, n + 1] for n in range(3)]
    assert [count for _, _, count in crew.run(both("meets"))] == [4, 5, 6]
    assert crew.num_started == 2


@pytest.mark.parametrize(
    ("measure", "limit_s", "complaint"),
    [
        ("raises", LIMIT_S, "GPU 1: ValueError: the second one is bad"),
        ("dies", LIMIT_S, "the process of GPU 1 ended: it was killed by SIGKILL; about to go"),
        ("hangs", 2.0, "hangs took over 2 s: waited for GPU 1"),
        ("unheard", LIMIT_S, "GPU 0: KeyError: 'unheard'"),
    ],
)
def test_a_step_that_fails_ends_all_and_the_next_one_starts_anew(
    crew: Processes, measure: str, limit_s: float, complaint: str
) -> None:
    before = ends(crew.run(both("pids")))
    with pytest.raises(StepFailed, match=complaint.replace("(", r"\(")):
        crew.run(both(measure, limit_s) if measure != "unheard" else Step(measure, (0,)))
    assert are_gone(before)
    assert crew.pids == []
    assert len(set(crew.run(both("pids")))) == 2
    assert crew.num_started == 4


def test_no_process_and_no_descriptor_is_left(crew: Processes) -> None:
    num_open = len(os.listdir("/proc/self/fd"))
    running = ends(crew.run(both("pids")))
    crew.close()
    assert are_gone(running)
    assert len(os.listdir("/proc/self/fd")) == num_open


def test_a_calibration_goes_on_behind_a_step_that_killed_its_processes(crew: Processes) -> None:
    steps = [Step("launch", (0,)), both("dies"), Step("launch", (1,))]
    progress = list(calibrate(found(2), steps, crew))
    assert ["killed by SIGKILL" in each.problem for each in progress] == [False, True, False]
    assert {launch.device for launch in progress[-1].topology.launches} == {"GPU-a", "GPU-b"}
    assert crew.pids == []


PROGRAM = """
import sys
from crossfade.profile.calibrate import calibrate
from crossfade.profile.crew import Processes
from crossfade.profile.steps import Step
from tests.helpers.made_up import found
crew = Processes(2, "tests.helpers.profile_worker")
print(*crew.run(Step("pids", (0, 1))), flush=True)
for progress in calibrate(found(2), [Step("hangs", (0, 1), limit_s=60)], crew, before=lambda step: print("begun", flush=True)):
    pass
"""


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGKILL])
def test_processes_end_with_their_owner(ending: signal.Signals) -> None:
    path = os.pathsep.join((str(SOURCE), str(ROOT)))
    owner = subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert owner.stdout is not None
    with owner.stdout:
        running = ends([int(pid) for pid in owner.stdout.readline().split()])
        assert owner.stdout.readline() == "begun\n"
        owner.send_signal(ending)
        owner.wait(20)
        assert are_gone(running)
