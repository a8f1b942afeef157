"""What driver and actor say to each other over the control socket. Descriptors travel beside the messages.

What the user gave (classes, arguments, results) is pickled by itself into ``bytes``, so that a message can always be read and
an error in the user's part becomes an answer.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from crossfade.channels.values.codec import dump_constants
from crossfade.engines.protocol import ActorStatistics
from crossfade.errors import Failure
from crossfade.host.sockets import Connection
from crossfade.plan.plan import Plan
from crossfade.plan.spans import Span


@dataclass(frozen=True, slots=True)
class Create:
    """To the actor, first of all: become this. ``payload`` holds (class, args, kwargs), ``gpus`` the indices of its GPUs."""

    actor: str
    payload: bytes
    gpus: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Created:
    """The answer: the constructor has returned, or raised."""

    failure: Failure | None


@dataclass(frozen=True, slots=True)
class Introduce:
    """To the actor: know this process. Descriptors: its doorbell's memory and eventfd, its pidfd."""

    peer: str


@dataclass(frozen=True, slots=True)
class Call:
    """To the actor: call a method. ``payload`` holds (args, kwargs). With several returns its value is taken apart there."""

    number: int
    method: str
    payload: bytes
    num_returns: int = 1


@dataclass(frozen=True, slots=True)
class AskTopology:
    """To the actor: which GPUs are there, and how are they linked?"""

    number: int


@dataclass(frozen=True, slots=True)
class Returned:
    """The answer to either: the pickled value, or the error."""

    number: int
    payload: bytes
    failure: Failure | None


@dataclass(frozen=True, slots=True)
class Constants:
    """What the user bound, pickled. Arrays in it arrive read-only, as those do that go through a channel; tensors cannot."""

    data: bytes
    buffers: tuple[bytes | bytearray, ...]

    @staticmethod
    def of(value: Any) -> Constants:
        """Raises what pickling it raises."""
        pickled = dump_constants(value)
        kinds = (bytearray if place in pickled.private else bytes for place in range(len(pickled.buffers)))
        return Constants(
            pickled.pickle, tuple(kind(buffer) for kind, buffer in zip(kinds, pickled.buffers, strict=True))
        )

    def load(self) -> Any:
        """The value, made anew."""
        return pickle.loads(self.data, buffers=self.buffers)


@dataclass(frozen=True, slots=True)
class Listen:
    """To the actor: let peers on other hosts connect to you, for a plan that is about to be opened."""

    number: int
    address: str
    key: bytes


@dataclass(frozen=True, slots=True)
class Listening:
    """The answer: on which port, or the error."""

    number: int
    port: int
    failure: Failure | None = None


@dataclass(frozen=True, slots=True)
class Addresses:
    """How parties of a plan on other hosts are reached: who is not in it connects to this party."""

    key: bytes
    of: Mapping[str, tuple[str, int]]  # address and port
    of_host: Mapping[str, str]  # the address of each host, by its name


@dataclass(frozen=True, slots=True)
class OpenPlan:
    """To the actor: take part in a plan. ``calls`` holds the arguments of its nodes, by node id.

    Descriptors: the board, the store if ``has_store``, `engines.board.device_memories` if it uses devices, then the heap of each of
    ``heaps``.
    """

    number: int
    plan: Plan
    calls: Constants
    heaps: tuple[str, ...]
    has_store: bool
    record: bool
    origin_ns: int
    debug: bool = False
    addresses: Addresses | None = None


@dataclass(frozen=True, slots=True)
class Opened:
    """The answer: its ends are open and its cursor runs."""

    number: int
    failure: Failure | None


@dataclass(frozen=True, slots=True)
class Faulted:
    """From the actor, unasked: it takes no more steps of a plan since ``at_ns`` of the monotonic clock; ``text`` says why."""

    number: int
    text: str
    at_ns: int


@dataclass(frozen=True, slots=True)
class ClosePlan:
    """To the actor: leave a plan. Nothing comes from those of ``absent``, which could not open it. It may come again, with more."""

    number: int
    absent: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Closed:
    """The answer: its ends are closed."""

    number: int


@dataclass(frozen=True, slots=True)
class Report:
    """To the actor: tell what you counted and recorded of a plan."""

    number: int
    query: int


@dataclass(frozen=True, slots=True)
class Reported:
    """The answer."""

    query: int
    spans: list[Span]
    statistics: ActorStatistics


OfPlan: TypeAlias = Listening | Opened | Faulted | Closed | Reported
"""What an actor says of a plan."""


def send(connection: Connection, message: Any, fds: tuple[int, ...] = ()) -> None:
    """Sends one message, and waits for room while the other side does not take it."""
    connection.send(pickle.dumps(message, 5), fds)


def post(connection: Connection, message: Any, fds: tuple[int, ...] = ()) -> None:
    """Queues one message without blocking; `Connection.flush` sends what has no room now."""
    connection.post(pickle.dumps(message, 5), fds)
    connection.flush()
