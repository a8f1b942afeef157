"""Every error that crossfade raises on purpose.

::

    CrossfadeError
    ├── GraphError                a graph that cannot be compiled, a module that cannot be cut: the user's mistake; a ValueError
    │   └── UnknownTransport      a transport that does not exist, or not on this machine
    ├── PlanError                 a plan that breaks an invariant (PL-1 ...): a bug in crossfade, or in a hand-written plan
    │   └── PlanSyntaxError       a plan's text that does not parse
    ├── ActorError                something about one actor
    │   ├── ActorStartError       it could not be started, or its constructor raised
    │   └── ActorDiedError        its process is gone
    ├── TaskError                 a method raised; arrives as an instance of the method's own error type too
    ├── MutatedValueError         a value was changed after it was returned or passed; found in debug mode only
    ├── StaticShapeError          a value's tensors are not those that ``static_shape`` promised; also a ValueError
    ├── BatchesError              batches that cannot be interleaved: ranks that disagree, outputs that cannot be joined
    ├── TraceError                a file of a profiler that cannot be read, or has nothing to diagnose; also a ValueError
    ├── ChannelError              a value cannot be moved
    │   ├── ChannelClosed         closed by this side
    │   ├── ChannelBroken         closed, or broken, by the other side
    │   └── ChannelTimeout        still full or still empty when the time limit passed; also a TimedOut
    ├── CapacityExceeded          more executions in flight than the graph was compiled for
    ├── DeviceError               a GPU, or its driver, refused; or the machine cannot do what was asked
    ├── TimedOut                  a time limit passed and nothing was lost; also a TimeoutError
    │   ├── GetTimeoutError       a result was not there in time, and can be got again
    │   ├── TeardownTimeout       an actor was still busy when the time for a teardown was over
    │   └── (ChannelTimeout)
    ├── SessionError              crossfade is not initialised, or is shut down, or the object is another session's
    │   ├── GraphClosed           the graph was torn down, or its session shut down; also a ChannelClosed
    │   └── UnknownActor          no actor of that name is alive; also a ValueError
    └── MissingDependency         an optional dependency is not installed; also an ImportError

`ChannelError`, `CapacityExceeded`, `TimedOut` and `SessionError` are also a `SystemFault`, which has no public name but Ray's.
"""

from __future__ import annotations

import inspect
import pickle
import traceback
from dataclasses import dataclass
from typing import Any, Self

from crossfade.types import DRIVER
from crossfade.whole_errors import ByParts, fill, members_of, new_of, whole

__all__ = [  # what `crossfade.exceptions` has too; `Failure` is for the rooms
    "ActorDiedError",
    "ActorError",
    "ActorStartError",
    "BatchesError",
    "CapacityExceeded",
    "ChannelBroken",
    "ChannelClosed",
    "ChannelError",
    "ChannelTimeout",
    "CrossfadeError",
    "DeviceError",
    "GetTimeoutError",
    "GraphClosed",
    "GraphError",
    "MissingDependency",
    "MutatedValueError",
    "PlanError",
    "PlanSyntaxError",
    "SessionError",
    "StaticShapeError",
    "TaskError",
    "TeardownTimeout",
    "TimedOut",
    "TraceError",
    "UnknownActor",
    "UnknownTransport",
]


class CrossfadeError(Exception):
    """The root of the tree. ``hint``, where there is one, is the last line of the message."""

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        self.hint = hint
        super().__init__(message if hint is None else f"{message}\nhint: {hint}")


class GraphError(CrossfadeError, ValueError):
    """A graph that cannot be compiled, with the node's name; a module that cannot be cut; a schedule that cannot run."""


class UnknownTransport(GraphError):
    """A transport that does not exist, or not on this machine."""


class PlanError(CrossfadeError):
    """A plan that breaks a numbered invariant; the message shows the grid with an arrow at the step."""


class PlanSyntaxError(PlanError):
    """The text of a plan does not parse."""


class ActorError(CrossfadeError):
    """Something is wrong with one actor.

    Attributes:
        actor: the actor's id.
    """

    actor: str = ""

    def __init__(self, message: str, *, hint: str | None = None, actor: str = "") -> None:
        super().__init__(message, hint=hint)
        self.actor = actor

    def again(self, more: str = "") -> Self:
        """A new error that says the same, and ``more``: one object raised twice would collect tracebacks."""
        error = type(self)(f"{self}{more}", actor=self.actor)
        error.__cause__ = self.__cause__
        return error


