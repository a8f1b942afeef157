"""When tests allow more time."""

from __future__ import annotations

import os

import pytest

from tests.helpers import crowded


@pytest.mark.parametrize(
    ("load", "stolen", "all_", "factor"), [(0.1, 2, 100, 1), (0.1, 3, 100, 5), (1e6, 0, 100, 5), (0.1, 0, 0, 1)]
)
def test_a_machine_is_crowded_by_its_own_load_or_by_its_host(
    monkeypatch: pytest.MonkeyPatch, load: float, stolen: int, all_: int, factor: int
) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (load, load, load))
    monkeypatch.setattr(crowded, "_AT_FIRST", (1000, 5000))
    monkeypatch.setattr(crowded, "_ticks", lambda: (1000 + stolen, 5000 + all_))
    assert crowded.limit_s(2.0) == 2.0 * factor


def test_the_system_says_what_was_stolen() -> None:
    stolen, of_all = crowded._ticks()
    assert 0 <= stolen < of_all
