"""`benchmarks.p2p_transfers` on the CPU: what it would do on two GPUs as well, with small tensors."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="measures torch.distributed's transfers")

from benchmarks import common, p2p_report
from benchmarks.p2p_pair import ACTS, Step
from benchmarks.p2p_transfers import cpu_steps, gpu_steps, run_step

OPTIONS = {"rounds": 2, "quick": True, "batch": 1}
LIMIT_S = 60.0
ALL_ACTS = tuple(ACTS)


def measured(step: Step) -> dict[str, Any]:
    result = run_step(replace(step, limit_s=LIMIT_S), "cpu", is_shared=False, options=OPTIONS)
    assert result["failed"] == "", result["failed"]
    for rows in result["sizes"].values():
        for blocks in rows.values():
            assert len(blocks) == 2
            assert all(block["right"] for block in blocks)
    return result


@pytest.mark.parametrize("is_ahead", [False, True])
def test_every_act_of_every_side_that_a_cpu_has(is_ahead: bool) -> None:
    sides = ("copies", "staged", "crossfade, backend", "gloo", "pinned copy")
    result = measured(Step("any", sides, ALL_ACTS, (4, 300_000), is_ahead=is_ahead))
    assert set(result["sizes"]) == {"4", "300000"}
    assert len(result["sizes"]["4"]) == len(sides) * len(ALL_ACTS)


def test_transfers_beside_every_load() -> None:
    loads = ("products", "ViT", "all-reduces")
    result = measured(Step("any", ("crossfade", "gloo"), (), (100_000,), loads=loads, num_beside=3))
    assert len(result["sizes"]["100000"]) == 2 * len(loads)


def test_a_step_that_hangs_keeps_the_sizes_before() -> None:
    step = Step("any", ("gloo",), ("send",), (4, 1 << 40))  # the second one does not fit anywhere
    result = run_step(replace(step, limit_s=LIMIT_S), "cpu", is_shared=False, options=OPTIONS)
    assert result["failed"]
    assert set(result["sizes"]) == {"4"}


def blocks(*seconds: float) -> list[dict[str, Any]]:
    return [{"s": second, "others": 0.01, "right": True} for second in seconds]


def beside(transfers: float, load: float) -> list[dict[str, Any]]:
    names = ("transfers alone", "load alone", "transfers beside", "load beside")
    return [{**dict(zip(names, (1.0, 10.0, transfers, load), strict=True)), "right": False}]


def test_a_report_of_two_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common, "REPORTS", tmp_path)
    size = str(64 << 20)
    steps = {
        "peer access, ahead": {size: {"copies: send": blocks(2.0), "NCCL: send": blocks(4.0), "bare copy: send": blocks(1.9)}},
        "peer access, tags": {
            str(4 << 10): {"copies: ten tags in order": blocks(1.0), "copies: ten tags in reverse": blocks(1.1)},
            str(1 << 20): {
                "copies: ten tags in order": [{**each, "among_s": 1.0} for each in blocks(1.5, 1.5)],
                "copies: ten tags in reverse": [{**blocks(2.0)[0], "among_s": 0.9}, *blocks(9.0)],
            },
        },
        "peer access, beside": {size: {"copies: products": beside(1.02, 10.1), "NCCL: products": beside(1.74, 11.0)}},
        "no peer access, three beside": {size: {"staged: products": beside(1.0, 10.0), "NCCL: products": beside(4.0, 10.0)}},
    }  # fmt: skip
    sides = ("copies", "staged", "NCCL", "bare copy")
    run = {
        "machine": {"text": "a machine", "hardware": "some", "gpus": ["NVIDIA X", "NVIDIA X"], "driver": "a driver"},
        "is_shared": False,
        "steps": {name: {"sides": sides, "failed": "", "sizes": sizes} for name, sizes in steps.items()},
    }
    paths = [tmp_path / "1.json", tmp_path / "2.json"]
    for path in paths:
        path.write_text(json.dumps(run))
    path = p2p_report.report(paths, None, "About.")
    text = path.read_text()
    assert path.name.startswith("p2p_transfers_2-nvidia-x_")
    assert "| bare copy / copies, 64 MB, ahead | at least 0.95 | 0.95 (0.95 to 0.95) |" in text
    assert "| ten tags in reverse / in order, 4 KB, whole rows | at most 1 | 1.10 (1.10 to 1.10) |" in text
    assert "| ten tags in reverse / in order, 1 MB, a ten among others | at most 1 | 0.90 (0.90 to 0.90) |" in text
    assert "| NCCL, transfers beside products / alone | (1.74 for transfers seen) | 1.74 (1.74 to 1.74) |" in text
    assert "| staged / NCCL, three transfers beside ten products | at most 0.5 | 0.25 (0.25 to 0.25) |" in text
    assert "NO, 2 of 2" in text
    assert "not measured" in text


def test_every_target_names_a_step_that_there_is() -> None:
    names = {step.name for step in gpu_steps()}
    wanted = ("ahead", "tags", "beside")
    assert {f"peer access, {name}" for name in wanted} <= names
    assert {"no peer access, ahead", "no peer access, three beside"} <= names
    assert len({step.name for step in cpu_steps()}) == len(cpu_steps())
