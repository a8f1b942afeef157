"""Threads that wait for other ranks while the communicator is closed."""

from __future__ import annotations

import threading

import pytest

pytest.importorskip("torch", reason="crossfade.p2p")

from crossfade.errors import ChannelClosed
from crossfade.host.memory import Memory
from crossfade.p2p.board import Alarm, BoardLayout, format_board
from crossfade.p2p.waiting import Waiting


@pytest.mark.timeout(20)
@pytest.mark.parametrize("num_threads", [1, 3])
def test_threads_that_wait_hear_that_it_was_closed(num_threads: int) -> None:
    """One of them sleeps on the alarm, the others beside it."""
    layout = BoardLayout(1)
    board = Memory.create("p2p", layout.size_bytes)
    alarm = Alarm(format_board(board, layout))
    waiting = Waiting(alarm, {"rank 0": alarm}, lambda: False, lambda: False, {}, lambda rank: None)
    said: list[Exception] = []
    asleep = threading.Semaphore(0)

    def wait() -> None:
        def ready() -> bool:
            asleep.release()
            return False

        try:
            waiting.until_met(ready, 15, "a send to nobody")
        except ChannelClosed as error:
            said.append(error)

    threads = [threading.Thread(target=wait) for _ in range(num_threads)]
    for thread in threads:
        thread.start()
    for _ in threads:
        asleep.acquire()
    waiting.close()
    for thread in threads:
        thread.join()
    assert [str(each).splitlines()[0] for each in said] == [
        "the communicator was closed while this thread waited"
    ] * num_threads
    with pytest.raises(ChannelClosed):
        waiting.until(lambda: False, 1, lambda: "waits")
    board.close()