class ActorStartError(ActorError):
    """An actor could not be started."""


class ActorDiedError(ActorError):
    """An actor's process is gone. The message gives its exit code or signal, and who waited for it."""


class SystemFault(CrossfadeError):
    """A fault of neither a method nor an actor: what ``RaySystemError`` catches."""


class ChannelError(SystemFault):
    """A value could not be moved (CH-2 tells the three kinds apart)."""


class ChannelClosed(ChannelError):
    """This side closed the channel."""


class ChannelBroken(ChannelError):
    """The other side closed the channel, or died."""


class TimedOut(SystemFault, TimeoutError):
    """A time limit passed. Nothing was lost: the same call may be made again."""


class ChannelTimeout(ChannelError, TimedOut):
    """The channel was still full, or still empty, when the time limit passed. Nothing was lost."""


class CapacityExceeded(SystemFault):
    """``execute`` was called with ``max_inflight`` results not yet got."""


class GetTimeoutError(TimedOut):
    """A result was not there within the time limit. The same reference can be got again."""


class DeviceError(CrossfadeError):
    """A GPU or its driver refused, or this machine cannot do what was asked."""


class TeardownTimeout(TimedOut):
    """A graph could not be taken from its actors within the time limit; the message says what they are doing. Call it again."""


class SessionError(SystemFault):
    """There is no session, or it is over, or the object belongs to another one."""


class GraphClosed(SessionError, ChannelClosed):
    """The graph was torn down, or its session shut down: nothing can be executed, and results that had not arrived are lost."""


class UnknownActor(SessionError, ValueError):
    """No actor of that name is alive."""


class MissingDependency(CrossfadeError, ImportError):
    """An optional dependency is missing; the message names the extra that installs it."""

    def __init__(self, package: str, *, extra: str, needed_for: str) -> None:
        super().__init__(
            f"{needed_for} needs the package {package!r}, which is not installed",
            hint=f"pip install 'crossfade[{extra}]'",
        )

    def __reduce__(self) -> Any:
        return ByParts(self).__reduce__()


class MutatedValueError(CrossfadeError):
    """A value was changed after it was returned or passed. Only graphs compiled with ``debug=True`` look for that."""


class StaticShapeError(CrossfadeError, ValueError):
    """A value promised by ``static_shape`` has tensors of another number, shape or dtype than the first one had."""


class BatchesError(CrossfadeError):
    """Batches that cannot be interleaved: the ranks disagree, outputs cannot be joined, or a gradient would be wrong."""


class TraceError(CrossfadeError, ValueError):
    """A profiler's trace that is empty, damaged, truncated, of another tool, or without what is asked for."""


class TaskError(CrossfadeError):
    """A method raised on an actor.

    What reaches the caller is an instance of this class *and*, where Python allows such a class, of the
    error's own type: ``except ValueError`` and ``except crossfade.TaskError`` both catch it.

    Attributes:
        cause: the error itself, as it arrived here, or None where it could not be pickled.
        actor: the id of the actor on which it was raised; empty for a value that its reader could not unpickle.
        node: the method and, in a graph, the id of the node: ``Parser0.parse (node n0)``.
        remote_traceback: the traceback on the actor, or in the driver where that could not unpickle a result, as text.
        message: what happened where, with the traceback, which is also what ``str`` gives; ``args`` are those of the error itself.

    Where the error's own type has an attribute of one of these names, it is the error's; but ``cause`` is always this one.
    """

    cause: BaseException | None = None
    actor: str = ""
    node: str = ""
    remote_traceback: str = ""
    message: str = ""
    _crossfade_text: str = ""

    def __str__(self) -> str:
        return self._crossfade_text

    def __reduce__(self) -> Any:
        state = {name: value for name, value in self.__dict__.items() if name != "cause"}
        return _task_error_again, (whole(self.cause), self._crossfade_text, state)


def _task_error_again(cause: BaseException | ByParts | None, message: str, state: dict[str, Any]) -> TaskError:
    """From a pickle, or for a copy (which takes no pickle of the cause): the class of both kinds is made anew."""
    if isinstance(cause, ByParts):
        cause = cause.error
    error = _task_error_like(cause, message)
    error.__dict__.update(state)
    error.cause = error.__cause__ = cause
    return error


