"""The one hook by which ``dag.compile()`` reaches the compiler without an upward import."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from crossfade.errors import SessionError

__all__ = ["compiler", "install_compiler"]

Compiler = Callable[..., Any]


class _Installed:
    compiler: Compiler | None = None


def install_compiler(function: Compiler) -> None:
    """``function(output, **options)`` is called by ``compile`` from now on."""
    _Installed.compiler = function


def compiler() -> Compiler:
    """The installed compiler."""
    if _Installed.compiler is None:
        raise SessionError("graphs cannot be compiled yet", hint="import crossfade.api, as `import crossfade` does")
    return _Installed.compiler
