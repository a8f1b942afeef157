"""What starts the collectives of parts: a carrier starts one without waiting for it, and gives a *work*.

A work's ``wait`` makes the current stream wait (on a CPU, the caller).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol


class Work(Protocol):
    """A collective on its way."""

    def wait(self) -> Any: ...


class MethodCall(NamedTuple):
    """A call of a process group's method. ``options``: those among the arguments, or None."""

    name: str
    original: Callable[..., Any]
    group: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    options: Any


class Carrier(Protocol):
    """Starts the collectives of all parts of a run.

    Attributes:
        num_not_replayed: how many collectives were not replays of a captured graph, where there are such.
    """

    num_not_replayed: int

    def start(self, part: int, call: MethodCall) -> Any:
        """Starts what a method of a process group does; gives its work."""
        ...

    def start_packet(
        self, part: int, packet: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, Work | None]:
        """Starts a functional collective; gives its outputs, and the work if torch does not keep it with them."""
        ...


def options_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The options of a collective among the arguments of its method, or None."""
    if args and hasattr(args[-1], "asyncOp"):
        return args[-1]
    return next((each for each in (*args, *kwargs.values()) if hasattr(each, "asyncOp")), None)


def group_name(packet: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The argument that names the group; None if it is not there, or is no name."""
    names = [argument.name for argument in packet.default._schema.arguments]
    value = {**dict(zip(names, args, strict=False)), **kwargs}.get("group_name")
    return value if isinstance(value, str) else None
