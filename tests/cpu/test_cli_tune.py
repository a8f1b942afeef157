"""``crossfade bench hops`` and ``crossfade tune``."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import crossfade
from crossfade.api import remote
from crossfade.cli.actors import Echo
from crossfade.cli.exits import UsersMistake, WrongResult
from crossfade.cli.measure import alone_us, in_flight_us, p99, show_us
from crossfade.cli.tune import fill, local_rank_of, parse_shapes
from crossfade.errors import DeviceError
from crossfade.ops.calls.job import Shape
from crossfade.ops.choice.cache import Cache
from tests.helpers.command_line import console, crossfade_command, text_of
from tests.helpers.gpus import num_gpus
from tests.helpers.programs import environment, python
from tests.helpers.tuning import SHAPE, Bench, rows


def test_bench_hops(tmp_path: Path) -> None:
    done = crossfade_command("bench", "hops", "--num", "20", "--spin-us", "0", folder=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    rows = re.findall(r"│ (\S.*?) +│ +(\d+) │ +([0-9.,]+) │ +([0-9.,]+) │", done.stdout)
    assert len(rows) == 7
    for _, num, median_us, p99_us in rows:
        assert int(num) in (10, 20)
        assert 0 < float(median_us.replace(",", "")) <= float(p99_us.replace(",", ""))
    assert re.search(r"8 in flight through one actor: [0-9,]+ executions a second", done.stdout)


def test_figures() -> None:
    assert p99([*range(100)]) == 99
    assert p99([*range(1000)]) == 990
    assert p99([7.0]) == 7.0
    assert [show_us(time_us) for time_us in (1.234, 12.34, 123.4, 12345.6)] == ["1.23", "12.3", "123", "12,346"]


def test_results_are_looked_at_and_come_in_order(inline: None) -> None:
    with remote(Echo).remote().echo.bind(crossfade.InputNode()).compile() as graph:
        assert len(alone_us(graph, [1, 2, 3], int.__eq__)) == 3
        times_us, results = in_flight_us(graph, [*range(7)], 3)
        assert results == [*range(7)]
        assert sorted(times_us) == times_us
        with pytest.raises(WrongResult, match="the result for 2 is 2"):
            alone_us(graph, [1, 2], lambda sent, got: got == 1)


PREDICTED = {"rounds(rounds=1)": 1300.0, "plain": 1660.0}
pytestmark = pytest.mark.timeout(60)


@pytest.mark.skipif(num_gpus() > 0, reason="there are GPUs here, which tests/gpu2 tune for")
def test_without_a_gpu_it_says_so_and_writes_nothing(tmp_path: Path) -> None:
    command = ("-m", "crossfade", "tune", "8192,8192,7168", "--operator", "matmul_all_reduce")
    ran = python(*command, env=environment(CROSSFADE_CACHE_DIR=str(tmp_path / "cache")))
    assert ran.returncode == 2
    assert ran.stderr.splitlines()[0] in (
        "error: there is no GPU here to tune for",
        "error: tuning needs the package 'torch', which is not installed",
    )
    assert ran.stderr.splitlines()[1].startswith("hint: ")
    assert (ran.stdout, list(tmp_path.iterdir())) == ("", [])


def test_shapes() -> None:
    shapes = parse_shapes(["8192,8192,7168", "1,2,3"], "float16", "nn")
    assert shapes("matmul_all_reduce", 4) == [
        Shape("matmul_all_reduce", 8192, 8192, 7168, "float16", "nn", 4),
        Shape("matmul_all_reduce", 1, 2, 3, "float16", "nn", 4),
    ]


@pytest.mark.parametrize("text", ["", "1,2", "1,2,3,4", "1,2,x", "1,2,-3", "1,0,3", "1, 2,3", "1,2,²", "1.0,2,3"])
def test_what_is_no_shape(text: str) -> None:
    with pytest.raises(UsersMistake, match=r"is no shape\nhint: M,N,K of each GPU"):
        parse_shapes(["1,2,3", text], "bfloat16", "nt")


def test_types_and_layouts_that_are_not_there() -> None:
    with pytest.raises(UsersMistake, match=r"there is no type 'float8' here\nhint: one of bfloat16"):
        parse_shapes(["1,2,3"], "float8", "nt")
    with pytest.raises(UsersMistake, match="'tn' is no layout"):
        parse_shapes(["1,2,3"], "bfloat16", "tn")


def test_torchrun_is_known_by_all_that_it_sets() -> None:
    variables = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "MASTER_ADDR": "host", "MASTER_PORT": "1"}
    assert local_rank_of(variables) == 1
    for name in variables:
        assert local_rank_of({key: value for key, value in variables.items() if key != name}) is None


def test_it_tunes_prints_and_keeps(tmp_path: Path) -> None:
    out = console()
    bench = Bench({"rounds(rounds=1)": 1400.0, "plain": 1638.0}, {**PREDICTED, "rounds(rounds=2)": 1310.0})
    fill(out, bench.tuner(cache=Cache("device", 4, "v1", tmp_path)), [SHAPE, rows(512)])
    text = text_of(out)
    failed = "rounds(rounds=2) is left out: it failed on rank 0: RuntimeError: no kernel for rounds(rounds=2)"
    assert f"{SHAPE}: {failed}" in text
    assert re.search(rf"{re.escape(str(SHAPE))} │ rounds\(rounds=1\) │ +1,400 │ +1,300 │ 1,638 │ 1\.17", text)
    assert Cache("device", 4, "v1", tmp_path).load(rows(512)) is not None
    later, silent = Bench({}, PREDICTED), console(is_quiet=True)
    fill(silent, later.tuner(cache=Cache("device", 4, "v1", tmp_path)), [SHAPE, rows(512)])
    assert (later.log, text_of(silent)) == ([], "")


def test_again_measures_what_was_measured(tmp_path: Path) -> None:
    bench = Bench({"plain": 1.0}, PREDICTED)
    tuner = bench.tuner()
    fill(console(), tuner, [SHAPE])
    num = len(bench.log)
    fill(console(), tuner, [SHAPE], again=True)
    assert len(bench.log) == 2 * num


def test_a_shape_that_cannot_be_tuned_does_not_stop_the_others() -> None:
    out = console()
    bench = Bench({"plain": 9.0}, PREDICTED)
    bench.fails_on = rows(100)
    fill(out, bench.tuner(), [rows(100), SHAPE])
    assert "not tuned: no way to do matmul_reduce_scatter 100,8192,7168" in text_of(out)
    assert "│ plain" in text_of(out)


def test_when_nothing_could_be_tuned_that_is_an_error() -> None:
    out = console()
    with pytest.raises(DeviceError, match=r"no shape could be tuned\nhint: the lines above say why"):
        fill(out, Bench({}, PREDICTED).tuner(), [SHAPE])
    assert "no kernel for plain" in text_of(out)
