"""How a way is chosen: what the model says, what is measured, who wins, what is remembered."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from crossfade.errors import ChannelBroken, DeviceError
from crossfade.ops.choice.cache import Cache, Decision, Source
from crossfade.ops.choice.candidate import PLAIN, Candidate
from crossfade.ops.choice.ranks import Alone
from tests.helpers.tuning import SHAPE, Bench, rows, ways

R1, R2, R4 = ways("rounds(rounds=1)", "rounds(rounds=2)", "rounds(rounds=4)")
PREDICTED = {"rounds(rounds=1)": 80.0, "rounds(rounds=2)": 90.0, "plain": 100.0, "fused": 120.0}


def keeps(folder: Path) -> Cache:
    return Cache("device", 4, "v1", folder)


# Untuned


def test_an_untuned_shape_runs_the_model_s_choice_at_once() -> None:
    bench = Bench({}, PREDICTED)
    tuner = bench.tuner()
    assert tuner.choose(SHAPE) == R1
    assert tuner.decide(SHAPE) == Decision(tuple(ways(*PREDICTED)), Source.MODEL)
    assert bench.log == []


@pytest.mark.parametrize(
    ("predicted", "chosen"),
    [
        ({"plain": 101.9, "rounds(rounds=1)": 100.0}, "plain"),
        ({"rounds(rounds=1)": 100.0, "plain": 102.1}, "rounds(rounds=1)"),
        ({"plain": float("inf"), "rounds(rounds=1)": 5.0}, "rounds(rounds=1)"),
        ({}, "plain"),
    ],
)
def test_the_model_s_ties_go_to_plain(predicted: dict[str, float], chosen: str) -> None:
    assert str(Bench({}, predicted).tuner().choose(SHAPE)) == chosen


def test_what_the_model_does_not_know_is_not_chosen_unmeasured() -> None:
    bench = Bench({"rounds(rounds=4)": 1.0, "plain": 50.0}, {"plain": 50.0})
    tuner = bench.tuner()
    assert tuner.choose(SHAPE) == PLAIN
    tuner.tune(SHAPE)
    assert tuner.choose(SHAPE) == R4


def test_a_shape_takes_the_first_of_its_bucket_that_can_do_it() -> None:
    bench = Bench({}, PREDICTED, needs={"rounds(rounds=1)": 8192, "rounds(rounds=2)": 512})
    tuner = bench.tuner()
    assert [tuner.choose(rows(m)) for m in (8192, 7680, 7000, 8192)] == [R1, R2, PLAIN, R1]


def test_a_call_that_the_best_cannot_do_takes_the_next() -> None:
    tuner = Bench({"fused": 10.0, "rounds(rounds=2)": 20.0, "plain": 30.0}, PREDICTED).tuner()
    tuner.tune(SHAPE)
    for _ in range(2):
        assert str(tuner.choose(SHAPE)) == "fused"
        assert tuner.choose(SHAPE, without="fused") == R2
    assert tuner.choose(SHAPE, without="rounds") == Candidate("fused")


def test_plain_does_what_nothing_of_the_decision_can_do() -> None:
    bench = Bench({"rounds(rounds=1)": 10.0}, {"rounds(rounds=1)": 10.0}, needs={"rounds(rounds=1)": 8192})
    tuner = bench.tuner()
    tuner.tune(SHAPE)  # where plain failed
    assert tuner.decide(SHAPE).order == (R1,)
    assert tuner.choose(rows(7000)) == PLAIN


# Measured


def test_the_measurement_decides_and_holds_for_the_bucket() -> None:
    bench = Bench({"rounds(rounds=1)": 95.0, "rounds(rounds=2)": 70.0, "plain": 100.0, "fused": 110.0}, PREDICTED)
    tuner = bench.tuner()
    assert tuner.choose(rows(7000)) == R1
    decision = tuner.tune(SHAPE)
    assert decision.source is Source.MEASURED
    assert [str(each) for each in decision.order] == ["rounds(rounds=2)", "rounds(rounds=1)", "plain", "fused"]
    assert decision.time_us(R2) == 70.0
    assert decision.time_us(R4) is None
    assert tuner.choose(rows(7000)) == tuner.choose(SHAPE) == R2
    assert tuner.choose(rows(6144)) == R1  # another bucket
    num = len(bench.log)
    assert tuner.tune(rows(7000)) == decision
    assert len(bench.log) == num
    tuner.tune(SHAPE, again=True)
    assert len(bench.log) > num


def test_candidates_take_turns_and_the_hopeless_get_one() -> None:
    bench = Bench({"rounds(rounds=1)": 100.0, "rounds(rounds=2)": 131.0, "plain": 500.0, "fused": 130.0}, PREDICTED)
    decision = bench.tuner(num_turns=2, num_repeats=3).tune(SHAPE)
    names = list(PREDICTED)
    assert bench.log == [
        *(f"set up {name}" for name in names),
        *names,
        "fused",  # the other way round, the second time
        "plain",
        "rounds(rounds=1)",
    ]
    assert [str(each) for each in decision.order] == ["rounds(rounds=1)", "fused", "rounds(rounds=2)", "plain"]


def test_medians_count() -> None:
    bench = Bench({"plain": [50, 50, 900, 50, 50], "rounds(rounds=1)": [10, 60, 60, 60, 60]}, PREDICTED)
    assert bench.tuner().tune(SHAPE).times_us == ((R1, 60.0), (PLAIN, 50.0))


@pytest.mark.parametrize(
    ("times_us", "first"),
    [
        ({"rounds(rounds=1)": 102.0, "plain": 100.0}, "rounds(rounds=1)"),
        ({"rounds(rounds=1)": 102.1, "plain": 100.0}, "plain"),
        ({"rounds(rounds=2)": 102.0, "rounds(rounds=1)": 103.0, "plain": 100.0}, "rounds(rounds=2)"),
        ({"plain": 102.0, "rounds(rounds=4)": 100.0}, "plain"),  # the model knows nothing of the other one
        ({"plain": 102.1, "rounds(rounds=4)": 100.0}, "rounds(rounds=4)"),
    ],
)
def test_ties_go_to_what_was_predicted_best(times_us: dict[str, float], first: str) -> None:
    decision = Bench(times_us, {name: us for name, us in PREDICTED.items() if name in times_us}).tuner().tune(SHAPE)
    assert str(decision.order[0]) == first
    rest = sorted((us, name) for name, us in times_us.items() if name != first)
    assert [str(each) for each in decision.order[1:]] == [name for _, name in rest]


def test_the_best_few_are_measured_and_all_of_torchs_own_and_what_the_model_does_not_know() -> None:
    predicted = {
        **{f"rounds(rounds={number})": 10.0 + number for number in range(1, 9)},
        "fused": 80.0,
        "plain": 90.0,
    }
    known = dict.fromkeys(predicted, 10.0)
    bench = Bench({**known, "rounds(rounds=16)": 9.0}, predicted)
    decision = bench.tuner(num_best=2).tune(SHAPE)
    assert [line for line in bench.log if line.startswith("set up")] == [
        "set up rounds(rounds=1)",
        "set up rounds(rounds=2)",
        "set up fused",
        "set up plain",
        "set up rounds(rounds=16)",
    ]
    assert str(decision.order[0]) == "rounds(rounds=16)"


def test_what_raises_is_left_out_with_a_note() -> None:
    bench = Bench({"rounds(rounds=2)": RuntimeError("out of memory\nand more"), "plain": 50.0}, PREDICTED)
    decision = bench.tuner().tune(SHAPE)
    assert decision.order == (PLAIN,)
    assert decision.notes == (
        "rounds(rounds=1) is left out: it failed on rank 0: RuntimeError: no kernel for rounds(rounds=1)",
        "fused is left out: it failed on rank 0: RuntimeError: no kernel for fused",
        "rounds(rounds=2) is left out: it failed on rank 0: RuntimeError: out of memory",
    )


class TwoRanks(Alone):
    """Rank 0 of two; the other one says that it failed when they gather for the time that is named."""

    num_ranks = 2

    def __init__(self, failing: int) -> None:
        self.num_gathered = 0
        self._failing = failing

    def gather(self, own: Sequence[int]) -> list[list[int]]:
        self.num_gathered += 1
        return [list(own), [-1 if self.num_gathered == self._failing else max(each, 0) for each in own]]


@pytest.mark.parametrize("is_here", [True, False])
def test_what_a_rank_cannot_make_warm_is_timed_by_nobody(is_here: bool) -> None:
    """Such as a capture that lacks memory on one rank: the others would wait for it."""
    bench = Bench({"plain": 50.0, "rounds(rounds=1)": 1.0}, {"plain": 5.0, "rounds(rounds=1)": 1.0})
    bench.fails = {"rounds(rounds=1)"} if is_here else set()
    decision = bench.tuner(TwoRanks(99 if is_here else 3)).tune(SHAPE)  # both are set up, then rounds is made warm
    assert decision.order == (PLAIN,)
    assert "rounds(rounds=1)" not in bench.log
    why = " 0: RuntimeError: rounds(rounds=1) cannot be captured" if is_here else " 1"
    assert decision.notes == (f"rounds(rounds=1) is left out: it failed on rank{why}",)


@pytest.mark.parametrize("wrong", [[1.0], [float("nan")] * 5, [-1.0] * 5, [float("inf")] * 5])
def test_times_that_make_no_sense_are_left_out(wrong: list[float]) -> None:
    bench = Bench({"plain": 50.0, "rounds(rounds=1)": 1.0}, PREDICTED)

    def measure(shape: object, candidate: Candidate) -> Callable[[int], Sequence[float]]:
        return lambda number: wrong if candidate == R1 else [50.0] * number

    tuner = bench.tuner()
    tuner._measure = measure
    decision = tuner.tune(SHAPE)
    assert R1 not in decision.order
    assert "ValueError: 5 times were asked for, and [" in decision.notes[0]


def test_when_nothing_can_be_measured_the_error_says_why() -> None:
    tuner = Bench({}, PREDICTED).tuner()
    with pytest.raises(
        DeviceError, match=r"no way to do matmul_reduce_scatter 8192,8192,7168 .* could be measured:\nrounds"
    ):
        tuner.tune(SHAPE)
    assert tuner.choose(SHAPE) == R1  # still the model's


def test_a_dead_rank_is_no_candidate_s_fault() -> None:
    bench = Bench({"plain": 1.0, "rounds(rounds=1)": ChannelBroken("rank 2 died")}, PREDICTED)
    with pytest.raises(ChannelBroken):
        bench.tuner().tune(SHAPE)


# Kept


def test_what_was_measured_is_kept_and_what_was_predicted_is_not(tmp_path: Path) -> None:
    bench = Bench({"plain": 50.0, "rounds(rounds=2)": 40.0}, PREDICTED)
    first = bench.tuner(cache=keeps(tmp_path))
    assert first.choose(SHAPE) == R1
    assert list(tmp_path.iterdir()) == []
    decision = first.tune(SHAPE)
    later = Bench({}, {"plain": 1.0})
    tuner = later.tuner(cache=keeps(tmp_path))
    assert tuner.tune(rows(7000)) == Decision(decision.order, Source.MEASURED, decision.times_us)
    assert later.log == []


def test_a_kept_candidate_that_is_not_there_any_more_is_passed_over(tmp_path: Path) -> None:
    Bench({"plain": 50.0, "rounds(rounds=2)": 40.0}, PREDICTED).tuner(cache=keeps(tmp_path)).tune(SHAPE)
    tuner = Bench({}, {"plain": 9.0, "rounds(rounds=8)": 1.0}).tuner(cache=keeps(tmp_path))
    assert tuner.choose(SHAPE) == PLAIN


class RankOne(Alone):
    """Hears from rank 0."""

    rank = 1
    num_ranks = 2

    def tell(self, key: str, say: Callable[[], str]) -> str:
        return '{"order": ["rounds(rounds=4)", "plain"], "source": "measured", "times_us": {}}'


def test_another_rank_neither_reads_nor_writes_nor_decides(tmp_path: Path) -> None:
    Bench({"plain": 50.0}, PREDICTED).tuner(cache=keeps(tmp_path)).tune(SHAPE)
    before = keeps(tmp_path).path(SHAPE.operator).read_bytes()
    bench = Bench({"plain": 1.0, "rounds(rounds=4)": 5.0}, {"plain": 1.0})
    tuner = bench.tuner(RankOne(), keeps(tmp_path))
    assert tuner.choose(SHAPE) == R4
    assert tuner.tune(SHAPE, again=True).order == (R4, PLAIN)
    assert keeps(tmp_path).path(SHAPE.operator).read_bytes() == before


def test_memory_of_shapes_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("crossfade.ops.choice.choose.MOST_SHAPES", 3)
    tuner = Bench({}, PREDICTED).tuner()
    for m in range(1, 20):
        assert tuner.choose(rows(m)) == R1
        assert len(tuner.chooser._chosen) <= 3


def test_counts_that_make_no_sense() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        Bench({}, {}).tuner(num_turns=0)
