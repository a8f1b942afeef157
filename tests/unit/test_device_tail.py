"""How far the streams of one user are, beside others who go on with them: without a GPU."""

from __future__ import annotations

from crossfade.device.completion import CompletionMark
from crossfade.device.signals import HostBoard
from tests.helpers.running_driver import RunningDriver, run


def test_what_others_enqueue_is_none_of_it(driver: RunningDriver, board: HostBoard) -> None:
    """Whether or not somebody asked before its own work was over."""
    own, others, stream = board.counter(0, "own"), board.counter(1, "others"), driver.create_stream("shared")
    tail = CompletionMark(driver, [stream])
    for number, is_asked_early in enumerate([True, False, False, True, False], 1):
        own.wait(stream, number)
        tail.is_longer = True
        if is_asked_early:  # then the end of its work is marked, and the others' comes behind that
            assert not tail.has_passed()
        board.poke(0, number)
        run(driver.machine)
        assert tail.has_passed()
        others.wait(stream, number)
        assert tail.has_passed()
        board.poke(1, number)
        run(driver.machine)
        assert tail.has_passed()
    tail.close()
    assert driver.ledger.held("event") == []
