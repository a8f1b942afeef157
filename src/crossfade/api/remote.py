"""Actors as the user writes them: the decorator, the class, the handle, its methods."""

from __future__ import annotations

import difflib
import inspect
import operator
import re
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NoReturn, SupportsIndex, overload

from crossfade.api.accepted import INSTEAD, RAY_ACTOR_OPTIONS, RAY_METHOD_OPTIONS, check_names
from crossfade.api.booking import amounts
from crossfade.api.refs import CallRef, resolve
from crossfade.api.session import current, require, require_same
from crossfade.engines.protocol import READY, ActorSpec
from crossfade.errors import SessionError, UnknownActor
from crossfade.graph.actors import CONSTRUCTOR, ActorInfo, Signatures
from crossfade.graph.nodes import bind
from crossfade.interrupted import uninterrupted
from crossfade.not_here import NAMES_OF_ACTORS
from crossfade.types import DRIVER

if TYPE_CHECKING:
    from crossfade.api.session import Session

_NUM_RETURNS = "__crossfade_num_returns__"
_OPTIONS = ("name", "num_cpus", "num_gpus", "resources", "get_if_exists", "runtime_env")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*\Z")


def method(*functions: Any, num_returns: int = 1, **ignored: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Declares how many values a method returns, each of which becomes a node, or a reference, of its own.

    Args:
        *functions: refused: the decorator is written with parentheses.
        num_returns: how many values.
        **ignored: options of Ray's that decide nothing here.

    Raises:
        TypeError: an unknown option, or the bare decorator.
        ValueError: ``num_returns`` is not positive.

    Example:
        >>> class Splitter:
        ...     @crossfade.method(num_returns=2)
        ...     def split(self, x):
        ...         return x[:1], x[1:]
    """
    if functions:
        raise TypeError(
            f"crossfade.method is given {functions[0]!r}\nhint: write @crossfade.method(num_returns=2); a method that returns one "
            "value needs no decorator"
        )
    check_names(ignored, ("num_returns",), RAY_METHOD_OPTIONS, "option of a method")
    num_returns = _checked_number(num_returns)

    def declare(function: Callable[..., Any]) -> Callable[..., Any]:
        setattr(function, _NUM_RETURNS, num_returns)
        return function

    return declare


def _checked_number(num_returns: object) -> int:
    if isinstance(num_returns, bool) or not isinstance(num_returns, SupportsIndex):
        raise TypeError(f"num_returns is {num_returns!r}\nhint: it is a whole number, 1 or more")
    number = operator.index(num_returns)
    if number < 1:
        raise ValueError(f"num_returns is {number}\nhint: it is 1 or more")
    return number


@overload
def remote(cls: type, /) -> ActorClass: ...
@overload
def remote(**options: Any) -> Callable[[type], ActorClass]: ...
def remote(cls: type | None = None, /, **options: Any) -> ActorClass | Callable[[type], ActorClass]:
    """Makes a class an actor class: ``Cls.remote(...)`` starts an actor, a process that holds one instance.

    Use it bare (``@crossfade.remote``) or with options (``@crossfade.remote(num_cpus=1)``).

    Args:
        cls: the class.
        **options: ``name`` is what plans, errors and `get_actor` call the actor. ``get_if_exists`` takes the living actor of that
            name instead of starting one. ``num_cpus``, ``num_gpus`` and ``resources`` are booked while it lives: whole GPUs for it
            alone, a part of a GPU beside other actors' parts. Others that Ray has go to Ray on its
            engine, and decide nothing on others; ``runtime_env`` is for that engine only.
    """
    _check_options(options)
    if cls is None:
        return lambda decorated: _actor_class(decorated, options)
    return _actor_class(cls, options)


def _actor_class(cls: object, options: Mapping[str, Any]) -> ActorClass:
    if not isinstance(cls, type):
        raise TypeError(
            f"@crossfade.remote is for classes, not for {cls!r}\nhint: make it a method of a class; a graph runs methods of actors"
        )
    return ActorClass(cls, options)


def _check_options(options: Mapping[str, Any]) -> None:
    check_names(options, _OPTIONS, RAY_ACTOR_OPTIONS, "actor option")
    amounts(options.get("num_cpus"), options.get("num_gpus"), options.get("resources"))
    asked = options.get("name")
    if asked is not None and not (isinstance(asked, str) and _NAME.match(asked)):
        raise ValueError(
            f"{asked!r} cannot be an actor's name\nhint: letters of ASCII, digits, _ and -, not starting with a digit"
        )
    if asked == DRIVER:
        raise ValueError(f"{asked!r} is the name of the driving process itself\nhint: give the actor another name")
    if options.get("get_if_exists") and asked is None:
        raise ValueError("get_if_exists needs a name\nhint: options(name=..., get_if_exists=True)")


def _methods_of(cls: type) -> dict[str, int]:
    """Public methods with their numbers of returns."""
    names = [name for name in dir(cls) if not name.startswith("__") or name == "__call__"]
    found = {name: getattr(cls, name, None) for name in names}
    return {name: getattr(value, _NUM_RETURNS, 1) for name, value in found.items() if callable(value)}


def _coroutines_of(cls: type, names: Iterable[str]) -> frozenset[str]:
    return frozenset(name for name in names if inspect.iscoroutinefunction(getattr(cls, name)))


class ActorClass:
    """What ``@crossfade.remote`` makes of a class. It cannot be instantiated here, only remotely."""

    def __init__(self, cls: type, options: Mapping[str, Any]) -> None:
        self._cls = cls
        self._options = dict(options)
        self._signatures = Signatures(cls)
        self.__name__ = cls.__name__
        self.__doc__ = cls.__doc__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Refuses: an actor class is started by ``.remote()``."""
        name = self._cls.__name__
        raise TypeError(f"{name} is an actor class\nhint: write {name}.remote(...) instead of {name}(...)")

    def options(self, **options: Any) -> ActorClass:
        """The same class with other options."""
        _check_options(options)
        return ActorClass(self._cls, {**self._options, **options})

    def remote(self, /, *args: Any, **kwargs: Any) -> ActorHandle:
        """Starts an actor. The arguments go to the constructor, which runs in the actor's process; this does not wait for it.

        Raises:
            ActorStartError: less is free than the actor books.
            TypeError: the arguments do not fit the constructor.
        """
        session, options = require(), self._options
        name: str | None = options.get("name")
        if name is not None and options.get("get_if_exists") and (found := session.find_actor(name)) is not None:
            return ActorHandle(found)
        if (takes := self._signatures.of(CONSTRUCTOR)) is not None:
            takes.check(self._cls.__name__, args, kwargs)
        booked = amounts(options.get("num_cpus"), options.get("num_gpus"), options.get("resources"))
        if session.engine.places_actors:
            booked = {}
        elif options.get("runtime_env"):
            raise TypeError(f"{name or self._cls.__name__} has a runtime_env\nhint: {INSTEAD['runtime_env']}")
        return self._start(session, name, booked, *resolve(args, kwargs))

    @uninterrupted
    def _start(
        self, session: Session, name: str | None, booked: Mapping[str, float], args: Any, kwargs: Any
    ) -> ActorHandle:
        cls = self._cls
        actor, gpus = session.enter_actor(cls.__name__, name, booked)
        try:
            methods = _methods_of(cls)
            coroutines = _coroutines_of(cls, methods)
            info = ActorInfo(actor, cls.__name__, session.id, methods, coroutines, gpus, self._signatures)
            session.engine.start_actor(ActorSpec(actor, cls, args, kwargs, gpus, self._options))
        except BaseException:
            session.forget_actor(actor, name)
            raise
        session.actors[actor] = info
        return ActorHandle(info)

    def __mro_entries__(self, bases: tuple[object, ...]) -> NoReturn:
        """Refuses: Python asks for it where an actor class is among the bases of a class."""
        name = self._cls.__name__
        raise TypeError(
            f"{name} is an actor class, from which no class can inherit\nhint: leave {name} without the decorator, inherit from "
            f"the plain class, and decorate the last one; to start {name} too, write {name}Actor = crossfade.remote({name})"
        )

    def __repr__(self) -> str:
        return f"ActorClass({self._cls.__name__})"


class ActorHandle:
    """An actor. Its attributes are its methods. Handles of one actor are equal."""

    def __init__(self, info: ActorInfo) -> None:
        self._info = info

    @property
    def _ray_actor_id(self) -> str:
        """The id under its name in Ray, which programs for Ray compare."""
        return self._info.id

    def __getattr__(self, name: str) -> ActorMethod:
        info: ActorInfo = self.__dict__["_info"]
        if name in info.coroutines:
            raise AttributeError(
                f"{info.id}.{name} is an async method, and methods of actors run one after another\nhint: make it a plain "
                "method; one that has to await something calls asyncio.run(...)"
            )
        if name in info.methods:
            return ActorMethod(info, name, None)
        if name == READY:
            return ActorMethod(info, name, 1)
        if name in NAMES_OF_ACTORS or name.startswith("__ray_"):
            hint = NAMES_OF_ACTORS.get(name, f"of Ray's own methods actors have {READY}")
            raise AttributeError(f"actor {info.id} has no {name}\nhint: {hint}")
        if name.startswith("__"):  # copy, pickle and inspect look for these
            raise AttributeError(name)
        close = difflib.get_close_matches(name, info.methods, n=1)
        public = ", ".join(method for method in info.methods if not method.startswith("_"))
        meant = f"did you mean {close[0]!r}? It" if close else "it"
        raise AttributeError(f"actor {info.id} has no method {name!r}\nhint: {meant} has {public}")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ActorHandle):
            return NotImplemented
        return (self._info.session, self._info.id) == (other._info.session, other._info.id)

    def __hash__(self) -> int:
        return hash((self._info.session, self._info.id))

    def __repr__(self) -> str:
        return f"ActorHandle({self._info.id})"

    def __reduce__(self) -> Any:
        raise TypeError(
            f"the handle of actor {self._info.id} cannot be sent to another process\nhint: connect actors by binding their "
            "methods in a graph"
        )


