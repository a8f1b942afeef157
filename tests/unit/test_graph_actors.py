"""What methods take: arguments that do not fit are refused with the signature, all others are let through."""

from __future__ import annotations

import functools
import timeit
from typing import Any

import pytest

import crossfade
from crossfade.graph.actors import CONSTRUCTOR, ActorInfo, Signatures
from crossfade.graph.nodes import InputNode, bind


def passing(function: Any) -> Any:
    @functools.wraps(function)
    def outside(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return outside


def giving_three(function: Any) -> Any:
    @functools.wraps(function)
    def outside(self: Any, x: Any) -> Any:
        return function(self, x, 3)

    return outside


class Awkward:
    def __repr__(self) -> str:
        raise RuntimeError("never to be called")


AWKWARD = Awkward()


class Base:
    def __init__(self, rank: int, size: int = 1) -> None:
        pass

    def inherited(self, x: Any) -> None: ...


class Methods(Base):
    def none(self) -> None: ...
    def one(self, x: Any, factor: float = 2.0) -> None: ...
    def by_position(self, x: Any, /, y: Any = None) -> None: ...
    def by_name(self, x: Any, *, scale: Any, shift: Any = AWKWARD) -> None: ...
    def anything(self, *args: Any, **kwargs: Any) -> None: ...
    def some(self, x: Any, *rest: Any) -> None: ...
    def __call__(self, x: Any) -> None: ...

    @staticmethod
    def static(x: Any) -> None: ...

    @classmethod
    def of_class(cls, x: Any) -> None: ...

    @passing
    def wrapped(self, x: Any) -> None: ...

    @giving_three
    def changed(self, x: Any, three: int) -> None: ...

    @crossfade.method(num_returns=2)
    def two(self, x: Any) -> None: ...

    partial = functools.partialmethod(one, 1)
    builtin = dict.get
    kind = Awkward
    without_self = lambda: None  # noqa: E731


NAMES = [name for name in dir(Methods) if not name.startswith("__") or name == "__call__"]
INFO = ActorInfo("M0", "Methods", "s", dict.fromkeys(NAMES, 1), signatures=Signatures(Methods))


@pytest.mark.parametrize(
    ("method", "args", "kwargs"),
    [
        ("none", (), {}),
        ("one", (1,), {}),
        ("one", (1, 2), {}),
        ("one", (1,), {"factor": 3}),
        ("one", (), {"factor": 3, "x": 1}),
        ("by_position", (1, 2), {}),
        ("by_position", (1,), {"y": 2}),
        ("by_name", (1,), {"scale": 2}),
        ("by_name", (), {"scale": 2, "x": 1, "shift": 3}),
        ("anything", (1, 2, 3), {"k": 4}),
        ("some", (1, 2, 3), {}),
        ("__call__", (1,), {}),
        ("inherited", (1,), {}),
        ("static", (1,), {}),
        ("of_class", (1,), {}),
        ("wrapped", (1,), {}),
        ("changed", (1,), {}),
        ("two", (1,), {}),
        ("partial", (), {}),
        ("builtin", (1, 2, 3, 4, 5), {"k": 6}),
        ("kind", (1, 2, 3, 4, 5), {}),
        ("without_self", (), {}),
    ],
)
def test_arguments_that_fit(method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    assert bind(INFO, method, args, kwargs)
    inp = InputNode()
    assert bind(INFO, method, tuple(inp for _ in args), {name: [inp] for name in kwargs})


@pytest.mark.parametrize(
    ("method", "args", "kwargs", "says"),
    [
        ("none", (1,), {}, "too many positional arguments\nhint: it is M0.none()"),
        ("one", (), {}, "missing a required argument: 'x'\nhint: it is M0.one(x, factor=2.0)"),
        ("one", (1, 2, 3), {}, "too many positional arguments\n"),
        ("one", (1,), {"faktor": 3}, "got an unexpected keyword argument 'faktor'\n"),
        ("one", (1,), {"x": 3}, "multiple values for argument 'x'\n"),
        ("by_position", (), {"x": 1}, "'x'"),
        ("by_name", (1,), {}, "'scale'\nhint: it is M0.by_name(x, *, scale, shift=<Awkward>)"),
        ("by_name", (1, 2), {}, "too many positional arguments\n"),
        ("some", (), {}, "'x'\nhint: it is M0.some(x, *rest)"),
        ("__call__", (), {}, "'x'\nhint: it is M0.__call__(x)"),
        ("inherited", (1, 2), {}, "hint: it is M0.inherited(x)"),
        ("static", (), {}, "hint: it is M0.static(x)"),
        ("of_class", (1, 2), {}, "hint: it is M0.of_class(x)"),
        ("wrapped", (1, 2), {}, "hint: it is M0.wrapped(x)"),
        ("changed", (1, 2), {}, "hint: it is M0.changed(x)"),
        ("two", (), {}, "hint: it is M0.two(x)"),
    ],
)
def test_arguments_that_do_not_fit(method: str, args: tuple[Any, ...], kwargs: dict[str, Any], says: str) -> None:
    with pytest.raises(TypeError) as caught:
        bind(INFO, method, args, kwargs)
    assert str(caught.value).startswith(f"the arguments do not fit M0.{method}: ")
    assert says in str(caught.value)


@pytest.mark.parametrize(("cls", "fits", "wrong"), [(Base, (1, 2), ()), (Awkward, (), (1,)), (dict, (1, 2, 3), None)])
def test_arguments_of_constructors(cls: type, fits: tuple[Any, ...], wrong: tuple[Any, ...] | None) -> None:
    takes = Signatures(cls).of(CONSTRUCTOR)
    assert (takes is None) == (wrong is None)
    if takes is not None and wrong is not None:
        takes.check(cls.__name__, fits, {})
        with pytest.raises(TypeError, match=rf"hint: it is {cls.__name__}\("):
            takes.check(cls.__name__, wrong, {})


def test_each_signature_is_looked_up_once_and_calls_are_hardly_slower() -> None:
    takes = Signatures(Methods)
    assert takes.of("one") is takes.of("one")
    assert takes.of("builtin") is takes.of("no such thing") is None
    each_us = min(timeit.repeat(lambda: INFO.check_arguments("one", (1,), {}), number=1_000, repeat=20)) * 1e3
    assert each_us < 20  # 0.3 us on a machine that does nothing else
