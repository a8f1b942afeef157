"""Options of ``compile``, in our spelling and in Ray's."""

from __future__ import annotations

import operator
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from crossfade.api.accepted import check_names, check_timeout
from crossfade.api.context import DAGContext
from crossfade.hints import check_flag

_RAY_NAMES = {
    "_submit_timeout": "submit_timeout",
    "_max_inflight_executions": "max_inflight",
    "_overlap_gpu_communication": "overlap",
}
_RAY_ONLY = (
    "_buffer_size_bytes",
    "_max_buffered_results",
    "_default_communicator",
    "enable_asyncio",
    "_asyncio_max_queue_size",
)

MAX_INFLIGHT = 1 << 16
"""Most executions under way: every slot of every ring takes 1 KiB of shared memory when the graph is compiled."""


@dataclass(frozen=True, slots=True)
class CompileOptions:
    """How to compile a graph.

    Attributes:
        max_inflight: how many executions may be under way, that is, submitted and not collected; at most 65536.
        overlap: start receives early and let sends trail where a transport works in the background. Never changes a result.
        buffer_bytes: size of the slots to set aside for each channel when the graph is compiled (``max_inflight`` slots each). By
            default slots are made, and their memory touched, when the first value needs them.
        submit_timeout: the longest ``execute`` waits for room, in seconds; None for ever.
        record: record what runs when, for ``graph.timeline()``; about 0.3 us an action.
        debug: find values that are changed after they were returned or passed (`MutatedValueError`), by comparing digests of all
            values, which is slow. By default what the environment variable ``CROSSFADE_DEBUG`` says: 1 for yes.
    """

    max_inflight: int = 10
    overlap: bool = True
    buffer_bytes: int = 0
    submit_timeout: float | None = None
    record: bool = False
    debug: bool = field(default_factory=lambda: os.environ.get("CROSSFADE_DEBUG", "") not in ("", "0"))

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> CompileOptions:
        """Makes options from keyword arguments; the current `DAGContext` supplies those that are left out. Ray's names are
        accepted; those that have no effect here are ignored. Refuses others (TypeError), and values out of range (ValueError).
        """
        known = [each.name for each in fields(cls)]
        chosen: dict[str, Any] = {**DAGContext.get_current().options()}
        for name, value in options.items():
            ours = _RAY_NAMES.get(name, name)
            if ours in known:
                if name == "_submit_timeout" and value == -1:  # how Ray writes that
                    value = None
                if value is not None or ours == "submit_timeout":
                    chosen[ours] = value
            else:
                check_names([name], known, _RAY_ONLY, "option of compile")
        for name, least in (("max_inflight", 1), ("buffer_bytes", 0)):
            chosen[name] = _whole_number(name, chosen[name], least)
        if chosen["max_inflight"] > MAX_INFLIGHT:
            raise ValueError(
                f"max_inflight is {chosen['max_inflight']}\nhint: it is at most {MAX_INFLIGHT}; every channel gets so many slots "
                "when the graph is compiled"
            )
        for name in ("overlap", "record", "debug"):
            if name in chosen:
                chosen[name] = check_flag(name, chosen[name])
        check_timeout(chosen["submit_timeout"], "submit_timeout")
        return cls(**chosen)


def _whole_number(name: str, value: Any, least: int) -> int:
    hint = f"hint: it is a whole number, {least} or more"
    try:
        number = operator.index(value)  # numpy's integers too
    except TypeError:
        raise TypeError(f"{name} is {value!r}\n{hint}") from None
    if number < least:
        raise ValueError(f"{name} is {number}\n{hint}")
    return number
