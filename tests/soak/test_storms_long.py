"""Two storms, of ten minutes each: one of kills (CH-3), one of interrupts."""

from __future__ import annotations

import os
import random
import time

import pytest

from tests.helpers.kills import kill_once
from tests.helpers.storms import storm

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
