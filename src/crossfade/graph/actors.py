"""What a graph knows about an actor: its methods, and the arguments that they take."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from inspect import Parameter, Signature
from math import inf
from types import FunctionType, MethodType
from typing import Any

from crossfade.graph.arguments import brief
from crossfade.hints import nearest

CONSTRUCTOR = ""
_BY_POSITION = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
_ANYTHING = [Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD]


@dataclass(frozen=True, slots=True)
class ActorInfo:
    """What a graph has to know about an actor."""

    id: str  # unique in the session, such as ``Worker0``
    class_name: str
    session: str  # the id of the session that started it
    methods: Mapping[str, int]  # the number of values that each method returns, by the method's name
    # the names of those declared with ``async def``, which cannot be called here.
    coroutines: frozenset[str] = frozenset()
    gpus: tuple[int, ...] = ()  # indices of the GPUs that it has booked
    # the arguments that the methods take; None if they are not known.
    signatures: Signatures | None = field(default=None, compare=False, repr=False)

    def check_arguments(self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Refuses arguments that the method does not take, if its signature is known. A TypeError shows the signature."""
        takes = None if self.signatures is None else self.signatures.of(method)
        if takes is not None:
            takes.check(f"{self.id}.{method}", args, kwargs)


class Signatures:
    """The arguments that the methods and the constructor of a class take. Each is looked up at its first call or bind."""

    def __init__(self, cls: type) -> None:
        self._cls = cls
        self._known: dict[str, Takes | None] = {}

    def of(self, method: str) -> Takes | None:
        """Returns what a method, or the `CONSTRUCTOR`, takes. None where Python does not tell: for builtins, or other callables."""
        if method not in self._known:
            self._known[method] = _takes(_bound(self._cls, method) if method else self._cls)
        return self._known[method]


def _bound(cls: type, method: str) -> Any:
    """Returns a method as an instance has it, or None."""
    match inspect.getattr_static(cls, method, None):
        case FunctionType() as function:
            return MethodType(function, cls)  # its first argument counts as given, whatever it is
        case staticmethod() | classmethod():
            return getattr(cls, method)
    return None


def _takes(function: Any) -> Takes | None:
    try:
        return None if function is None else Takes.of(function)
    except (TypeError, ValueError):  # it is a builtin, or its __signature__ is none
        return None


@dataclass(frozen=True, slots=True)
class Takes:
    """The arguments that a function takes."""

    signature: Signature  # its signature, from ``inspect``
    least: float  # fewer positional arguments cannot be enough without keyword arguments
    most: float  # the largest number of positional arguments that it takes

    @classmethod
    def of(cls, function: Any) -> Takes:
        """Returns the arguments that a function, a method of an instance or a class takes. Raises an error if Python does not tell.

        A wrapper with ``*args, **kwargs`` takes what the wrapped function takes, if ``functools.wraps`` names it.
        """
        signature = inspect.signature(function, follow_wrapped=False)
        if [each.kind for each in signature.parameters.values()] == _ANYTHING:
            signature = inspect.signature(function)
        parameters = signature.parameters.values()
        by_position = [each for each in parameters if each.kind in _BY_POSITION]
        needed = [each for each in parameters if each.default is each.empty and each.kind not in _ANYTHING]
        is_by_name_only = any(each.kind is Parameter.KEYWORD_ONLY for each in needed)
        takes_more = any(each.kind is Parameter.VAR_POSITIONAL for each in parameters)
        return cls(signature, inf if is_by_name_only else len(needed), inf if takes_more else len(by_position))

    def check(self, label: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Refuses arguments that do not fit. A TypeError shows the signature."""
        if not kwargs and self.least <= len(args) <= self.most:
            return  # 0.2 us; Python's own check takes ten times as long
        try:
            self.signature.bind(*args, **kwargs)
        except TypeError as error:
            problem = str(error)
        else:
            return
        raise TypeError(f"the arguments do not fit {label}: {problem}\nhint: it is {label}{self}")

    def __str__(self) -> str:
        """Returns the signature without annotations, with shortened defaults."""
        shown = [
            each.replace(
                annotation=each.empty, default=each.empty if each.default is each.empty else _Brief(each.default)
            )
            for each in self.signature.parameters.values()
        ]
        return str(Signature(shown))


class _Brief:
    """A default whose repr is short and never the user's code."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __repr__(self) -> str:
        return brief([self._value], {}, name_of=lambda leaf: None)


def unknown_method(actor: ActorInfo, method: str) -> tuple[str, str]:
    """Describes a method that the actor does not have: the problem and the hint."""
    public = [name for name in actor.methods if not name.startswith("_")]
    has = f"{actor.id} has {', '.join(public)}" if public else f"{actor.id} has no methods"
    return f"actor {actor.id} ({actor.class_name}) has no method {method!r}", nearest(method, public, has)
