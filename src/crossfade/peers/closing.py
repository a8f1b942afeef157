"""How ranks meet before a group is closed: hosts write and read words, so that no stream takes a close for an exchange.

Each rank has a word to every other one, which only grows. A rank that has *come* takes part in no exchange any more::

    this rank            streams have run dry | COME to all | read the words and signals of all, until all have come | free
    one that is ahead    full to all | wait for this rank's full ...

All that others had set for this rank's exchanges is cleared when its streams have run dry. If a signal is set afterwards, its rank
is *ahead*: it has begun a collective that this one has not made before it closed. Then nobody is waited for any more, as after an
error of this rank's own: those that have not come are told so, and their streams are released while they take what is set. First
mark, then release, as after a death (`crossfade.device.watchdog`): a rank finds the word before it trusts a result. Exchanges are
not counted instead, for replays of captured ones pass no host.
"""

from __future__ import annotations

import time

from crossfade.host.semaphore import full_fence
from crossfade.peers.lane import NUM_EPOCHS
from crossfade.peers.memory import GroupMemory

COME, LEFT, AHEAD = 1, 2, 3
"""Words to a rank. ``LEFT``: this rank has closed and did not wait for that one. ``AHEAD``: and that one had begun a collective."""
PAUSE_S = 0.0005
"""Between two looks at what the others say."""
HINT = "each rank makes the same collectives before it closes the group"
_QUIET_S, _MOST_S = 0.05, 2.0
"""Others are released until they have taken nothing for so long, and no longer than that."""
_ANY_STEP = 1 << 30  # of a signal: above all that are waited for


class Closing:
    """One rank's words and signals, as its host sees them."""

    def __init__(self, memory: GroupMemory, num_lanes: int) -> None:
        self._boards = {peer: memory.boards[peer] for peer in memory.peers}
        own, num_signals = memory.boards[memory.rank], NUM_EPOCHS * num_lanes * memory.num_ranks
        self._outgoing = range(memory.rank, num_signals, memory.num_ranks)
        self._place = num_signals + memory.rank
        self._words = {peer: own.peeker(num_signals + peer) for peer in memory.peers}
        self._incoming = {
            peer: [own.peeker(index) for index in range(peer, num_signals, memory.num_ranks)] for peer in memory.peers
        }
        self._fence = full_fence()

    def told(self, word: int) -> list[int]:
        """The ranks that have said this to this one, or more."""
        return [peer for peer, read in self._words.items() if read() >= word]

    def absent(self) -> list[int]:
        """The ranks that have not come."""
        return [peer for peer, read in self._words.items() if not read()]

    def ahead(self) -> list[int]:
        """The ranks that have begun an exchange after this rank's last one; what those set that left is no exchange."""
        begun = [peer for peer, signals in self._incoming.items() if any(read() for read in signals)]
        self._fence()
        return [peer for peer in begun if self._words[peer]() < LEFT]

    def come(self) -> None:
        """Tells all ranks; this rank's streams have run dry. Idempotent."""
        self._fence()
        for peer in self._boards:
            self._tell(peer, COME)

    def leave(self) -> None:
        """This rank is closed, whoever has come; the others are released."""
        begin = last = time.monotonic()
        while (absent := self.absent()) and (now := time.monotonic()) < min(last + _QUIET_S, begin + _MOST_S):
            ahead = self.ahead()
            for peer in absent:
                self._tell(peer, AHEAD if peer in ahead else LEFT)
                if self._release(peer):
                    last = now
            time.sleep(PAUSE_S)
        self.come()

    def _tell(self, peer: int, word: int) -> None:
        board = self._boards[peer]
        board.poke(self._place, max(word, board.peek(self._place)))

    def _release(self, peer: int) -> bool:
        """Sets what a rank that was told may wait for; whether something was not set."""
        self._fence()
        board = self._boards[peer]
        cleared = [index for index in self._outgoing if not board.peek(index)]
        for index in cleared:
            board.poke(index, _ANY_STEP)
        return bool(cleared)
