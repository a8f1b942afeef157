"""Opening channels whose parties have to meet, without waiting for one that has died on the way."""

from __future__ import annotations

import threading
from collections.abc import Callable

from crossfade.engines.wiring import Wiring
from crossfade.errors import ChannelBroken
from crossfade.host.doorbell import Doorbell

__all__ = ["meet"]


def meet(make: Callable[[], Wiring], doorbell: Doorbell, who_is_gone: Callable[[], str]) -> Wiring:
    """Makes a wiring in a thread: joining a gloo group waits for all of its parties, and cannot be interrupted.

    Raises a `ChannelBroken` once ``who_is_gone`` names a party that has died; what is made afterwards is closed.
    """
    lock = threading.Lock()
    made: list[Wiring] = []
    errors: list[BaseException] = []
    is_given_up = False

    def work() -> None:
        try:
            wiring = make()
        except BaseException as error:
            errors.append(error)
        else:
            with lock:
                made.append(wiring)
            if is_given_up:
                wiring.close()
        doorbell.nudge()

    threading.Thread(target=work, name="crossfade-meet", daemon=True).start()
    doorbell.wait_until(lambda: made or errors or who_is_gone())
    if errors:
        raise errors[0]
    with lock:
        is_given_up = not made
    if is_given_up:
        raise ChannelBroken(f"the process of {who_is_gone()} is gone, and the others cannot meet without it")
    return made[0]
