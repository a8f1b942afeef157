"""Collectives of device tensors between processes, with CPU tensors in the place of a GPU's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("torch", reason="collectives need torch")

from tests.helpers.collective_workers import dies, several
from tests.helpers.counts import num
from tests.helpers.device_pair import run_workers

CASES = ("wrong", "broadcasts", "one element", "busy", "cannot open", "gives up", "closes", "leaves nothing")
TRANSPORTS = ("copy", "gloo")


def run(num_parties: int, cases: Sequence[Any], transport: str = "copy") -> list[Any]:
    """What each party says to each case."""
    arguments = [(rank, cases, transport) for rank in range(num_parties)]
    return run_workers([several] * num_parties, arguments, timeout_s=100.0)


DRAWS = st.lists(
    st.tuples(st.just("random"), st.integers(0, 10_000), st.just(3), st.sampled_from([1, 1 << 14, 1 << 20])),
    min_size=3,
    max_size=3,
)


@pytest.mark.timeout(num(240, 3600))
@settings(max_examples=num(2, 300), deadline=None)
@given(num_parties=st.integers(2, 4), cases=DRAWS)
def test_random_collectives_of_two_groups_give_what_plain_torch_gives(num_parties: int, cases: Any) -> None:
    """All kinds, reductions and dtypes, ranks in any order, buckets, gaps, new shapes each time, several started at once."""
    assert [wrong for said in run(num_parties, cases) for each in said for wrong in each] == []


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(num(3, 60)))
def test_gloos_process_group_and_one_in_the_place_of_nccls(seed: int) -> None:
    """The second is gloo's as well, by the calls that are made of NCCL."""
    parties = 2 + seed % 3
    assert run(parties, [("process group", seed, 3), ("process group", seed, 3, True)]) == [[[], []]] * parties


@pytest.fixture(scope="module", params=TRANSPORTS)
def said(request: pytest.FixtureRequest) -> dict[str, list[Any]]:
    """What three parties say to each case."""
    cases = [
        case for case in CASES if case != "cannot open" or request.param == "copy"
    ]  # only copies take memory to open
    rows = run(3, [(case,) for case in cases], request.param)
    return {case: [row[k] for row in rows] for k, case in enumerate(cases)}


def test_what_goes_wrong_with_one_reaches_all_and_they_go_on(said: dict[str, list[Any]]) -> None:
    raised, unfit, text, dtype = zip(*said["wrong"], strict=True)
    assert all("x" * 5000 in each for each in raised)
    assert len(set(unfit)) == 1
    assert "A0 brings float32 (3,); A1 brings float32 (4,); A2 brings float32 (5,)" in unfit[0]
    assert all("A0 brings a str" in each for each in text)
    assert all("torch.bool, which is not reduced" in each for each in dtype)


def test_broadcasts_of_shapes_that_only_the_root_knows(said: dict[str, list[Any]]) -> None:
    assert said["broadcasts"] == [[True] * 7] * 3


def test_a_tensor_of_one_element_may_have_any_stride(said: dict[str, list[Any]]) -> None:
    assert said["one element"] == [[0.0, 1.0, 2.0]] * 3


def test_pl2_a_party_that_is_busy_holds_up_nobody(said: dict[str, list[Any]]) -> None:
    assert said["busy"] == [300_000.0] * 3


def test_a_party_that_cannot_open_the_group_tells_the_others(said: dict[str, list[Any]]) -> None:
    if "cannot open" not in said:
        pytest.skip("gloo takes no memory of a device to open")
    first, *others = said["cannot open"]
    assert first == "allocating memory failed"
    assert set(others) == {"A0 cannot take part in a collective: allocating memory failed"}


def test_a_party_that_cannot_do_its_part_tells_the_others(said: dict[str, list[Any]]) -> None:
    first, *others = said["gives up"]
    assert "RuntimeError: no memory for this" in first
    assert all("another party could not go on" in each for each in others)


def test_when_one_closes_the_others_are_told(said: dict[str, list[Any]]) -> None:
    _, *others = said["closes"]
    assert all("another party closed it" in each for each in others)


def test_groups_leave_nothing_behind(said: dict[str, list[Any]]) -> None:
    assert said["leaves nothing"] == [{}, {}, {}]


@pytest.mark.soak
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("moment", ["before its offer", "after its offer", "in an exchange"])
def test_ch3_when_a_party_dies_the_others_are_told(moment: str, transport: str) -> None:
    """By name, within two seconds; nothing of the group stays in their processes."""
    for delay_s in [0.1, *(0.01 * number for number in range(num(0, 30)))]:
        args = [(rank, moment, delay_s, transport) for rank in range(3)]
        *left, _ = run_workers([dies] * 3, args, timeout_s=60, dying={2})
        assert all("A2" in each["said"] and each["told_s"] < 2 and each["held"] == {} for each in left), left
