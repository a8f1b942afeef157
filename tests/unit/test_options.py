"""What ``compile`` takes and what it refuses, and classes that inherit from actors."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest

import crossfade
from crossfade.api.options import CompileOptions


def test_numbers_of_any_kind_are_taken() -> None:
    chosen = CompileOptions.of(
        {"max_inflight": np.int64(3), "buffer_bytes": np.uint32(7), "submit_timeout": np.float32(2)}
    )
    assert (chosen.max_inflight, chosen.buffer_bytes, chosen.submit_timeout) == (3, 7, 2)
    assert type(chosen.max_inflight) is type(chosen.buffer_bytes) is int
    for timeout in (None, 0, 1.5, Fraction(1, 3), np.int8(1)):
        assert CompileOptions.of({"_submit_timeout": timeout}).submit_timeout == timeout
    assert CompileOptions.of({"_submit_timeout": -1}).submit_timeout is None
    assert CompileOptions.of({"_max_inflight_executions": None}) == CompileOptions.of({})
    assert CompileOptions.of({"max_inflight": 65536}).max_inflight == 65536


@pytest.mark.parametrize(
    ("name", "value", "error", "hint"),
    [
        ("max_inflight", 2.5, TypeError, "a whole number, 1 or more"),
        ("max_inflight", "3", TypeError, "a whole number, 1 or more"),
        ("max_inflight", 0, ValueError, "a whole number, 1 or more"),
        (
            "max_inflight",
            65537,
            ValueError,
            "at most 65536; every channel gets so many slots when the graph is compiled",
        ),
        ("_max_inflight_executions", 10**9, ValueError, "at most 65536; .*"),
        ("overlap", 1, TypeError, "True or False"),
        ("_overlap_gpu_communication", "yes", TypeError, "True or False"),
        ("record", "trace.json", TypeError, "True or False"),
        ("debug", 0, TypeError, "True or False"),
        ("buffer_bytes", 1e6, TypeError, "a whole number, 0 or more"),
        ("buffer_bytes", -1, ValueError, "a whole number, 0 or more"),
        ("submit_timeout", "3", TypeError, "seconds, 0 or more, or None for ever"),
        ("submit_timeout", -1, ValueError, "seconds, 0 or more, or None for ever"),
        ("submit_timeout", float("nan"), ValueError, "seconds, 0 or more, or None for ever"),
    ],
)
def test_other_values_are_refused_with_a_hint(name: str, value: Any, error: type[Exception], hint: str) -> None:
    ours = {"_max_inflight_executions": "max_inflight", "_overlap_gpu_communication": "overlap"}.get(name, name)
    with pytest.raises(error, match=f"^{ours} is {value!r}\nhint: it is {hint}$"):
        CompileOptions.of({name: value})


def test_no_class_inherits_from_an_actor_class() -> None:
    @crossfade.remote
    class Base:
        pass

    with pytest.raises(TypeError, match=r"^Base is an actor class.*\nhint: leave Base without the decorator.*$"):

        class Derived(Base):
            pass
