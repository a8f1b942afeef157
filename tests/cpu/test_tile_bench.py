"""`benchmarks.tile_ops` on two CPU processes, and its crew when a rank fails or hangs."""

from __future__ import annotations

import json
import multiprocessing
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="ranks take torch tensors")

from benchmarks import tile_crew, tile_mlp, tile_ops
from benchmarks.tile_crew import Crew
from benchmarks.tile_report import text_of
from benchmarks.workers import ROOT, Worker, WorkerFailed
from tests.helpers.device_pair import context
from tests.helpers.warm import TORCH_AND_COMPILERS, WarmProgram

OPTIONS = ["--quick", "--operators", "rs", "ag"]


class WarmWorker(Worker):
    """Forked off a process that has torch."""

    def _begin(self, command: Sequence[str], variables: Mapping[str, str]) -> Any:
        return WarmProgram(TORCH_AND_COMPILERS, command[1:], ROOT, dict(variables), self._errors)


@pytest.fixture(autouse=True)
def warm_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tile_crew, "Worker", WarmWorker)


def test_a_run_in_small(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "out.jsonl"
    assert tile_ops.main(["run", str(path), *OPTIONS]) == 0
    rows = [each for each in map(json.loads, path.read_text().splitlines()) if "key" in each]
    assert [each["row"]["operator"] for each in rows] == ["matmul_reduce_scatter"] * 2 + ["all_gather_matmul"] * 2
    for each in rows:
        names = ["cuBLAS", "NCCL", "copy engines", "cuBLAS + NCCL", "plain", "crossfade"]
        assert all(len(each["sides"][name]["eager"]) == 2 for name in names)
        assert all(each["sides"]["rounds(rounds=1)"][mode] for mode in ("eager", "captured"))
        assert each["choice"]["is_tuned"]
    size = path.stat().st_size
    assert tile_ops.main(["run", str(path), *OPTIONS]) == 0
    assert path.stat().st_size == size  # nothing was left to do
    assert "crossfade" in capsys.readouterr().out


def test_candidates_alone_beside_bare_calls(tmp_path: Path) -> None:
    path, asked = tmp_path / "out.jsonl", ["rounds(rounds=2)", "rounds(rounds=2, lag=1)"]
    more = ["--candidates", ";".join([*asked, "rounds"]), "--only-candidates"]
    assert tile_ops.main(["run", str(path), "--quick", "--operators", "rs", "ar", "ag", "a2a", *more]) == 0
    rows = [each for each in map(json.loads, path.read_text().splitlines()) if "key" in each]
    assert len(rows) == 9
    for each in rows:
        assert {*asked, "rounds(rounds=1)", "cuBLAS + NCCL"} <= set(each["sides"])
        assert "crossfade" not in each["sides"]
        chunked = [side for name, side in each["sides"].items() if name.startswith("chunked")]
        assert chunked or each["row"]["m"] == 32  # too short to be cut
        assert all(side["eager"] and "right" not in side["errors"] for side in chunked)
        assert not any(each["sides"][name]["errors"] for name in asked)
        assert all(each["sides"][name][mode] for name in asked for mode in ("eager", "captured"))
        assert not each["choice"]["is_tuned"]
    assert "rounds(rounds=2, lag=1)" in text_of(rows)
    with pytest.raises(SystemExit, match="there are none"):
        tile_ops.main(["run", str(path), "--quick", "--only-candidates"])


@pytest.fixture
def crew() -> Iterator[Crew]:
    crew = Crew(2, "cpu", {"measure": "join"}, "tests.helpers.stuck_rank")
    yield crew
    crew.close()


def test_a_rank_that_hangs_ends_all(crew: Crew) -> None:
    assert [each["rank"] for each in crew.ask({"measure": "row"}, 60)] == [0, 1]
    assert crew.joined[0]["machine"] == "a machine, store1"
    with pytest.raises(WorkerFailed, match=r"no answer within 0\.2 s"):
        crew.ask({"measure": "row", "hanging": [1]}, 0.2)
    assert crew.doing() == "rounds|captured"
    assert [each["rank"] for each in crew.ask({"measure": "row"}, 60)] == [0, 1]
    assert crew.joined[0]["machine"] == "a machine, store2"


def test_a_rank_that_fails_does_not_leave_the_other_waiting(crew: Crew) -> None:
    crew.ask({"measure": "row"}, 60)
    begin = time.monotonic()
    with pytest.raises(WorkerFailed, match="no memory"):
        crew.ask({"measure": "row", "failing": 0, "hanging": [1]}, 60)
    assert time.monotonic() - begin < 30


def test_a_block_in_small(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    assert tile_mlp.main(["run", str(path), "--quick", "--blocks", "gated", "--candidates", "rounds"]) == 0
    *rows, about = map(json.loads, path.read_text().splitlines())
    assert [list(each["sides"]) for each in rows] == [
        ["products alone", "cuBLAS + NCCL", "cuBLAS + NCCL, weight gradients beside", "crossfade", "rounds"]
    ]
    assert all(0 < side["worst"] < 0.01 for name, side in rows[0]["sides"].items() if name != "products alone")
    assert len(rows[0]["choice"]["chosen"]) == 4
    assert "machine" in about
    assert all("64, 32, 48, gated" in table.markdown() for table in tile_mlp.tables(rows)[:2])


@pytest.mark.parametrize("is_eager", [False, True])
def test_a_few_repetitions_with_delays_find_nothing_wrong(is_eager: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import tile_repetitions

    forking = context()
    monkeypatch.setattr(multiprocessing, "get_context", lambda _: forking)
    found = tile_repetitions.run(24, 2, is_quick=True, is_eager=is_eager)
    assert [each["wrong"] for each in found] == [{}, {}]
