"""What is pure in the room batches: the steps of a calibration, the choice, spans, splitting and joining, reports."""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch", reason="batches are torch's")

import torch
from torch.utils import _pytree as pytree

import crossfade
from crossfade.batches.choice.calibration import LEAST_GAIN_AGAIN, MOST_STEPS, Calibration, Moves, Way, choose, trials
from crossfade.batches.choice.report import BatchesReport, Counts, why_no_gain, why_not_hidden
from crossfade.batches.coroutines.spans import CollectiveSpan, exposed_us
from crossfade.batches.tensors import join_outputs, kind_of, signature, split_batch
from crossfade.device.clocks import GpuLoad
from crossfade.errors import BatchesError
from crossfade.intervals import union_us

ONE, GROUPS, COPIES = (Way(moves) for moves in Moves)
CAPTURED = [Way(moves, is_captured=True) for moves in Moves]


@pytest.mark.parametrize("ways", [[ONE, GROUPS], [ONE, GROUPS, COPIES]])
def test_a_calibration_times_eager_ways_in_rows(ways: list[Way]) -> None:
    """Behind a step that warms up and one, begun by all ranks at once, in which collectives are captured to be replayed."""
    steps = trials(ways)
    assert len(steps) == MOST_STEPS
    length = MOST_STEPS // len(ways)
    for k, way in enumerate(ways):
        row = steps[k * length : (k + 1) * length]
        assert {step.way for step in row} == {way}
        assert [step.is_timed for step in row] == [False, False] + [True] * (length - 2)
        assert [step.lines_up for step in row] == [False, True] + [False] * (length - 2)


@pytest.mark.parametrize("ways", [[ONE, GROUPS, *CAPTURED[:2]], [ONE, GROUPS, COPIES, *CAPTURED]])
def test_a_calibration_times_captured_ways_in_turns(ways: list[Way]) -> None:
    steps = trials(ways)
    assert len(steps) <= MOST_STEPS
    eager = [way for way in ways if not way.is_captured]
    assert [step.way for step in steps[: len(eager)]] == eager
    assert [step.is_timed for step in steps] == [False] * len(eager) + [True] * (len(steps) - len(eager))
    assert all(step.lines_up == step.is_timed for step in steps)
    timed = [step.way for step in steps if step.is_timed]
    for way in ways:
        assert timed.count(way) >= (2 if way.is_captured else 1)


def test_a_calibration_gives_medians_and_drops_ways() -> None:
    calibration = Calibration([ONE, GROUPS, COPIES])
    for way, samples in ((ONE, (3.0, 1.0, 2.0)), (GROUPS, (5.0,))):
        for each in samples:
            calibration.note(way, each, None)
    assert calibration.times_ms() == [2.0, 5.0, float("inf")]
    calibration.drop(COPIES)
    left = list(iter(calibration.next, None))
    assert {step.way for step in left} == {ONE, GROUPS}


@pytest.mark.parametrize(
    ("medians", "wanted"),
    [
        # as seen on two GPUs: eager copy engines took 29.5 to 34 ms after that, as the host went, and captured ones 29.4 to 29.7
        ({ONE: 32.76, COPIES: 29.45, CAPTURED[2]: 29.47}, CAPTURED[2]),
        ({ONE: 32.76, COPIES: 29.45, CAPTURED[2]: 29.47, CAPTURED[1]: 29.46}, CAPTURED[1]),
        ({ONE: 32.76, COPIES: 29.0, CAPTURED[2]: 29.47}, COPIES),
        ({ONE: 32.76, CAPTURED[0]: 32.8, COPIES: 33.0}, CAPTURED[0]),
        ({ONE: 32.0, CAPTURED[0]: 32.8, COPIES: 33.0}, ONE),
    ],
)
def test_an_eager_way_has_to_win_over_a_captured_one(medians: dict[Way, float], wanted: Way) -> None:
    assert choose(medians, LEAST_GAIN_AGAIN) == wanted


def test_launches_that_take_longer_than_the_gpu_count() -> None:
    """As seen on two GPUs: 29.5 ms of kernels behind others, but 52.8 ms of launches, so every later step took 54 ms."""
    calibration = Calibration([ONE, COPIES])
    for way, gpu_ms, host_ms in ((ONE, 35.0, 8.8), (COPIES, 29.5, 52.8)):
        calibration.note(way, gpu_ms, host_ms)
    medians = dict(zip(calibration.ways, calibration.times_ms(), strict=True))
    assert medians == {ONE: 35.0, COPIES: 52.8}
    assert choose(medians) == ONE


