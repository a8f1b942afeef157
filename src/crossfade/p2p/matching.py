"""Which send meets which receive, of one pair of ranks. Pure: letters and calls in, matches out.

The k-th send with a tag meets the k-th receive with that tag, whatever comes in between with other tags. Each rank decides this by
itself, from what it does and from what the other's letters say, in their order; so there is nothing to lock, and a rank that dies
leaves nothing half done.

A receive whose memory the sender can reach may be *posted*: its letter says where. A sender that has read the letter pushes, and
says so; a sender that has not announces its value, and the letter of the receive reaches it too late. It knows that by counting:
a letter says how many announcements its writer had read, and an announcement after those, with the same tag, is the one that the
receive meets. (That a device has copied an announced value says the same, but too soon: the letter of a receive may be on its way.)
Only a prefix of the waiting receives of a tag is posted, so that no posted one overtakes one that is not.
"""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

A = TypeVar("A")
"""An announced value."""
P = TypeVar("P")
"""A posted receive, as the sender knows it."""
R = TypeVar("R")
"""A receive that waits."""


class Outgoing(Generic[P]):
    """The sends to one rank."""

    def __init__(self) -> None:
        self._posted: dict[int, deque[P]] = {}
        self._num_announced = 0
        # Numbers, counted from 1, and tags of announcements that the receiver is not known to have read, and no receive met.
        self._unread: deque[tuple[int, int]] = deque()

    def send(self, tag: int) -> P | None:
        """A send begins. The receive that it meets; None if it is announced instead."""
        posted = self._posted.get(tag)
        if posted is None:
            self._num_announced += 1
            self._unread.append((self._num_announced, tag))
            return None
        met = posted.popleft()
        if not posted:
            del self._posted[tag]
        return met

    def on_posted(self, tag: int, num_read: int, receive: P) -> None:
        """The letter of a posted receive came, whose writer had read so many announcements."""
        self.on_read(num_read)
        for known in self._unread:
            if known[1] == tag:  # it meets this one, and the receiver finds that out by itself
                self._unread.remove(known)
                return
        self._posted.setdefault(tag, deque()).append(receive)

    def on_read(self, num_read: int) -> None:
        """A letter says that the receiver has read so many announcements."""
        while self._unread and self._unread[0][0] <= num_read:
            self._unread.popleft()

    @property
    def is_empty(self) -> bool:
        """Whether nothing is remembered."""
        return not (self._posted or self._unread)


class Incoming(Generic[A, R]):
    """The receives from one rank."""

    def __init__(self) -> None:
        self.num_read = 0  # announcements
        self.num_unposted = 0  # receives that wait and are not posted
        self._announced: dict[int, deque[A]] = {}
        self._waiting: dict[int, deque[tuple[R, bool]]] = {}  # with whether it is posted

    def receive(self, tag: int, receive: R, *, is_postable: bool) -> tuple[A | None, bool]:
        """A receive begins. The announced value that it meets, if there is one, and whether it is to be posted."""
        announced = self._announced.get(tag)
        if announced is not None:
            met = announced.popleft()
            if not announced:
                del self._announced[tag]
            return met, False
        waiting = self._waiting.setdefault(tag, deque())
        is_posted = is_postable and (not waiting or waiting[-1][1])
        waiting.append((receive, is_posted))
        self.num_unposted += not is_posted
        return None, is_posted

    def on_announced(self, tag: int, value: A) -> R | None:
        """A value was announced. The receive that it meets, if one waits."""
        self.num_read += 1
        met = self._pop(tag)
        if met is None:
            self._announced.setdefault(tag, deque()).append(value)
        return met

    def on_pushed(self, tag: int) -> R | None:
        """A value was pushed into a posted receive: which one; None if there is none, which the sender must not say."""
        return self._pop(tag)

    def _pop(self, tag: int) -> R | None:
        waiting = self._waiting.get(tag)
        if waiting is None:
            return None
        met, is_posted = waiting.popleft()
        self.num_unposted -= not is_posted
        if not waiting:
            del self._waiting[tag]
        return met

    def has(self, tag: int) -> bool:
        """Whether a value with a tag was announced that no receive has met."""
        return tag in self._announced

    def put_back(self, tag: int, value: A) -> R | None:
        """The receive that has met a value does not take it. The next one that waits, which meets it now, if there is one."""
        met = self._pop(tag)
        if met is None:
            self._announced.setdefault(tag, deque()).appendleft(value)
        return met

    def cancel(self, tag: int, receive: R) -> bool:
        """Takes back one that is not posted; False if it does not wait."""
        waiting = self._waiting.get(tag, deque())
        if (receive, False) not in waiting:
            return False
        waiting.remove((receive, False))
        self.num_unposted -= 1
        if not waiting:
            del self._waiting[tag]
        return True

    def waiting(self) -> list[R]:
        """All that wait."""
        return [receive for each in self._waiting.values() for receive, _ in each]

    def withdraw(self) -> list[R]:
        """Takes back all that wait: nothing comes any more."""
        waiting = self.waiting()
        self._waiting.clear()
        self.num_unposted = 0
        return waiting

    @property
    def is_empty(self) -> bool:
        """Whether nothing is remembered."""
        return not (self._announced or self._waiting)