class ActorMethod:
    """A method of an actor: call it once with `remote`, or put it into a graph with `bind`."""

    def __init__(self, info: ActorInfo, name: str, num_returns: int | None) -> None:
        self._info = info
        self._name = name
        self._num_returns = num_returns

    def __reduce__(self) -> Any:
        raise TypeError(
            f"the method {self._name} of actor {self._info.id} cannot be sent to another process\nhint: connect actors by "
            "binding their methods in a graph"
        )

    def options(self, *, num_returns: int | None = None, **ignored: Any) -> ActorMethod:
        """The same method with other options.

        Args:
            num_returns: how many values it returns.
            **ignored: options of Ray's that decide nothing here.

        Raises:
            TypeError: an unknown option.
            ValueError: ``num_returns`` is not positive.
        """
        check_names(ignored, ("num_returns",), RAY_METHOD_OPTIONS, "option of a method")
        number = self._num_returns if num_returns is None else _checked_number(num_returns)
        return ActorMethod(self._info, self._name, number)

    def bind(self, /, *args: Any, **kwargs: Any) -> Any:
        """A node that calls the method; the arguments may be, or hold in lists, tuples and dicts, other nodes.

        Returns:
            The node (`MethodNode`); for a method with several returns a tuple of nodes (`OutputNode`), one for each.

        Raises:
            TypeError: the arguments do not fit the method.
            GraphError: a node is where it cannot be found, such as in a set; or the arguments contain themselves.
        """
        if self._name == READY:
            raise AttributeError(
                f"{READY} is no method for graphs\nhint: {READY}.remote() says when {self._info.id} is made"
            )
        return bind(self._info, self._name, *resolve(args, kwargs), self._num_returns)

    def remote(self, /, *args: Any, **kwargs: Any) -> Any:
        """Calls the method now, outside any graph. References among the arguments are waited for.

        Returns:
            A reference to the result (`CallRef`); for a method with several returns a list of them.

        Raises:
            TypeError: the arguments do not fit the method.
        """
        session = require_same(self._info.session, f"actor {self._info.id}")
        self._info.check_arguments(self._name, args, kwargs)
        num_returns = self._num_returns or self._info.methods[self._name]
        pending = session.engine.call(self._info.id, self._name, *resolve(args, kwargs), num_returns)
        label = f"{self._info.id}.{self._name}"
        if num_returns == 1:
            return CallRef(session, pending, label, None)
        return [CallRef(session, pending, label, index) for index in range(num_returns)]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Refuses: a method of an actor is called by ``.remote()`` or ``.bind()``."""
        raise TypeError(
            f"{self._info.id}.{self._name} runs on an actor\nhint: write .{self._name}.remote(...) to call it, or "
            f".{self._name}.bind(...) to put it into a graph"
        )

    def __repr__(self) -> str:
        return f"ActorMethod({self._info.id}.{self._name})"


@uninterrupted
def get_actor(name: str, namespace: str | None = None) -> ActorHandle:
    """The handle of a living actor, by its name.

    Args:
        name: what ``options(name=...)`` said, or the name that plans and errors show.
        namespace: accepted for Ray's sake; a session has one.

    Raises:
        UnknownActor: no actor of that name is alive; also a ValueError.
    """
    session = current()
    info = None if session is None else session.find_actor(name)
    if info is None:
        known = () if session is None else [actor for actor in list(session.actors) if session.find_actor(actor)]
        hint = f"alive are {', '.join(known)}" if known else "no actor of this process's session is alive"
        raise UnknownActor(f"no actor named {name!r} is alive", hint=hint)
    return ActorHandle(info)


@uninterrupted
def kill(actor: ActorHandle, *, no_restart: bool = True) -> None:
    """Ends an actor at once, whatever it is doing. Its graphs and calls raise `ActorDiedError` from now on.

    Args:
        actor: the actor.
        no_restart: accepted for Ray's sake; actors are not restarted.
    """
    if not isinstance(actor, ActorHandle):
        raise TypeError(f"{actor!r} is not an actor\nhint: pass what Cls.remote() returned")
    info = actor._info
    try:
        session = require_same(info.session, f"actor {info.id}")
    except SessionError:
        return  # it went with its session
    session.engine.kill(info.id)