@pytest.mark.parametrize(
    ("prepared", "counted"),
    [((48, 48, 0, 3), (2, 3)), ((48, 47, 48), (0, 1, 2)), ((0, 0, 0), (0, 1, 2)), ((5,), (0,))],
)
def test_steps_that_capture_collectives_do_not_count_where_others_replay(
    prepared: tuple[int, ...], counted: tuple[int, ...]
) -> None:
    """Copy engines took 34.9 ms in a calibration on two GPUs and 30.8 later, when all collectives were replayed."""
    calibration = Calibration([ONE, COPIES])
    calibration.note(ONE, 33.4, 9.6)
    for place, num in enumerate(prepared):
        calibration.note(COPIES, 30.0 + place, 20.0 + place, num)
    assert calibration.launches_ms() == [9.6, 20.0 + sum(counted) / len(counted)]
    assert calibration.times_ms() == [33.4, 30.0 + sum(counted) / len(counted)]


@pytest.mark.parametrize(
    ("medians", "wanted"),
    [
        ({ONE: 10.0, GROUPS: 9.0, COPIES: 9.5}, GROUPS),
        ({ONE: 10.0, GROUPS: 9.9, COPIES: 9.85}, ONE),
        ({ONE: 10.0, GROUPS: 9.0, CAPTURED[0]: 8.9, CAPTURED[1]: 8.85}, CAPTURED[0]),
        ({ONE: 10.0, GROUPS: 9.0, CAPTURED[0]: 8.9, CAPTURED[2]: 8.0}, CAPTURED[2]),
        ({ONE: 10.0, GROUPS: float("inf")}, ONE),
    ],
)
def test_the_fastest_way_is_chosen_and_one_batch_where_none_wins(medians: dict[Way, float], wanted: Way) -> None:
    assert choose(medians) == wanted


def test_a_way_that_wins_one_percent_is_chosen_after_a_second_comparison() -> None:
    calibration = Calibration([ONE, GROUPS])
    medians = {ONE: 10.0, GROUPS: 9.85}
    assert choose(medians, calibration.least_gain) == ONE
    assert calibration.add_second_comparison(medians, dict.fromkeys(medians, 1.0))
    assert choose(medians, calibration.least_gain) == GROUPS
    assert choose({ONE: 10.0, GROUPS: 9.95}, calibration.least_gain) == ONE


def span(part: int, begin: float, end: float) -> CollectiveSpan:
    return CollectiveSpan(part, "all_reduce", 4, begin, end)


@pytest.mark.parametrize(
    ("spans", "union", "exposed"),
    [
        ([], 0.0, 0.0),
        ([span(0, 0, 10), span(1, 20, 30)], 20.0, 0.0),
        ([span(0, 0, 10), span(1, 5, 15)], 15.0, 5.0),
        ([span(0, 0, 10), span(0, 10, 20), span(1, 5, 15)], 20.0, 10.0),
        ([span(0, 0, 30), span(1, 5, 10), span(1, 12, 20)], 30.0, 13.0),
    ],
)
def test_communication_is_exposed_while_all_parts_wait(
    spans: list[CollectiveSpan], union: float, exposed: float
) -> None:
    assert union_us((span.begin_us, span.end_us) for span in spans) == union
    assert exposed_us(spans, 2, 100.0) == exposed


def test_a_batch_is_split_by_rows_and_joined_again() -> None:
    rows, mask = torch.arange(10.0).view(5, 2), torch.ones(2, 2)
    calls = split_batch((rows, mask, 3), {"more": [rows * 2, None]}, 2)
    assert [call.num_rows for call in calls] == [3, 2]
    assert [call.args[0].shape[0] for call in calls] == [3, 2]
    assert all(call.args[1] is mask and call.args[2] == 3 for call in calls)
    outputs = [{"rows": call.kwargs["more"][0], "loss": call.args[0].mean(), "none": None} for call in calls]
    joined = join_outputs(outputs, [call.num_rows for call in calls])
    assert torch.equal(joined["rows"], rows * 2)
    assert joined["loss"].item() == pytest.approx(rows.mean().item())
    assert joined["none"] is None


def test_what_cannot_be_split_gives_no_calls() -> None:
    assert split_batch((torch.ones(1, 4),), {}, 2) == []
    assert split_batch((3, "x"), {}, 2) == []


