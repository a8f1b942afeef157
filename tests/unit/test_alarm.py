"""An alarm wakes a loop that sleeps at its doorbell, also when it is asked for in the middle of the wait."""

from __future__ import annotations

import time

from crossfade.engines.alarm import Alarm
from crossfade.host.doorbell import Doorbell

LIMIT_S = 10.0
NUM_ROUNDS = 20


def test_it_wakes_again_and_again_for_who_asks_while_it_waits(doorbell: Doorbell) -> None:
    alarm, due_s = Alarm(doorbell), 0.0
    num_looks = 0

    def ready() -> bool:
        """As a push that is held: asks anew until its time is over."""
        nonlocal num_looks
        num_looks += 1
        left_s = due_s - time.monotonic()
        if left_s > 0:
            alarm.wake_in(left_s)
        return left_s <= 0

    for _ in range(NUM_ROUNDS):
        due_s = time.monotonic() + 0.002
        assert doorbell.wait_until(ready, LIMIT_S)
        assert time.monotonic() < due_s + LIMIT_S / 2
    assert num_looks < 10 * NUM_ROUNDS  # it slept


def test_the_first_of_several_times_counts(doorbell: Doorbell) -> None:
    alarm, begin_s = Alarm(doorbell), time.monotonic()
    for delay_s in (LIMIT_S, 0.001, 2 * LIMIT_S):
        alarm.wake_in(delay_s)
    assert doorbell.wait_until(lambda: time.monotonic() > begin_s + 0.001, LIMIT_S)
    assert time.monotonic() < begin_s + LIMIT_S / 2
