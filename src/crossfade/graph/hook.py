"""The one hook of this room: a compiler of graphs installs itself here, and ``node.compile()`` finds it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from crossfade.errors import SessionError

Compiler = Callable[..., Any]
"""Called with the output of the graph, and options as keyword arguments; returns the compiled graph."""


class _Hook:
    installed: Compiler | None = None


def install_compiler(function: Compiler) -> None:
    """Makes ``function`` what ``node.compile()`` calls; the one before it, if any, is forgotten."""
    _Hook.installed = function


def compiler() -> Compiler:
    """The installed compiler. Raises a `SessionError` if there is none."""
    if _Hook.installed is None:
        raise SessionError(
            "no compiler is installed, so the graph stays a description",
            hint="`import crossfade.api` installs it, as does any name that is taken from `crossfade` itself",
        )
    return _Hook.installed
