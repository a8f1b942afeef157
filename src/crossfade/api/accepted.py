"""Which arguments are accepted: the names of ours, and of those of Ray's that decide nothing here; time limits."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterable, Sequence
from numbers import Real

from crossfade.hints import nearest

RAY_ACTOR_OPTIONS = (
    "accelerator_type",
    "allow_out_of_order_execution",
    "concurrency_groups",
    "enable_task_events",
    "label_selector",
    "lifetime",
    "max_concurrency",
    "max_pending_calls",
    "max_restarts",
    "max_task_retries",
    "memory",
    "namespace",
    "object_store_memory",
    "scheduling_strategy",
)
RAY_METHOD_OPTIONS = (
    "concurrency_group",
    "enable_task_events",
    "max_task_retries",
    "name",
    "retry_exceptions",
    "tensor_transport",
)
RAY_INIT_OPTIONS = (
    "configure_logging",
    "dashboard_host",
    "dashboard_port",
    "include_dashboard",
    "labels",
    "logging_config",
    "logging_format",
    "logging_level",
    "namespace",
    "object_store_memory",
    "_metrics_export_port",
    "_node_ip_address",
    "_node_name",
    "_plasma_directory",
    "_system_config",
    "_temp_dir",
)

_TIMEOUT_HINT = "hint: it is seconds, 0 or more, or None for ever"

INSTEAD = {
    "runtime_env": "it needs engine='ray'; else actors inherit the driver's environment: set os.environ before the actor starts",
    "local_mode": "crossfade.init(engine='inline') runs everything in this thread",
}


def check_names(given: Iterable[str], known: Sequence[str], ignored: Iterable[str], what: str) -> None:
    """Refuses unknown names of a ``what``, such as ``actor option``; ``ignored`` ones are accepted. A TypeError has the nearest
    known name, or what to do instead.
    """
    for name in given:
        if name in known or name in ignored:
            continue
        meant = INSTEAD.get(name) or nearest(name, known) or f"one of {', '.join(known)}"
        raise TypeError(f"unknown {what} {name!r}\nhint: {meant}")


def module_names(preload: str | Sequence[str] | None) -> tuple[str, ...]:
    """Names of modules to preload; for None those in the environment. Refuses what is none: no string (TypeError), or no name
    (ValueError).
    """
    if preload is None:
        preload = [name.strip() for name in os.environ.get("CROSSFADE_PRELOAD", "").split(",") if name.strip()]
    hint = "hint: it takes names of modules, such as 'torch', or ('torch', 'transformers')"
    if not isinstance(preload, Sequence):
        raise TypeError(f"preload is {preload!r}\n{hint}")
    names = (preload,) if isinstance(preload, str) else tuple(preload)
    for name in names:
        if not isinstance(name, str):
            raise TypeError(f"preload has {name!r}\n{hint}")
        if not all(map(str.isidentifier, name.split("."))):
            raise ValueError(f"preload has {name!r}\n{hint}")
    return names


def check_timeout(timeout: object, name: str = "timeout") -> float | None:
    """A time limit as a float. Refuses what is none: neither a number nor None (TypeError), below 0, or NaN (ValueError)."""
    seconds = seconds_of(timeout, name)
    if seconds is not None and seconds < 0:
        raise ValueError(f"{name} is {timeout}\n{_TIMEOUT_HINT}")
    return seconds


def limit_of(timeout: object) -> float | None:
    """The time limit of a ``get`` in seconds, checked as by `check_timeout`. None is for ever, and so is -1, as in Ray."""
    return None if isinstance(timeout, Real) and timeout == -1 else check_timeout(timeout)


def deadline_of(timeout: float | None) -> float | None:
    """When a time limit that begins now is over, by the monotonic clock; one below 0 is over already."""
    return None if timeout is None else time.monotonic() + timeout


def left_of(deadline: float | None) -> float | None:
    """Returns the seconds until a deadline of `deadline_of`: 0 if it has passed."""
    return None if deadline is None else max(0.0, deadline - time.monotonic())


def seconds_of(timeout: object, name: str = "timeout") -> float | None:
    """A time limit, also one below 0, as a float. Refuses what is neither a number nor None (TypeError), and NaN (ValueError)."""
    if timeout is None:
        return None
    if not isinstance(timeout, Real):
        raise TypeError(f"{name} is {timeout!r}\n{_TIMEOUT_HINT}")
    if math.isnan(timeout):
        raise ValueError(f"{name} is {timeout}\n{_TIMEOUT_HINT}")
    return float(timeout)
