"""Two GPUs or more: a whole calibration, its time, and whether its figures can be true."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

pytest.importorskip("torch")

from rich.console import Console

from crossfade.cli.topology import run_steps
from crossfade.device.capabilities import read_topology
from crossfade.profile.calibrate import calibrate
from crossfade.profile.crew import Processes
from crossfade.profile.steps import COPY, NCCL, STAGED, WORKS, Step, steps_for
from crossfade.schedule.cost import CostModel
from crossfade.topology import LinkKind, Topology, load_topology

MB = 1 << 20
LIMIT_S = 120.0


@pytest.mark.timeout(180)
def test_a_whole_calibration_takes_less_than_two_minutes_and_its_figures_can_be_true(tmp_path: Path) -> None:
    found, path = read_topology(), tmp_path / "topology.json"
    crew = Processes(len(found.devices))
    console = Console(record=True, width=160)
    begin = time.monotonic()
    run_steps(console, found, crew, path, 110.0)
    taken_s = time.monotonic() - begin
    shown = console.export_text()
    print(f"{taken_s:.1f} s\n{shown}")
    assert taken_s < LIMIT_S
    assert "not measured" not in shown
    assert crew.num_started == len(found.devices)  # nothing failed, so nothing was started anew
    measured = load_topology(path)
    assert measured is not None
    assert measured.devices == found.devices
    _check_links(measured)
    _check_the_rest(measured)


def _check_links(measured: Topology) -> None:
    uuids = [device.uuid for device in measured.devices]
    assert {(link.source, link.target) for link in measured.links} == {(a, b) for a in uuids for b in uuids if a != b}
    for link in measured.links:
        ends = f"{link.source} -> {link.target}: {link}"
        has_peer_access = link.kind is not LinkKind.HOST
        assert set(link.transports) == ({COPY, STAGED, NCCL} if has_peer_access else {STAGED, NCCL}), ends
        assert link.signal_us is not None, ends
        assert 0.5 < link.signal_us < 100, ends
        for rate in link.rates:
            assert 0.5 < rate.duration_us < 1e6, ends
        if link.kind is LinkKind.NVLINK:
            copy = next(rate for rate in link.rates if (rate.transport, rate.size_bytes) == (COPY, 64 * MB))
            assert copy.rate_gbs > 50, ends
            assert copy.rate_gbs < 2000, ends


def _check_the_rest(measured: Topology) -> None:
    assert {(each.transport, each.work) for each in measured.slowdowns} >= {
        (t, w) for t in (STAGED, NCCL) for w in WORKS
    }
    for slowdown in measured.slowdowns:
        assert 0.7 < slowdown.communication < 30, slowdown
        assert 0.7 < slowdown.computation < 10, slowdown
    assert {launch.device for launch in measured.launches} == {device.uuid for device in measured.devices}
    assert all(0.05 < launch.duration_us < 1000 for launch in measured.launches), measured.launches
    assert any(crowd.transfers[0] == crowd.transfers[1][::-1] for crowd in measured.crowds)
    costs, link = CostModel(topology=measured), measured.links[0]
    alone_us = costs.device_transfer_time_us(NCCL, link.source, link.target, 64 * MB)
    assert costs.device_transfer_time_us(NCCL, link.source, link.target, 64 * MB, beside="gemm") >= alone_us


def test_a_process_that_dies_costs_one_step() -> None:
    """The next step runs in new processes, on the same devices."""
    found = read_topology()
    crew = Processes(len(found.devices))
    steps = [step for step in steps_for(found, [STAGED]) if step.kind == ("transfers", STAGED)][:2]

    def kill_once(step: Step) -> None:
        if step is steps[0]:
            os.kill(crew.pids[step.ranks[1]], signal.SIGKILL)

    crew.run(steps_for(found)[0])
    progress = list(calibrate(found, steps, crew, before=kill_once))
    assert "killed by SIGKILL" in progress[0].problem
    assert not progress[1].problem
    assert crew.pids == []
