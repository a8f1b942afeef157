"""Errors that come out of our code and are not of it: a signal's handler came in between, and raised."""

from __future__ import annotations

import sys

__all__ = ["passed_through_others"]

_OWN_PACKAGES = frozenset({"crossfade", *sys.stdlib_module_names})


def passed_through_others(error: BaseException) -> bool:
    """Whether an error came through code that is neither ours nor Python's own. Its type does not tell: handlers raise ours."""
    trace = error.__traceback__
    while trace is not None:
        package = str(trace.tb_frame.f_globals.get("__name__", "")).partition(".")[0]
        if package not in _OWN_PACKAGES:
            return True
        trace = trace.tb_next
    return False
