"""Errors on their way from an actor to the caller: what they are, and what they keep."""

from __future__ import annotations

import copy
import errno
import os
import pickle
from collections.abc import Callable
from typing import Any

import pytest

from crossfade.errors import CrossfadeError, DeviceError, Failure, MissingDependency, TaskError


class OfTwo(Exception):
    """Its constructor takes what is not its ``args``."""

    def __init__(self, path: str, line: int) -> None:
        super().__init__(f"{path}:{line}")
        self.path, self.line = path, line


class OfOne(Exception):
    def __init__(self, code: int) -> None:
        super().__init__(f"code {code}")
        self.code = code


class OfKeywords(ValueError):
    def __init__(self, *, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Slotted(Exception):
    __slots__ = ("place",)

    def __init__(self, place: int) -> None:
        super().__init__()
        self.place = place


class Missing(OSError):
    def __init__(self, name: str) -> None:
        super().__init__(errno.ENOENT, "is not there", name)


class OfAService(Exception):
    """Its attributes have the names of a TaskError's."""

    def __init__(self, message: str, node: str) -> None:
        super().__init__(message, node)
        self.message, self.node = message, node

    @property
    def hint(self) -> str:
        return f"ask {self.node}"


class Final(Exception):
    """Nothing can inherit from it, and it has an attribute of a TaskError's name."""

    node = "of its own"

    def __init_subclass__(cls) -> None:
        raise TypeError("final")


class OfOurs(CrossfadeError):
    def __init__(self, actor: str) -> None:
        super().__init__("so", hint="ask it")
        self.actor = actor


class Counted(Exception):
    num_made = 0

    def __init__(self) -> None:
        type(self).num_made += 1


class OfItsOwn(Exception):
    """It says how it is pickled."""

    def __init__(self, one: int, other: int) -> None:
        super().__init__(one + other)

    def __reduce__(self) -> Any:
        return OfItsOwn, (1, 2)


class Unpicklable(Exception):
    def __init__(self) -> None:
        super().__init__("it holds a function of its own")
        self.what = (number for number in range(2))


def raised(error: BaseException) -> Callable[[], None]:
    def run() -> None:
        raise error

    return run


def arrived(run: Callable[[], object]) -> tuple[BaseException, Any]:
    """What was raised, and what the caller is told."""
    try:
        run()
    except BaseException as error:
        failure = Failure.capture(error, actor="A0", node="A0.f (node n0)")
        return error, pickle.loads(pickle.dumps(failure)).to_error()
    raise AssertionError("it did not raise")


@pytest.mark.parametrize(
    ("error", "names"),
    [
        (OfTwo("a.txt", 3), ("path", "line")),
        (OfOne(7), ("code",)),
        (OfKeywords(reason="so"), ("reason",)),
        (Slotted(5), ("place",)),
        (OfAService("quota exceeded", "gateway-7"), ("message", "node", "hint")),
        (OfOurs("a person"), ("actor", "hint")),
        (Missing("a.txt"), ("errno", "strerror", "filename")),
        (MissingDependency("numpy", extra="array", needed_for="it"), ("hint",)),
        (DeviceError("no memory", hint="free some"), ("hint",)),
        (UnicodeDecodeError("utf-8", b"abc", 1, 2, "so"), ("encoding", "object", "start", "end", "reason")),
        (ExceptionGroup("both", [ValueError(1), KeyError(2)]), ()),
        (KeyError("a"), ()),
        (MemoryError(), ()),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_error_keeps_its_type_and_what_it_has(error: Exception, names: tuple[str, ...]) -> None:
    _, came = arrived(raised(error))
    for each in (came, came.cause):
        assert isinstance(each, type(error))
        assert repr(each.args) == repr(error.args)
        for name in names:
            assert getattr(each, name) == getattr(error, name)
    assert isinstance(came, TaskError)
    assert came.__cause__ is came.cause
    assert str(came).startswith(f"A0.f (node n0) on actor A0 raised {type(error).__name__}")


def test_an_error_of_ours_that_the_user_pickles_has_its_hint() -> None:
    for error in (
        DeviceError("no memory", hint="free some"),
        MissingDependency("numpy", extra="array", needed_for="it"),
    ):
        came = pickle.loads(pickle.dumps(error))
        assert (type(came), str(came), came.hint) == (type(error), str(error), error.hint)


@pytest.mark.parametrize(
    ("run", "names"),
    [
        (lambda: os.stat("/no/such/file"), ("errno", "strerror", "filename")),
        (lambda: os.rename("/no/such/file", "/no/other"), ("filename", "filename2")),
        (lambda: __import__("no_such_module"), ("name", "msg")),
        (lambda: (1).foo, ("name",)),  # type: ignore[attr-defined]
        (lambda: eval("no_such_name"), ("name",)),
        (lambda: compile("1 +", "a.py", "exec"), ("filename", "lineno", "text")),
        (lambda: int("x"), ()),
    ],
)
def test_what_the_interpreter_keeps_outside_args_arrives(run: Callable[[], object], names: tuple[str, ...]) -> None:
    error, came = arrived(run)
    for name in names:
        assert getattr(came, name) == getattr(came.cause, name) == getattr(error, name)
    assert came.args == error.args


def test_a_constructor_is_not_called_again() -> None:
    error, came = arrived(raised(Counted()))
    assert isinstance(came, type(error))
    assert Counted.num_made == 1


def test_who_says_how_it_is_pickled_is_pickled_so() -> None:
    _, came = arrived(raised(OfItsOwn(3, 4)))
    assert isinstance(came, OfItsOwn)
    assert came.args == (3,)


@pytest.mark.parametrize(
    "error", [StopIteration(5), StopAsyncIteration(), SystemExit(3), KeyboardInterrupt(), GeneratorExit()]
)
def test_what_would_end_the_caller_s_loop_or_program_is_a_task_error_and_no_more(error: BaseException) -> None:
    _, came = arrived(raised(error))
    assert type(came) is TaskError
    with pytest.raises(TaskError):
        raised(came)()


def test_what_cannot_be_pickled_arrives_as_text() -> None:
    _, came = arrived(raised(Unpicklable()))
    assert type(came) is TaskError
    assert came.cause is None
    assert "it holds a function of its own" in str(came)


@pytest.mark.parametrize(
    "again",
    [copy.copy, copy.deepcopy, lambda error: pickle.loads(pickle.dumps(error))],
    ids=["copy", "deepcopy", "pickle"],
)
@pytest.mark.parametrize(
    "error", [ValueError("so"), Missing("a.txt"), OfTwo("a.txt", 3), StopIteration(1), DeviceError("no")]
)
def test_what_the_caller_is_told_can_be_copied_and_pickled(error: Exception, again: Any) -> None:
    _, came = arrived(raised(error))
    other = again(came)
    assert type(other).__mro__[1:] == type(came).__mro__[1:]
    for name in ("args", "message", "actor", "node", "remote_traceback", "hint"):
        assert getattr(other, name, None) == getattr(came, name, None)
    assert str(other) == str(came)
    assert type(other.cause) is type(came.cause)
    assert other.__cause__ is other.cause


def test_an_error_that_is_passed_on_by_another_actor_is_its_own_type_there_and_a_task_error_here() -> None:
    _, first = arrived(raised(ValueError("so")))
    _, second = arrived(raised(first))
    assert isinstance(second, TaskError)
    assert isinstance(second.cause, ValueError)
    assert isinstance(second.cause, TaskError)


def test_what_cannot_be_inherited_from_is_told_with_its_place() -> None:
    _, came = arrived(raised(Final("so")))
    assert type(came) is TaskError
    assert (came.node, came.actor) == ("A0.f (node n0)", "A0")
