"""Sessions that end in the middle of everything, and storms of both kinds, many times."""

from __future__ import annotations

import os
import random
import time

import pytest

from tests.helpers.interrupt_storm import storm
from tests.helpers.kills import kill_once
from tests.helpers.session_ends import USES, end_in_the_middle, num_held

_DURATION_S = float(os.environ.get("CROSSFADE_FUZZ_S", "600"))


@pytest.mark.parametrize("kind", ["SIGINT", "SIGALRM"])
def test_a_storm_of_interrupts_loses_no_actor_and_no_value(kind: str) -> None:
    counts = storm(kind, _DURATION_S, random.randrange(1 << 32))
    print(f"{kind}: {counts}")
    assert min(counts["done"].get(use, 0) for use in ("execute", "get", "remote", "put", "teardown", "compile")) > 0


def test_a_storm_of_kills_leaves_nothing_and_names_who_died() -> None:
    deadline, victims = time.monotonic() + _DURATION_S, dict[str, int]()
    while time.monotonic() < deadline:
        victim = kill_once(random.randrange(1 << 32))
        victims[victim] = victims.get(victim, 0) + 1
    print(f"killed: {victims}")


@pytest.mark.timeout(900)
@pytest.mark.parametrize("by_signal", [False, True])
def test_sessions_end_in_the_middle_of_anything(by_signal: bool) -> None:
    end_in_the_middle(0, tuple(USES))
    num_before = num_held()
    for seed in range(1, 300):
        uses = random.Random(seed).choices(sorted(USES), k=3)
        end_in_the_middle(seed, tuple(uses), by_signal=by_signal)
        assert num_held(num_before) <= num_before, f"after seed {seed}"
