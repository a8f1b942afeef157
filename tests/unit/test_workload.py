"""What the simulator is told of a program: sizes by method, the text form, and what a recorded run tells."""

from __future__ import annotations

import json

import pytest

from crossfade.graph.nodes import InputNode, MultiOutputNode
from crossfade.plan.spans import Span
from crossfade.plan.timeline import Timeline
from crossfade.schedule.workload import Workload
from tests.helpers.small_graphs import actor, call, compiled


def test_a_value_s_size_is_found_by_its_id_then_by_the_call_that_makes_it() -> None:
    inp = InputNode()
    a, b = actor("A"), actor("B")
    halves = call(a, "two", inp)
    plan = compiled(MultiOutputNode([*halves, call(a, "make", inp), call(b, "make", inp)]))
    work = Workload(value_bytes={"n0.1": 1, "two": 2, "B.make": 3, "make": 4}, default_value_bytes=5)
    work.check_names(plan)
    assert [work.on(plan).size_bytes(value) for value in ("n0.0", "n0.1", "n1", "n2", "i0")] == [2, 1, 4, 3, 5]


def test_it_comes_back_from_json() -> None:
    work = Workload({"f": 2.0}, {"n1": 3}, 1.5, 7, {"f": 4.0}, ["f"])
    for each in (work, Workload({"f": 2.0})):
        assert Workload.from_json(each.to_json()) == each
    assert Workload.from_json('{"compute_us": {"f": 2}}') == Workload({"f": 2.0})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[", "this is no workload: Expecting value"),
        ("[]", r"this is no workload, but \[\]\nhint: for example"),
        ('{"compute": {}}', "has 'compute', which means nothing there\nhint: did you mean 'compute_us'"),
        ('{"compute_us": 3}', "compute_us of the workload is 3"),
        ('{"compute_us": {"f": "3"}}', "compute_us of the workload is {'f': '3'}"),
        ('{"default_value_bytes": true}', "default_value_bytes of the workload is True"),
        ('{"synchronous": "f"}', "synchronous of the workload is 'f'"),
        (json.dumps({"compute_us": {"f": -1}}), "the time of f is -1"),
    ],
)
def test_mistakes_in_its_text_are_told(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Workload.from_json(text)


def test_a_recorded_run_tells_the_median_of_each_method() -> None:
    def ran(actor: str, method: str, time_us: float, stream: str = "main", label: str = "run n0") -> Span:
        return Span(actor, stream, label, f"{actor}.{method}", "compute", 0, 0.0, time_us)

    spans = [
        ran("A", "f", 1.0),
        ran("B", "f", 2.0),
        ran("B", "f", 9.0),
        ran("A", "g", 5.0),
        ran("A", "g", 50.0, "compute"),
    ]
    spans.append(Span("A", "main", "free n0", "n0", "compute", 0, 0.0, 1.0))
    work = Workload.measured(Timeline.of("measured", spans), default_value_bytes=9)
    assert work == Workload({"f": 2.0, "g": 5.0}, device_us={"g": 50.0}, default_value_bytes=9)
