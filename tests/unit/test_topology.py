"""The measured topology: its file, and what the cost model makes of it, by figures reckoned by hand."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from crossfade.files import replace_file
from crossfade.schedule.cost import CostModel
from crossfade.topology import Rate, Topology, load_topology, save_topology, topology_path
from tests.helpers.made_up import MB, A, B, C, measured

COSTS = CostModel(topology=measured())


def test_it_comes_back_from_json_and_from_its_file(tmp_path: Path) -> None:
    assert Topology.from_json(measured().to_json()) == measured()
    path = tmp_path / "kept.json"
    assert save_topology(measured(), path) == path
    assert load_topology(path) == measured()
    assert [each.name for each in tmp_path.iterdir()] == ["kept.json"]


def test_its_usual_place_is_the_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CROSSFADE_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert load_topology() is None
    path = save_topology(measured())
    assert path == topology_path()
    assert path.parent == tmp_path / "cache" / "crossfade"
    assert load_topology() == measured()
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # the standard says to ignore it
    monkeypatch.setenv("HOME", str(tmp_path))
    assert topology_path().parent == tmp_path / ".cache" / "crossfade"


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save_topology(measured(), tmp_path / "kept.json")
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space"):
        save_topology(Topology(), path)
    assert load_topology(path) == measured()
    assert len(list(tmp_path.iterdir())) == 1


def test_without_a_home_there_is_none(no_home: None) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load_topology() is None


def test_a_symlink_stays_one(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    link = tmp_path / "link.json"
    link.symlink_to(Path("real", "kept.json"))
    for topology in (Topology(), measured()):  # the file behind it is made, then replaced
        assert save_topology(topology, link) == link
        assert link.is_symlink()
        assert load_topology(tmp_path / "real" / "kept.json") == topology
    assert [each.name for each in (tmp_path / "real").iterdir()] == ["kept.json"]


@pytest.mark.parametrize("write", [save_topology, lambda made, path: replace_file(path, made.to_json())])
def test_a_device_is_written_to(tmp_path: Path, write: Callable[[Topology, Path], object]) -> None:
    path = tmp_path / "queue"
    os.mkfifo(path)
    end = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write(measured(), path)
        assert Topology.from_json(os.read(end, 1 << 16).decode()) == measured()
    finally:
        os.close(end)
    assert path.is_fifo()


def damaged() -> list[str]:
    good = measured().to_data()
    device, crowd, launch, slowdown = (good[name][0] for name in ("devices", "crowds", "launches", "slowdowns"))
    huge = 10**400
    others = list(good["devices"][1:])
    wrong_devices: list[dict[str, object]] = [
        {"uuid": 3},
        {"uuid": []},
        {"uuid": B},
        {"name": None},
        {"num_sms": True},
        {"num_sms": 1.5},
        {"num_sms": -1},
        {"memory_bytes": "1"},
        {"memory_bytes": huge},
    ]
    whole = json.dumps(good)
    rate = {"transport": "copy", "size_bytes": 1, "duration_us": -1.0}
    link = {**good["links"][0], "rates": [rate]}
    return [
        whole[: len(whole) // 2],
        "\0" * 100,
        "[]",
        json.dumps({**good, "version": 99}),
        json.dumps({**good, "links": [link]}),
        json.dumps({**good, "links": [{**link, "rates": [{**rate, "duration_us": "10"}]}]}),
        json.dumps({**good, "links": [{**good["links"][0], "kind": "string"}]}),
        json.dumps({**good, "crowds": [{}]}),
        json.dumps({**good, "launches": 3}),
        "[" * 100_000,
        *(json.dumps({**good, "devices": [{**device, **wrong}, *others]}) for wrong in wrong_devices),
        *(
            json.dumps({**good, "links": [{**good["links"][0], **wrong}]})
            for wrong in (
                {"source": "GPU-z"},
                {"target": 3},
                {"signal_us": huge},
                {"rates": [{**rate, "duration_us": 1.0, "size_bytes": 0}]},
                {"rates": [{**rate, "duration_us": 1.0, "transport": 3}]},
            )
        ),
        *(json.dumps({**good, "slowdowns": [{**slowdown, name: 3}]}) for name in ("transport", "work")),
        *(
            json.dumps({**good, "crowds": [{**crowd, **wrong}]})
            for wrong in ({"transport": 3}, {"transfers": [[A, "GPU-z"]]}, {"transfers": [[3, B]]})
        ),
        *(
            json.dumps({**good, "launches": [{**launch, **wrong}]})
            for wrong in ({"device": "GPU-z"}, {"device": 3}, {"operation": 3})
        ),
    ]


@pytest.mark.parametrize("text", damaged(), ids=range(len(damaged())))
def test_a_damaged_file_is_warned_of_and_ignored(tmp_path: Path, text: str) -> None:
    path = tmp_path / "kept.json"
    path.write_text(text, encoding="utf-8")
    with pytest.warns(UserWarning, match="is ignored: .*; `crossfade topology` writes a new one"):
        assert load_topology(path) is None


def test_a_missing_file_is_no_warning(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load_topology(tmp_path / "none.json") is None


def test_new_rates_replace_old_ones_of_the_same_size() -> None:
    link = measured().link(A, B).with_rates([Rate("copy", MB, 11.0), Rate("copy", 2 * MB, 12.0)])
    assert [rate.duration_us for rate in link.rates if rate.transport == "copy"] == [11.0, 12.0, 20.0, 200.0]


@pytest.mark.parametrize(
    ("transport", "size_bytes", "time_us"),
    [
        ("copy", 1 * MB, 10 + 8),  # the copy, then its signal
        ("copy", 1000, 10 + 8),  # not less than the smallest size takes
        ("copy", 2 * MB, 15 + 8),  # half-way between 10 and 20
        ("copy", 128 * MB, 400 + 8),  # at the rate of the largest
        ("staged", 2 * MB, 120),  # measured with its signals
        ("nccl", 64 * MB, 300),
    ],
)
def test_a_transfer_alone(transport: str, size_bytes: int, time_us: float) -> None:
    assert COSTS.device_transfer_time_us(transport, A, B, size_bytes) == time_us


def test_a_transfer_beside_work_and_work_beside_a_transfer() -> None:
    assert COSTS.device_transfer_time_us("nccl", A, B, 64 * MB, beside="gemm") == 450.0
    assert COSTS.device_slowdown("nccl", "gemm").compute == 1.1
    assert COSTS.device_transfer_time_us("copy", A, B, 64 * MB, beside="gemm") == 208.0
    assert COSTS.device_slowdown("copy", "gemm").compute == 1.0  # 0.99 was measured: noise
    assert COSTS.device_transfer_time_us("nccl", A, B, 64 * MB, beside="memory") == 300.0  # not measured
    assert COSTS.device_slowdown("nccl", None) == COSTS.device_slowdown("staged", "gemm")


def test_several_transfers_at_once() -> None:
    def time_us(transport: str, others: list[tuple[str, str]]) -> float:
        return COSTS.device_transfer_time_us(transport, A, B, 64 * MB, others=others)

    assert time_us("copy", [(A, C)]) == 2.5 * 208  # measured: 500 against 200
    assert time_us("copy", [(B, C), (C, A)]) == 208  # neither end has another one
    assert time_us("copy", [(C, B)]) == 2 * 208  # not measured: the link into B is shared
    assert time_us("nccl", [(C, B)]) == 1.5 * 300  # measured: 450 against 300, into another GPU
    assert time_us("nccl", [(C, B), (A, C), (B, C)]) == 2 * 300


def test_what_is_not_known_is_an_error_that_says_what_is() -> None:
    with pytest.raises(KeyError, match="'gloo' was not measured from GPU-a to GPU-b; measured: copy, nccl, staged"):
        COSTS.device_transfer_time_us("gloo", A, B, 1)
    with pytest.raises(KeyError, match="no link from GPU-a to GPU-z; known devices: GPU-a, GPU-b, GPU-c"):
        COSTS.device_transfer_time_us("copy", A, "GPU-z", 1)


def test_the_cost_model_keeps_its_topology_in_json() -> None:
    assert CostModel.from_json(COSTS.to_json()) == COSTS
    with pytest.raises(ValueError, match="this is no topology"):
        CostModel.from_json('{"topology": 3}')
