"""The seam between the user's objects and whatever runs them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from crossfade.channels.protocol import EMPTY
from crossfade.cluster import Places
from crossfade.engines.state import State
from crossfade.errors import ChannelError
from crossfade.host.doorbell import DEFAULT_SPIN_US
from crossfade.host.loop_bell import LoopBell
from crossfade.plan.call import Call
from crossfade.plan.plan import Plan
from crossfade.plan.spans import Span

__all__ = [
    "DEFAULT_SPIN_US",
    "EMPTY",
    "READY",
    "ActorSpec",
    "ActorStatistics",
    "Arrival",
    "Engine",
    "GraphStatistics",
    "LoopBell",
    "OpenPlan",
    "PendingCall",
    "Places",
    "method_of",
]

READY = "__ray_ready__"  # a method of every actor, as in Ray: it gives True, once the actor is made


Arrival: TypeAlias = tuple[int, tuple[int, ...], Any]
"""An output that has arrived: the number of its execution, its positions among the plan's outputs, the value or a `Failure`."""


@dataclass(frozen=True, slots=True)
class ActorStatistics:
    """Counters of one party of a graph."""

    num_rounds: int = 0  # rounds of its program that it has finished
    # counters of each end, by ``"write n3"`` or ``"read n3"``.
    channels: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    host: str = ""  # where it is, if the parties are on several hosts


@dataclass(frozen=True, slots=True)
class GraphStatistics:
    """Counters of a compiled graph."""

    num_submitted: int  # executions that were started
    num_finished: int  # executions whose results have reached the driver
    num_inflight: int
    actors: Mapping[str, ActorStatistics]  # counters of each party, the driver included


@dataclass(frozen=True, slots=True)
class ActorSpec:
    """An actor that is to be started."""

    name: str
    cls: type
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    gpus: tuple[int, ...] = ()  # indices of the GPUs that the session has booked for it
    options: Mapping[str, Any] = field(default_factory=dict)  # the user's, for an engine that places actors itself


class PendingCall(Protocol):
    """An ordinary method call that is under way."""

    def is_done(self) -> bool:
        """Whether the result is there. Never blocks."""

    def wait(self, timeout_s: float | None) -> bool:
        """Waits for the result; False if the time passed."""

    def result(self) -> Any:
        """The value, or a `Failure`.

        Raises:
            ActorDiedError: the actor died before it answered.
        """


class OpenPlan(Protocol):
    """A plan whose channels are open, as the driver holds it. Submitting and collecting may happen in two threads.

    Attributes:
        number: tells the plans of an engine apart.
    """

    number: int

    def is_submitted(self, number: int, error: BaseException) -> bool | None:
        """Whether an execution is under way although `try_submit` raised that error. None if only a part of its inputs may be
        written: a signal's handler can raise anywhere.
        """

    def try_submit(self, values: Sequence[Any]) -> bool:
        """Writes the inputs of one execution, in the order of ``plan.inputs``; False if there is no room (call it again with
        the same values then).

        Raises:
            ChannelError: an actor of the plan cannot continue it; `explained` says why.
            StaticShapeError: a value is not what it was promised to be; the execution did not start.
            Exception: what pickling a value raised. If it was not the first value, the execution is under way and ends with that
                error.
        """

    def try_take(self) -> Any:
        """Returns the next value of a plan that has one output, or `EMPTY`.

        Raises:
            ChannelError: an actor of the plan cannot continue it; outputs that have arrived are returned first.
        """

    def try_collect(self) -> Sequence[Arrival]:
        """Returns the outputs that have arrived, at most one value of each. The values of one output come in the order of the
        executions, whether or not other outputs have arrived.

        Raises:
            ChannelError: as `try_take`.
        """

    def explained(self, error: ChannelError) -> Exception:
        """The reason for an error that submitting or collecting raised: an `ActorError`, or the error itself."""

    def wait_until(self, ready: Callable[[], object], timeout_s: float | None) -> bool:
        """Waits until ``ready()`` is true; False if the time passed."""

    def wait_to_collect(self, ready: Callable[[], object], place: int, timeout_s: float | None) -> bool:
        """Waits until ``ready()``, which calls `try_take` or `try_collect`, returns true; False if the time limit passed.

        While it spins, it checks only the output at ``place``: another output, which may be an error, is found once it sleeps.
        """

    def wait_beside(self, ready: Callable[[], object], timeout_s: float | None) -> bool:
        """Waits until ``ready()`` is true because of another thread, which calls `nudge` then; False if the time passed."""

    def spans(self, timeout_s: float | None = None) -> list[Span]:
        """What all parties have recorded, those that answer in time."""

    def statistics(self) -> Mapping[str, ActorStatistics]:
        """Counters of every party."""

    def check(self) -> None:
        """Raises `ActorDiedError` if an actor of the plan is gone, or `ActorError` if a living actor cannot continue."""

    def awaited(self) -> str:
        """Returns the channel by which the driver waits for the oldest missing output."""

    def nudge(self) -> None:
        """Makes the threads that wait look again."""

    def leave(self) -> None:
        """Tells the actors to leave the plan, and does not wait for it. The driver's side closes when the last one has."""

    def close(self, timeout_s: float | None = None) -> None:
        """Takes the plan from its actors and closes the channels. Idempotent; may be called again after a time-out.

        Raises:
            TeardownTimeout: an actor was still in the middle of a method when the time was over.
        """


