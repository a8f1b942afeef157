"""Two ranks decide together, over gloo: they always agree, whatever each of them would have chosen."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch", reason="the ranks are those of a torch.distributed group")

from tests.helpers.tuning_ranks import run_two

pytestmark = pytest.mark.timeout(90)


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the two ranks tell of each case."""
    first, second = run_two(tmp_path_factory.mktemp("world"))
    return first, second


Told = tuple[dict[str, Any], dict[str, Any]]


def test_rank_0_decides_where_models_differ(told: Told) -> None:
    assert [each["models"] for each in told] == ["rounds(rounds=1)"] * 2


def test_the_slowest_rank_of_each_repetition_counts_and_their_median(told: Told) -> None:
    times_us = {"rounds(rounds=1)": 90.0, "rounds(rounds=2)": 40.0, "plain": 60.0}
    order = ["rounds(rounds=2)", "plain", "rounds(rounds=1)"]
    assert [each["slowest"] for each in told] == [(order, times_us, (), "rounds(rounds=2)")] * 2


def test_what_fails_on_one_rank_is_left_out_on_both(told: Told) -> None:
    (first, first_ran), (second, second_ran) = (each["fails"] for each in told)
    assert first[:2] == second[:2] == (["plain"], {"plain": 60.0})
    assert first[2] == (
        "rounds(rounds=1) is left out: it failed on rank 1",
        "rounds(rounds=2) is left out: it failed on rank 0: ValueError: no",
    )
    assert second[2] == (
        "rounds(rounds=1) is left out: it failed on rank 1: RuntimeError: no kernel for rounds(rounds=1)",
        "rounds(rounds=2) is left out: it failed on rank 0",
    )
    assert not first_ran  # it was set up there, and not run, which would have waited for the other rank
    assert not second_ran


def test_rank_0_keeps_the_choice_and_tells_it_next_time(told: Told) -> None:
    decided = (["rounds(rounds=2)", "plain"], {"rounds(rounds=2)": 21.0, "plain": 60.0})
    assert [each["kept"] for each in told] == [(decided, decided, [], True), (decided, decided, [], False)]


def test_ranks_may_ask_in_another_order(told: Told) -> None:
    found = [(64, "rounds(rounds=2)"), (512, "rounds(rounds=2)"), (8192, "rounds(rounds=1)")]
    assert [each["order"] for each in told] == [found] * 2


def test_ranks_that_ask_about_different_shapes_are_told(told: Told) -> None:
    first, second = (each["shapes"] for each in told)
    assert first == "rounds(rounds=1)"
    assert second.startswith(
        "rank 0 has said nothing about 'matmul_reduce_scatter 1024,8192,7168 bfloat16 nt x4' in 0.3 s"
    )
    assert second.endswith("hint: all ranks call the same operators, with equal shapes")


def test_when_rank_0_cannot_decide_the_others_hear_of_it_at_once(told: Told) -> None:
    first, second = (each["raises"] for each in told)
    assert first.startswith("ZeroDivisionError")
    assert second.startswith("DeviceError(\"rank 0 could not decide about 'matmul_reduce_scatter 8192,8192,7168")
    assert "ZeroDivisionError" in second


def test_operators_follow_the_model_and_then_what_was_measured(told: Told) -> None:
    first, second = (each["operators"] for each in told)
    assert first == second
    assert len(first) == 4
    for untuned, order, names, notes in first.values():
        assert untuned in names
        assert {"plain", "rounds(rounds=1)"} <= names == set(order)
        assert notes == ()


def test_who_waits_for_a_dead_rank_0_hears_of_it(told: Told) -> None:
    assert [each["dead"] for each in told] == ["heard"] * 2


def test_each_group_decides_for_itself(told: Told) -> None:
    assert [each["group"] for each in told] == [
        (1, [[0]], ["plain", "rounds(rounds=1)"]),
        (1, [[1]], ["plain", "rounds(rounds=1)"]),
    ]


def test_real_products_are_timed_on_both_ranks(told: Told) -> None:
    """Which one is faster here is chance. Both ranks say the same, and have run each 3 + 3 * 5 times, or 3 + 5 if hopeless."""
    (first, second) = (each["products"] for each in told)
    assert first[:4] == second[:4]
    untuned, _, _, names, num_runs, note, kept = first
    assert untuned == "plain"
    assert names == {"plain", "rounds(rounds=2)"}
    assert num_runs["plain"] == 18
    assert num_runs["rounds(rounds=2)"] in (8, 18)
    assert num_runs == second[4]
    assert note == "no copy engines here"
    assert kept != "None"
    assert second[6] == "None"
