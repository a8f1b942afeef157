"""What this library marks in a trace of torch's profiler, and that it marks nothing without one."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch

import crossfade
from crossfade import ops, p2p, peers
from crossfade.marks import mark
from crossfade.profile.doctor.build import build
from crossfade.profile.doctor.view import View
from crossfade.profile.traces.reader import read_traces
from tests.helpers.gpu_traces import Machine, Rank


def marks_of(events: object) -> set[str]:
    return {event.name for event in events if event.name.startswith("crossfade")}  # type: ignore[attr-defined]


@pytest.mark.usefixtures("world")
def test_operators_and_collectives_and_transfers() -> None:
    a, b = torch.randn(8, 16), torch.randn(16, 8)
    all_threads = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)  # the attendant copies too
    with torch.profiler.profile(experimental_config=all_threads) as profiler, p2p.P2P() as own:
        ops.matmul_reduce_scatter(a, b)
        peers.all_gather(a)
        work = own.irecv(torch.empty_like(a), 0)
        own.send(a, 0)
        work.wait()
    found = marks_of(profiler.events())
    assert found >= {"crossfade matmul_reduce_scatter", "crossfade all_gather", "crossfade copy"}


def test_nothing_without_a_profiler() -> None:
    assert isinstance(mark("copy"), nullcontext)
    with torch.profiler.profile() as profiler:
        assert not isinstance(mark("copy"), nullcontext)
        with mark("copy"):
            pass
    assert marks_of(profiler.events()) == {"crossfade copy"}
    assert mark("copy") is mark("other")


def test_methods_of_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    class Adder:
        def add(self, x: int) -> int:
            return x + 1

    monkeypatch.setenv("CROSSFADE_NVTX", "profiler")
    crossfade.init(engine="inline")
    try:
        node = crossfade.remote(Adder).remote().add.bind(crossfade.InputNode())
        with node.compile() as graph:
            assert graph.execute(1).get() == 2
            with torch.profiler.profile() as profiler:
                assert graph.execute(2).get() == 3
        assert marks_of(profiler.events()) == {"crossfade Adder0.add (node n0)"}
    finally:
        crossfade.shutdown()


def test_the_doctor_names_them(tmp_path: Path) -> None:
    def program(rank: Rank) -> None:
        for _ in range(3):
            rank.kernel(50)
            rank.scope("crossfade copy", lambda: rank.peer_copy(100, 1 << 20))

    view = View(build(read_traces(Machine(program).save(tmp_path))))
    assert {view.name_of(number) for number in view.collectives()} == {"crossfade copy"}
    (site,) = {str(view.site(0, view.traced.calls[view.program.works[number].call])) for number in view.collectives()}
    assert site == "crossfade copy"
