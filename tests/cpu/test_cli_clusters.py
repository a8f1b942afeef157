"""``crossfade plan`` and ``crossfade pipeline`` for a machine that is not there, in processes of their own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.helpers.command_line import crossfade_command
from tests.helpers.two_at_a_time import Ran, two_at_a_time

GRAPHS = """
import crossfade

@crossfade.remote(num_gpus=1)
class Stage:
    def __init__(self):
        raise RuntimeError("there is no such GPU")

    def forward(self, x):
        return x

def pipeline(num_stages=4, num_microbatches=3):
    stages = [Stage.remote() for _ in range(num_stages)]
    with crossfade.InputNode() as inp:
        ends = []
        for _ in range(num_microbatches):
            value = inp
            for stage in stages:
                value = stage.forward.bind(value)
            ends.append(value)
    return crossfade.MultiOutputNode(ends)

def with_work():
    return pipeline(), crossfade.Workload(device_us={"forward": 1000.0}, value_bytes={"forward": 1_000_000})

def large():
    return pipeline(512, 4), crossfade.Workload(device_us={"forward": 1000.0}, value_bytes={"forward": 1_000_000})

def called():
    stage = Stage.remote()
    return stage.forward.bind(crossfade.get(stage.forward.remote(1)))

def compiled():
    return pipeline().compile()

def model():
    import torch
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (torch.nn.Linear(8, 8), torch.nn.Tanh())]
    return torch.nn.Sequential(*layers), (torch.randn(4, 8),)
"""

GROUP = {"name": "node", "num": 2, "num_cores": 4, "num_gpus": 2, "network": {"gbs": 10, "latency_us": 20}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("clusters")
    (folder / "graphs.py").write_text(GRAPHS)
    (folder / "cluster.json").write_text(json.dumps({"version": 1, "hosts": GROUP}))
    (folder / "large.json").write_text(json.dumps({"version": 1, "hosts": {**GROUP, "num": 64, "num_gpus": 8}}))
    (folder / "spread.json").write_text(
        json.dumps({"version": 1, "hosts": {**GROUP, "num_gpus": 0}, "placement": "spread"})
    )
    (folder / "wrong.json").write_text(json.dumps({"version": 1, "hosts": {**GROUP, "gpus": 8}}))
    (folder / "none.json").write_text(
        json.dumps({"version": 1, **{name: [] for name in ("devices", "links", "slowdowns", "crowds", "launches")}})
    )
    (folder / "work.json").write_text(json.dumps({"device_us": {"forward": 500}}))
    (folder / "costs.json").write_text(json.dumps({"step_us": -1}))
    return folder


def test_a_plan_for_a_cluster_constructs_nothing_and_says_what_bounds_it(folder: Path) -> None:
    done = crossfade_command("plan", "graphs:with_work", "--topology", "cluster.json", folder=folder)
    assert (done.returncode, done.stderr) == (0, "")
    assert "host node0 = driver, Stage0, Stage1\nhost node1 = Stage2, Stage3" in done.stdout
    assert "channel n1: Stage1 -> Stage2 | nccl" in done.stdout
    assert "12 method calls on 4 actors, 13 channels; 2 of 2 hosts and 4 of 4 GPUs" in done.stdout
    assert "What bounds it" in done.stdout
    assert "node0 -> node1" in done.stdout


def test_512_actors_are_reported_on_one_screen_and_as_json(folder: Path) -> None:
    command = ("plan", "graphs:large", "--topology", "large.json")
    done = crossfade_command(*command, folder=folder)
    assert (done.returncode, done.stderr) == (0, "")
    assert len(done.stdout.splitlines()) <= 40
    assert "512 actors compute: at least " in done.stdout
    told = json.loads(crossfade_command(*command, "--json", "--workload", "work.json", folder=folder).stdout)
    assert (told["num_actors"], len(told["actors"])) == (512, 513)
    shares = sum(each["share"] + each["handling"] for each in told["actors"]) + sum(
        each["share"] for each in told["links"]
    )
    assert shares + told["waking"] == pytest.approx(1.0)
    assert {each["host"] for each in told["actors"]} == {f"node{i}" for i in range(64)}


def test_a_pipeline_is_predicted_for_a_cluster(folder: Path) -> None:
    pytest.importorskip("torch")
    command = ("pipeline", "graphs:model", "--stages", "2", "--microbatches", "4")
    done = crossfade_command(*command, "--topology", "spread.json", folder=folder)
    assert (done.returncode, done.stderr) == (0, "")
    assert "the quickest, " in done.stdout
    assert "rank0 on node0" in done.stdout
    assert "node0 -> node1" in done.stdout


MISTAKES: list[tuple[list[str], str, str]] = [
    (["graphs:pipeline", "--topology", "nowhere.json"], "cannot read nowhere.json", "hint:"),
    (["graphs:pipeline", "--topology", "wrong.json"], "wrong.json: hosts[0] has 'gpus'", "did you mean 'num_gpus'?"),
    (["graphs:pipeline", "--topology", "none.json"], "none.json describes no hosts", "docs/clusters.md"),
    (["graphs:large", "--topology", "large.json", "--max-inflight", "65537"], "65536", "--max-inflight"),
    (["graphs:large", "--topology", "cluster.json"], "Stage4 asks for num_gpus=1, and 0 of 4 is free", "hint:"),
    (["graphs:called", "--topology", "cluster.json"], "Stage0 is on a machine that is only described", "bind"),
    (["graphs:compiled", "--topology", "cluster.json"], "only described", "before .compile()"),
    (
        ["graphs:pipeline", "--topology", "cluster.json", "--costs", "costs.json"],
        "costs.json: CostModel.step_us",
        "hint:",
    ),
    (
        ["graphs:pipeline", "--topology", "cluster.json", "--workload", "cluster.json"],
        "has 'version'",
        "it has compute_us",
    ),
]


@pytest.fixture(scope="module")
def mistakes(folder: Path) -> Iterator[Ran]:
    runs = {
        " ".join(arguments): partial(crossfade_command, "plan", *arguments, folder=folder)
        for arguments, _, _ in MISTAKES
    }
    with two_at_a_time(runs) as ran:
        yield ran


@pytest.mark.parametrize(("arguments", "said", "hint"), MISTAKES, ids=[" ".join(each[0]) for each in MISTAKES])
def test_mistakes_are_told(mistakes: Ran, arguments: list[str], said: str, hint: str) -> None:
    done = mistakes[" ".join(arguments)].result()
    assert done.returncode == 2, done.stderr
    assert said in done.stderr
    assert hint in done.stderr
