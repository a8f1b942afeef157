"""A session that ends while threads use it: each gets an error of ours, and nothing stays. The long counts are in tests/soak."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.helpers.session_ends import USES, end_in_the_middle, num_held

pytestmark = pytest.mark.timeout(90)

QUICK = ("execute", "get", "wait", "await")
SLOW = ("compile", "start", "dump", "ask")


def children() -> list[str]:
    return Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()


@pytest.mark.parametrize("uses", [QUICK, SLOW], ids=lambda uses: "-".join(uses))
def test_whoever_uses_a_session_that_ends_is_told_and_nothing_stays(uses: tuple[str, ...]) -> None:
    assert set(QUICK + SLOW) == set(USES)
    end_in_the_middle(0, uses)
    num_before, before = num_held(), children()
    for seed in range(1, 4):
        end_in_the_middle(seed, uses)
    assert num_held() <= num_before
    assert children() == before


@pytest.mark.parametrize("use", ["execute", "get", "compile"])
def test_a_signal_s_handler_may_end_the_session(use: str) -> None:
    end_in_the_middle(0, (use, "get"), by_signal=True)
    num_before = num_held()
    for seed in range(1, 3):
        end_in_the_middle(seed, (use, "get"), by_signal=True)
    assert num_held() <= num_before
