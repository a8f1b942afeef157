"""``crossfade bench hops``: its table, and how it measures."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import crossfade
from crossfade.api import remote
from crossfade.cli.actors import Echo
from crossfade.cli.exits import WrongResult
from crossfade.cli.measure import alone_us, in_flight_us, p99, show_us
from tests.helpers.command_line import crossfade_command


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
