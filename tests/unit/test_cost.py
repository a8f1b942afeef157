"""The cost model as text and as numbers, the line that calibration fits, and what the simulator is told of a program."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossfade.graph.nodes import InputNode, MultiOutputNode
from crossfade.plan.plan import InputSpec, NodeSpec, Plan
from crossfade.plan.spans import Span
from crossfade.plan.timeline import Timeline
from crossfade.schedule.cost import CostModel, Slowdown
from crossfade.schedule.fit import fit_line
from crossfade.schedule.workload import Workload
from tests.helpers.small_graphs import actor, call, compiled

NODE = NodeSpec("n3", "Sender0", "make", (), ("n3",))
CHAIN = Plan(
    inputs=(InputSpec("i0", "*"),),
    nodes=(NodeSpec("n0", "A", "make", ("i0",), ("n0",)), NodeSpec("n1", "B", "take", ("n0",), ("n1",))),
    channels=(),
    programs={},
    outputs=("n1",),
    returns_list=False,
    max_inflight=1,
)
figures = st.floats(0, 1e6, allow_nan=False)


@given(
    st.builds(
        CostModel,
        write_us=figures,
        write_us_per_mb=figures,
        read_us=figures,
        hop_us=figures,
        wake_us=figures,
        latency_us=figures,
        gbs=st.floats(1e-3, 1e3),
        num_cores=st.integers(1, 256),
        slowdown=st.builds(Slowdown, st.floats(1, 10), st.floats(1, 10)),
    )
)
def test_json_gives_an_equal_model_back(costs: CostModel) -> None:
    assert CostModel.from_json(costs.to_json()) == costs


def test_every_figure_is_in_the_json() -> None:
    assert list(json.loads(CostModel().to_json())) == [item.name for item in fields(CostModel)]


def test_figures_that_are_left_out_keep_their_defaults() -> None:
    costs = CostModel.from_json('{"hop_us": 3, "slowdown": {"compute": 1.25}}')
    assert costs == replace(CostModel(), hop_us=3.0, slowdown=Slowdown(compute=1.25))


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("{", "this is no cost model"),
        ("[1]", r"CostModel is \[1\]"),
        ('{"hopp_us": 1}', "CostModel has 'hopp_us', which means nothing there"),
        ('{"hop_us": "1"}', "CostModel.hop_us is '1'"),
        ('{"hop_us": true}', "CostModel.hop_us is True"),
        ('{"hop_us": -1}', "CostModel.hop_us is -1"),
        ('{"hop_us": NaN}', "CostModel.hop_us is nan"),
        ('{"num_cores": 1.5}', "CostModel.num_cores is 1.5"),
        ('{"num_cores": 0}', "CostModel.num_cores is 0"),
        ('{"gbs": 0}', "CostModel.gbs is 0"),
        ('{"slowdown": 2}', "CostModel.slowdown is 2"),
        ('{"slowdown": {"compute": 0.9}}', "Slowdown.compute is 0.9"),
        ('{"slowdown": {"computing": 2}}', "CostModel.slowdown has 'computing'"),
    ],
)
def test_what_is_no_cost_model_is_refused_with_a_hint(text: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=rf"{complaint}(.|\n)*\nhint: "):
        CostModel.from_json(text)


def test_times_are_a_fixed_part_and_a_part_per_byte() -> None:
    costs = CostModel(write_us=1, write_us_per_mb=30, read_us=0.5, read_us_per_mb=2, latency_us=10, gbs=2.0)
    costs = replace(costs, write_large_us=8, read_large_us=16, host_us_per_mb=300)
    assert costs.write_time_us(2_000_000) == 69.0
    assert costs.read_time_us(2_000_000) == 20.5
    assert costs.transfer_time_us(2_000_000) == 1010.0
    assert costs.send_host_time_us(2_000_000) == 600.0


def test_a_value_that_fits_into_a_record_needs_no_slot() -> None:
    costs = CostModel(write_us=1, write_large_us=8, write_us_per_mb=0, read_us=0.5, read_large_us=16, read_us_per_mb=0)
    assert (costs.write_time_us(1_000), costs.write_time_us(1_001)) == (1.0, 9.0)
    assert (costs.read_time_us(1_000), costs.read_time_us(1_001)) == (0.5, 16.5)


def test_the_defaults_give_the_measured_round_trips_of_a_small_and_a_large_value() -> None:
    """Measured on two cores: 3.6 to 5.6 us for 1 byte, 80 to 120 us for 1 MB, out and back."""
    costs = CostModel()
    trip_us = [
        2 * (costs.write_time_us(size) + costs.hop_us + costs.read_time_us(size)) + 5 * costs.step_us
        for size in (1, 1_000_000)
    ]
    assert 3.6 <= trip_us[0] <= 5.6
    assert 80 <= trip_us[1] <= 120


@pytest.mark.parametrize(
    ("compute_us", "time_us"),
    [
        ({"n3": 1.0, "Sender0.make": 2.0, "make": 3.0}, 1.0),
        ({"Sender0.make": 2.0, "make": 3.0}, 2.0),
        ({"Sender1.make": 2.0, "make": 3.0}, 3.0),
        ({"take": 3.0}, 4.0),
    ],
)
def test_a_method_s_time_is_found_by_node_then_actor_then_method(compute_us: dict[str, float], time_us: float) -> None:
    assert Workload(compute_us, default_compute_us=4.0).time_us(NODE) == time_us


def test_a_value_s_size_is_found_by_its_id() -> None:
    work = Workload(value_bytes={"n3": 100}, default_value_bytes=7)
    assert (work.size_bytes("n3"), work.size_bytes("n4")) == (100, 7)


@pytest.mark.parametrize(
    ("work", "said"),
    [
        (
            Workload({"maek": 1.0}),
            r"compute_us .* 'maek'.*\nhint: did you mean 'make'\? the graph has n0, A\.make, make, n1",
        ),
        (Workload(device_us={"A.take": 1.0}), r"device_us .* 'A\.take'.*\nhint: did you mean 'B\.take'\?"),
        (Workload(synchronous=["n7"]), r"synchronous .* 'n7'"),
        (
            Workload(value_bytes={"i1": 8}),
            r"value_bytes .* 'i1'.*\nhint: the graph has i0, n0, n1, A\.make, make, B\.take, \.\.\.: print",
        ),
    ],
)
def test_names_that_the_graph_does_not_have_are_refused(work: Workload, said: str) -> None:
    Workload({"n0": 1.0, "B.take": 1.0, "make": 1.0}, {"i0": 8, "n1": 8}, synchronous=["take"]).check_names(CHAIN)
    with pytest.raises(ValueError, match=said):
        work.check_names(CHAIN)


def test_synchronous_methods_are_several_names() -> None:
    with pytest.raises(TypeError, match=r"synchronous is 'make'\nhint: .*\['make'\]"):
        Workload(synchronous="make")


@pytest.mark.parametrize(
    "build",
    [
        lambda: Workload({"f": -1.0}),
        lambda: Workload(value_bytes={"n0": -1}),
        lambda: Workload(default_compute_us=float("inf")),
        lambda: Workload(default_value_bytes=-8),
    ],
)
def test_impossible_workloads_are_refused(build: Callable[[], Workload]) -> None:
    with pytest.raises(ValueError, match="hint: figures are finite numbers, and not negative"):
        build()


SIZES = [1, 1_000, 10_000, 100_000, 1_000_000, 8_000_000, 64_000_000]


@given(
    st.floats(0.1, 100),
    st.floats(1e-6, 1e-3),
    st.lists(st.sampled_from(SIZES), min_size=2, max_size=30).filter(lambda sizes: len(set(sizes)) > 1),
)
def test_points_on_a_line_give_that_line(a: float, b: float, sizes: list[int]) -> None:
    fitted_a, fitted_b = fit_line((x, a + b * x) for x in sizes)
    for x in sizes:
        assert fitted_a + fitted_b * x == pytest.approx(a + b * x, rel=1e-6)


def test_long_tails_do_not_move_the_line() -> None:
    rng = random.Random(1)
    points = []
    for size in SIZES * 20:
        time_us = (2.0 + 40e-6 * size) * rng.uniform(0.98, 1.02)
        points.append((size, time_us * rng.choice([1, 1, 1, 1, 5, 50])))
    a, b = fit_line(points)
    assert a == pytest.approx(2.0, rel=0.05)
    assert b == pytest.approx(40e-6, rel=0.05)


HUGE = "1" + "0" * 400


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        f'{{"gbs": {HUGE}}}',
        f'{{"num_cores": {HUGE}}}',
        f'{{"slowdown": {{"compute": {HUGE}}}}}',
        "9" * 5000,
    ],
    ids=["deep", "gbs", "num_cores", "slowdown", "digits"],
)
def test_text_that_python_chokes_on_is_no_cost_model(text: str) -> None:
    with pytest.raises(ValueError, match="hint:"):
        CostModel.from_json(text)


def test_numbers_of_numpy_are_figures() -> None:
    single: Any = np.float32
    whole: Any = np.int64
    work = Workload({"f": single(12.5)}, {"f": whole(8)}, np.float64(1.0))
    assert work.compute_us["f"] == 12.5
    assert Workload.from_json(work.to_json()) == work
    costs = CostModel(hop_us=single(0.1), num_cores=whole(2))
    assert costs.hop_us == single(0.1)
    assert CostModel.from_json(costs.to_json()) == costs
    for build in (lambda: Workload({"f": single("nan")}), lambda: CostModel(num_cores=single(2.0))):
        with pytest.raises(ValueError, match="hint: "):
            build()


def test_a_number_that_cannot_be_written_out_is_too_large() -> None:
    with pytest.raises(ValueError, match=r"CostModel\.hop_us is too large\nhint: "):
        CostModel(hop_us=10**5000)


def misfit(points: list[tuple[int, int]], a: float, b: float) -> float:
    return sum(abs(a + b * x - y) / y for x, y in points)


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 50)), min_size=1, max_size=9))
def test_no_line_through_two_points_is_closer(points: list[tuple[int, int]]) -> None:
    """The best line is among those through two points, through one and the origin, and level or through the origin."""
    a, b = fit_line(points)
    assert a >= 0
    assert b >= 0
    corners = [*points, (0, 0)]
    lines = [(y, 0.0) for _, y in points] + [(0.0, y / x) for x, y in points if x]
    for x0, y0 in corners:
        for x1, y1 in corners:
            if x1 > x0:
                slope = (y1 - y0) / (x1 - x0)
                lines.append((y0 - slope * x0, slope))
    best = min(misfit(points, *line) for line in lines if line[0] >= 0 and line[1] >= 0)
    assert misfit(points, a, b) <= best * (1 + 1e-6) + 1e-9


def test_measurements_of_one_size_give_a_level_line() -> None:
    assert fit_line([(8, 3.0), (8, 2.0), (8, 2.5)]) == (2.5, 0.0)


@pytest.mark.parametrize("points", [[], [(1, -1.0)], [(-1, 1.0)], [(1, float("nan"))], [(float("inf"), 1.0)]])
def test_what_is_no_measurement_is_refused(points: list[tuple[float, float]]) -> None:
    with pytest.raises(ValueError, match="hint:"):
        fit_line(points)


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
        ("[]", r"the workload is \[\]\nhint: it is an object; for example"),
        ('{"compute": {}}', "has 'compute', which means nothing there\nhint: did you mean 'compute_us'"),
        ('{"compute_us": 3}', "compute_us of the workload is 3"),
        ('{"compute_us": {"f": "3"}}', "compute_us of the workload: f is '3'\nhint: figures are finite numbers"),
        (
            '{"default_value_bytes": true}',
            "default_value_bytes of the workload is True\nhint: figures are finite numbers",
        ),
        ('{"synchronous": "f"}', "synchronous of the workload is 'f'"),
        (
            json.dumps({"compute_us": {"f": -1}}),
            "compute_us of the workload: f is -1\nhint: figures are finite numbers, and not negative",
        ),
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
