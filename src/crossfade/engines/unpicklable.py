"""Which of several things cannot be pickled. The interpreter's errors say neither what nor where."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from crossfade.channels.values.codec import dump_in_band, hint_for_pickling
from crossfade.errors import Failure
from crossfade.hints import add_note
from crossfade.plan.call import Call
from crossfade.plan.plan import NodeSpec

Named: TypeAlias = Iterable[tuple[str, Any]]  # things, each behind what an error calls it

_HINT_FOR_CLASS = (
    "its methods use a value of the script that does not leave its process, as a lock or an open file: make that in the "
    "constructor, or put the class into a module, which actors import"
)


def arguments(label: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The arguments of a call, which errors call ``label``."""
    yield from ((f"argument {index} of {label}", value) for index, value in enumerate(args))
    yield from ((f"argument {name!r} of {label}", value) for name, value in kwargs.items())


def constants(nodes: Iterable[NodeSpec], calls: Mapping[str, Call]) -> Iterator[tuple[str, Any]]:
    """What was bound to the methods of nodes."""
    for node in nodes:
        call = calls[node.id]
        yield from arguments(f"{node.actor}.{node.method} (node {node.id})", call.args, call.kwargs)


def pickled_result(value: object, actor: str, label: str) -> tuple[bytes, Failure | None]:
    """What the call ``label`` returned, pickled, or why it cannot be, in the words that a graph has for that."""
    try:
        return dump_in_band(value), None
    except Exception as error:
        label, hint = f"{label}, pickling what it returned,", hint_for_pickling(error)
        return b"", Failure.capture(error, actor=actor, node=label, hint=hint)


class NotUnpickled(Exception):
    """What was bound to an actor's methods cannot be made there. The cause says why."""


class CulpritNamed:
    """A context: an error of pickling ``things`` together leaves it with a note that names the first of them which fails by itself.

    (Not `contextlib.contextmanager`, which sets an attribute of the error: some refuse that.)
    """

    def __init__(self, things: Named) -> None:
        self._things = things

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception):
            name_culprit(error, self._things)


def name_culprit(error: Exception, things: Named) -> None:
    """Adds that note. (All are pickled once more, one by one, up to the one that fails.)"""
    if isinstance(error, MemoryError):
        return
    for name, thing in things:
        if not _can_be_pickled(thing):
            hint = hint_for(error, thing)
            add_note(error, f"{name} cannot be pickled" + (f"\nhint: {hint}" if hint else ""))
            return


def hint_for(error: Exception, thing: object) -> str | None:
    """What to do about a thing that cannot be pickled; None if the error says so itself."""
    hint = hint_for_pickling(error)
    return _HINT_FOR_CLASS if hint is not None and isinstance(thing, type) else hint


def _can_be_pickled(thing: object) -> bool:
    try:
        dump_in_band(thing)
    except Exception:
        return False
    return True