@pytest.mark.parametrize(
    ("outputs", "said"),
    [
        ([torch.ones(7), torch.ones(7)], "of shapes"),
        ([torch.tensor(1), torch.tensor(2)], "a single torch.int64"),
        ([object(), object()], "different objects of type object"),
        ([[torch.ones(2)], (torch.ones(2),)], "different structures"),
    ],
)
def test_what_cannot_be_joined_is_refused_with_a_hint(outputs: list[object], said: str) -> None:
    with pytest.raises(BatchesError, match=rf"(?s){said}.*hint: "):
        join_outputs(outputs, [3, 2])


def test_signatures_tell_kinds_of_calls_apart() -> None:
    calls = [
        torch.ones(2),
        torch.ones(3),
        torch.ones(2, dtype=torch.double),
        torch.ones(2, requires_grad=True),
        True,
        1,
        None,
    ]
    assert len({signature((call,)) for call in calls}) == len(calls)
    assert signature((1, "a", 0.5)) == signature((2, "b", 0.25))
    assert signature((1, 0.5), with_values=True) != signature((1, 0.25), with_values=True)
    assert signature((torch.ones(2),)) == signature((torch.zeros(2),))
    one, other = torch.ones(2), torch.zeros(2)
    assert signature({"a": one, "b": other}) != signature({"b": one, "a": other})


