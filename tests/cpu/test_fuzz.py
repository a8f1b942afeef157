"""A few seconds of each fuzz test; ``make soak`` gives each ten minutes. By hypothesis."""

from __future__ import annotations

import pickle
import time
from contextlib import suppress

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from crossfade.errors import PlanError, PlanSyntaxError
from crossfade.plan.parse import parse_plan
from crossfade.plan.validate import validate
from tests.helpers.builds import interpreted_only
from tests.helpers.edited_plans import CHAIN, edited
from tests.helpers.fuzzing import check_frames, check_plan, check_ring, check_socket, damages, plan_texts, streams

UNREADABLE = pickle.UnpicklingError("not a writer's pickle")


@given(stream=streams())
def test_fuzz_frames(stream: tuple[list[bytes], bytes, list[int]]) -> None:
    check_frames(*stream)


@given(stream=streams(), fd_counts=st.lists(st.integers(0, 3), max_size=3))
@example(stream=([b""], b"\xff" * 28, []), fd_counts=[3])
@example(stream=([b""], b"\x00", []), fd_counts=[3])
def test_fuzz_the_socket(stream: tuple[list[bytes], bytes, list[int]], fd_counts: list[int]) -> None:
    check_socket(*stream, fd_counts)


@given(text=plan_texts())
def test_fuzz_the_plan_parser(text: str) -> None:
    check_plan(text)


@interpreted_only("what it loads pickles with is replaced")
@given(damage=damages())
@example(damage=(5, [(2, 1 << 60)], b"", UNREADABLE))  # an offset behind the heap
@example(damage=(5, [(3, 1 << 40)], b"", UNREADABLE))  # a capacity that would be a fault to touch
@example(damage=(5, [(2, 8)], b"", UNREADABLE))
@example(damage=(6, [], (8).to_bytes(8, "little") + (1 << 60).to_bytes(8, "little"), UNREADABLE))
@example(damage=(5, [], (4 | 1 << 63).to_bytes(8, "little") + b"\x01", ("|O", (20,))))  # memory as pointers
@example(damage=(2, [(0, 5)], b"", UNREADABLE))  # a message of no bytes
def test_fuzz_the_rings_reader(damage: tuple[int, list[tuple[int, int]], bytes, object]) -> None:
    check_ring(*damage)


@pytest.mark.parametrize(
    "unit",
    [
        "read a ",
        "x" * 10 + ", ",
        " ",
        "| ",
        "| read i0 ",
        "\\",
        '["',
        "a",
        "->",
        "\n",
        "node n0 = A.m(i0) -> n0\n",
        "@",
        "# \n",
    ],
)
@pytest.mark.parametrize(
    "start",
    ["", "plan max_inflight=1 returns=list\n", "node n0", "input i0 =", "channel c", 'input i0 = ["', "A | read i0"],
)
def test_a_megabyte_of_text_takes_seconds_at_most(start: str, unit: str) -> None:
    header = "plan max_inflight=1 returns=value\n"
    begun = time.process_time()
    for text in (start + unit * (1_000_000 // len(unit)), header + start + unit * (1_000_000 // len(unit)) + "!"):
        with suppress(PlanError):
            validate(parse_plan(text))
    assert time.process_time() - begun < 20


def test_a_receive_very_far_ahead_is_judged_soon() -> None:
    ahead = 10**17
    begun = time.process_time()
    with pytest.raises(PlanError, match="PL-2"):
        validate(edited(CHAIN, ("recv n0 @recv", f"recv n0 +{ahead}")))
    assert time.process_time() - begun < 5


def test_long_names_do_not_multiply() -> None:
    rows = "\n".join(f"A{index} | read x" for index in range(198))
    text = f"plan max_inflight=1 returns=value\n{rows}\nB | run {'n' * 900_000}\n"
    with pytest.raises(PlanError) as caught:
        validate(parse_plan(text))
    assert len(str(caught.value)) < 20_000_000


def test_a_plans_text_is_never_run() -> None:
    with pytest.raises(PlanSyntaxError):
        parse_plan("plan max_inflight=__import__('os').getpid() returns=value")