@dataclass(frozen=True, slots=True)
class Failure:
    """An error on its way: what a channel carries in the place of a value.

    It is built where the method raised and holds nothing but bytes and text, so that it can be forwarded by
    actors which could not unpickle the error.
    """

    actor: str
    node: str
    type_name: str
    message: str
    traceback_text: str
    pickled: bytes | None
    hint: str | None = None

    @classmethod
    def capture(cls, error: BaseException, *, actor: str, node: str, hint: str | None = None) -> Failure:
        """Takes an error that was just caught. Never raises: an error that cannot be pickled travels as text. ``hint`` is for one
        that has none of its own.
        """
        text = "".join(traceback.format_exception(error))
        pickled: bytes | None
        try:
            import cloudpickle

            pickled = cloudpickle.dumps(whole(error), protocol=5)
        except Exception:
            pickled = None
        try:
            message = str(error)
        except Exception:
            message = "<its __str__ raised>"
        return cls(actor, node, type(error).__qualname__, message, text, pickled, hint)

    def to_error(self) -> BaseException:
        """The error to raise at the caller: a TaskError, of the original type too where that is possible."""
        cause = self._unpickle()
        where = "in the driver" if self.actor == DRIVER else f"on actor {self.actor}" if self.actor else ""
        place = f"{self.node} {where}".rstrip()
        headline = f"{place} raised {self.type_name}: {self.message}"
        has_frames = (
            "Traceback (most recent call last):" in self.traceback_text
        )  # an error that was never raised has none
        place = "in the driver" if self.actor == DRIVER else "on the actor" if self.actor else "where it was raised"
        message = f"{headline}\n\nTraceback {place}:\n{self.traceback_text.rstrip()}" if has_frames else headline
        if self.hint:
            message += f"\nhint: {self.hint}"
        error = _task_error_like(cause, message)
        error.cause = cause
        own_names = _own_names(cause) if cause is not None and isinstance(error, type(cause)) else set()
        values = {"actor": self.actor, "node": self.node, "remote_traceback": self.traceback_text}
        values |= {"hint": self.hint} if self.hint else {}
        for name in values.keys() - own_names:
            setattr(error, name, values[name])
        if cause is not None:
            error.__cause__ = cause
        return error

    def _unpickle(self) -> BaseException | None:
        if self.pickled is None:
            return None
        try:
            cause = pickle.loads(self.pickled)
        except (Exception, SystemExit):
            return None
        return cause if isinstance(cause, BaseException) else None


def _task_error_like(cause: BaseException | None, message: str) -> TaskError:
    """A TaskError which is also an instance of type(cause), with the attributes of ``cause``. A StopIteration is not: it would end
    the caller's loop, or its coroutine.
    """
    if isinstance(cause, TaskError | StopIteration | StopAsyncIteration) or not isinstance(cause, Exception):
        return _plain_task_error(message)
    kind = type(cause)
    try:
        # Only __str__ is ours; everything else of the error's type, its attributes included, stays as it was.
        own_names = _own_names(cause)
        body = {name: inspect.getattr_static(kind, name) for name in own_names if hasattr(kind, name)}
        body |= {"__str__": TaskError.__str__, "__module__": kind.__module__}
        both: type[TaskError] = type(f"TaskError({kind.__name__})", (TaskError, kind), body)
        error = new_of(both, cause.args)
        fill(error, cause.args, vars(cause), members_of(cause))
        if "hint" not in own_names:
            error.hint = cause.hint if isinstance(cause, CrossfadeError) else None
        if "message" not in own_names:
            error.message = message
        error._crossfade_text = message
    except (
        Exception
    ):  # a final class, a conflicting layout or a __new__ of its own: the plain kind still carries `cause`
        return _plain_task_error(message)
    return error


def _plain_task_error(message: str) -> TaskError:
    error = TaskError(message)
    error.message = error._crossfade_text = message
    return error


def _own_names(cause: BaseException) -> set[str]:
    """The attributes of a TaskError that the class of a user's error, or the error, defines itself."""
    kinds = [kind for kind in type(cause).__mro__ if kind.__module__.partition(".")[0] not in ("builtins", "crossfade")]
    own = {*vars(cause), *(name for kind in kinds for name in vars(kind))} if kinds else set()
    return own & {"actor", "node", "remote_traceback", "message", "hint"}