class Engine(Protocol):
    """Runs actors."""

    name: str
    places_actors: bool  # whether it finds resources for actors itself: the session books none then

    def start_actor(self, actor: ActorSpec) -> None:
        """Starts an actor; does not wait for its constructor."""

    def call(
        self, actor: str, method: str, args: Sequence[Any], kwargs: Mapping[str, Any], num_returns: int = 1
    ) -> PendingCall:
        """Calls a method (`method_of`), after the calls that were made before. With several returns
        the result is a tuple of so many.
        """

    def ask_topology(self, actor: str) -> PendingCall:
        """The GPUs that an actor's process can see and how they are linked, nothing measured: a `crossfade.topology.Topology`."""

    def places(self, actors: Sequence[str]) -> Places:
        """Where these actors and the driver are, once they are somewhere, and the GPUs that the engine has given them: their
        indices on their host. No hosts where all are on one; nothing where the session places actors.

        Raises:
            ActorStartError, ActorDiedError: an actor is nowhere.
        """

    def open(self, plan: Plan, calls: Mapping[str, Call], *, record: bool, debug: bool = False) -> OpenPlan:
        """Gives every actor its part of the plan. ``calls`` are the arguments of its nodes. With ``record`` every party records
        what it runs, with ``debug`` every actor watches its values.

        Raises:
            ActorStartError, ActorDiedError: an actor is not there.
        """

    def kill(self, actor: str) -> None:
        """Ends an actor at once."""

    def has_ended(self, actor: str) -> bool:
        """Whether an actor is gone, or could not be started. Finds it out, also if nobody has waited for anything since."""

    def wait_until(self, ready: Callable[[], object], timeout_s: float | None) -> bool:
        """Waits until ``ready()`` is true, whatever it looks at: it is looked at again whenever something has come in.

        Returns:
            False if the time passed, or if nothing more can happen.
        """

    def loop_bell(self) -> LoopBell | None:
        """For an event loop to wait for whatever comes in; None on an engine where nothing comes by itself."""

    def look(self, timeout_s: float) -> State:
        """What all actors are doing. Takes no lock and waits for none of them longer than ``timeout_s``."""

    def disown(self) -> None:
        """This process was forked: the actors are its parent's."""

    def close(self) -> None:
        """Ends everything. Idempotent."""


def method_of(instance: object, name: str) -> Any:
    """The method of that name, of an actor's instance."""
    return _ready if name == READY else getattr(instance, name)


def _ready() -> bool:
    return True