def test_how_arguments_are_nested_is_told_in_short_where_none_holds_others() -> None:
    a: Any = torch.ones(2)
    plain = signature(((a, 1), {"mask": None, "b": 2}))
    assert plain[-1] == "2 by position, 'mask' by name, 'b' by name"
    others = [
        ((a, 1, None), {"b": 2}),
        ((a, 1), {"b": None, "mask": 2}),
        ((a, [1]), {"mask": None, "b": 2}),
        (a, 1, None, 2),
    ]
    others += [((a, 1), OrderedDict(mask=None, b=2)), [(a, 1), {"mask": None, "b": 2}]]  # type: ignore[list-item]
    assert len({plain, *map(signature, others)}) == 1 + len(others)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"num_batches": 1}, "num_batches is 1"),
        ({"num_batches": "2"}, "num_batches is '2'"),
        ({"way": "by magic"}, "there is no way 'by magic'"),
        ({"capture": True, "per_shape": False}, "per_shape=False"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(options: dict[str, Any], said: str) -> None:
    pytest.importorskip("greenlet", reason="parts are greenlets: pip install crossfade[batches]")
    with pytest.raises(ValueError, match=rf"(?s){said}.*hint: "):
        crossfade.interleave(torch.nn.Linear(1, 1), **options)


@pytest.mark.parametrize("options", [{"split": "abc"}, {"join": 3}, {"group": 3}])
def test_arguments_of_other_types_are_refused(options: dict[str, Any]) -> None:
    (name,) = options
    with pytest.raises(TypeError, match=rf"(?s){name} is .*hint: "):
        crossfade.interleave(torch.nn.Linear(1, 1), **options)


def test_a_handle_is_not_copied() -> None:
    pytest.importorskip("greenlet", reason="parts are greenlets: pip install crossfade[batches]")
    with pytest.raises(TypeError, match=r"copied or pickled\nhint: copy handle\.module"):
        copy.deepcopy(crossfade.interleave(torch.nn.Linear(1, 1)))


def test_a_step_s_batches_are_given_inside_its_with() -> None:
    pytest.importorskip("greenlet", reason="parts are greenlets: pip install crossfade[batches]")
    steps = crossfade.interleaved()
    for _ in range(2):
        for call in (lambda: steps(torch.sum, torch.ones(2)), steps.backward):
            with pytest.raises(BatchesError, match="no step has begun\nhint: with steps as run"):
                call()
        with steps as run:
            part = run(torch.sum, torch.ones(2))
        assert part.result == 2


@pytest.mark.parametrize("capture", [True, "model", [torch.nn.Linear(1, 1), torch.ones(1)]])
def test_what_is_no_module_cannot_be_captured(capture: Any) -> None:
    pytest.importorskip("greenlet", reason="parts are greenlets: pip install crossfade[batches]")
    with pytest.raises(ValueError, match=r"(?s)capture is .*hint: give the module"):
        crossfade.interleaved(capture=capture)
    crossfade.interleaved(capture=None)


def test_what_is_no_module_cannot_be_interleaved() -> None:
    pytest.importorskip("greenlet", reason="parts are greenlets: pip install crossfade[batches]")
    number: Any = 3
    with pytest.raises(TypeError, match=r"^interleave is given 3\nhint: it takes a torch\.nn\.Module"):
        crossfade.interleave(number)


def test_without_a_process_group_the_batch_stays_whole() -> None:
    pytest.importorskip("greenlet", reason="parts are greenlets: pip install crossfade[batches]")
    model, x = torch.nn.Linear(2, 2), torch.ones(4, 2)
    handle = crossfade.interleave(model)
    with pytest.raises(BatchesError, match="nothing has been called yet"):
        handle.report()
    assert repr(handle) == "Interleaved(Linear, num_batches=2)"
    untyped: Any = handle
    with pytest.raises(AttributeError, match=r"no parameters\nhint: the module has it: handle\.module\.parameters"):
        untyped.parameters()
    with pytest.raises(AttributeError, match="has no attribute 'forwards'"):
        untyped.forwards()
    assert torch.equal(handle(x), model(x))
    assert handle.report().way == "one batch"
    assert "no process group" in handle.report().reason


def test_reports_say_why() -> None:
    medians = {ONE: 10.0, GROUPS: 10.5}
    assert "nothing to hide" in why_no_gain(medians, {}, Counts((0, 0), (0, 0)))
    assert "launches" in why_no_gain(medians, {GROUPS: 10.0}, Counts((3, 3), (3, 3)))
    assert "power limit" in why_no_gain(medians, {GROUPS: 2.0}, Counts((3, 3), (3, 3)))
    assert "inside an operator" in why_no_gain(medians, {}, Counts((3, 3), (0, 0), {"inside an operator": 6}))
    hot, cool = GpuLoad(1400.0, 1980.0, 699.0, 700.0), GpuLoad(1980.0, 1980.0, 500.0, 700.0)
    told = [why_no_gain(medians, {GROUPS: 2.0}, Counts((3, 3), (3, 3)), load) for load in (hot, cool)]
    assert "is at its power limit (699 of 700 W, at 1,400 of 1,980 MHz)" in told[0]
    assert "power" not in told[1], "the highest clock has nothing to do with power"
    for taken_ms in (2.0, 10.5):
        peak = GpuLoad(1965.0, 1980.0, 650.0, 700.0, is_capped=True)
        said = why_no_gain(medians, {GROUPS: taken_ms}, Counts((3, 3), (3, 3)), peak)
        assert "power" not in said, "of which a peak takes 1 %"
        assert ("launches take 100%" in said) == (taken_ms == 10.5)
    lower = GpuLoad(1700.0, 1980.0, 300.0, 700.0)  # the power is a mean of the second before
    for load, is_told in (
        (lower, "or the GPU is at its power limit"),
        (lower._replace(is_capped=True), "is at its power"),
    ):
        assert is_told in why_no_gain(medians, {GROUPS: 2.0}, Counts((3, 3), (3, 3)), load)
    assert why_not_hidden(Counts(), 9.5, 0.5) == ""
    assert "inside an operator" in why_not_hidden(Counts((1, 1), (1, 0), {"inside an operator": 1}), 1.0, 9.0)
    report = BatchesReport(
        "process groups", "it is faster", True, 2, {"one batch": 10.0, "process groups": 8.0}, {}, Counts((3, 3), (3, 2)),
        2.0, 1.5, 0.5, "they end the run", notes=("dropout",),
    )  # fmt: skip
    assert report.gain == 1.25
    for line in (
        "way: process groups",
        "2.00 ms, 1.50 hidden, 0.50 exposed",
        "not hidden: they end the run",
        "note: dropout",
    ):
        assert line in str(report)


LEAVES = st.sampled_from(
    [
        *(
            torch.ones(2),
            torch.ones(2, 1),
            torch.ones(2, requires_grad=True),
            torch.ones(2).double(),
            torch.ones(2).int(),
        ),
        *(True, False, None, 1, 2, 1.5, float("nan"), "a", "b", b"bytes", (), [torch.ones(2)], (1, 2), {"k": 3}),
    ]
)
CALLS = st.tuples(st.lists(LEAVES, max_size=2).map(tuple), st.dictionaries(st.sampled_from("ab"), LEAVES, max_size=2))


@given(CALLS, CALLS, st.booleans())
def test_the_quick_kind_of_a_call_tells_what_its_signature_tells(one: Any, other: Any, with_values: bool) -> None:
    kinds = [kind_of(*each, with_values=with_values) for each in (one, other)]
    names = [(signature(each, with_values=with_values), pytree.tree_structure(each)) for each in (one, other)]
    assert (kinds[0] == kinds[1]) == (names[0] == names[1])
    assert hash(kinds[0]) == hash(kind_of(*one, with_values=with_values))
