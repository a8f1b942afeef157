"""Torch's schedules as plans: sound, complete, printable, simulated."""

from __future__ import annotations

import re
from collections import Counter

import pytest

pytest.importorskip("torch", reason="the schedules are torch's")

from types import SimpleNamespace

import torch

from crossfade import parse_plan
from crossfade.cluster import HostGroup, Network
from crossfade.errors import CrossfadeError, GraphError, PlanError, UnknownTransport
from crossfade.pipelines.lowering import id_of, plan_of
from crossfade.pipelines.measure_stages import StageTimes
from crossfade.pipelines.orders import SCHEDULES, Kind, Pass, order_of, passes_of
from crossfade.pipelines.predict import Prediction, predict
from crossfade.pipelines.report import StageReport
from crossfade.pipelines.timing import PassTime
from crossfade.pipelines.torch_names import schedule_order
from crossfade.plan.actions import Verb
from crossfade.plan.validate import validate
from crossfade.schedule.cost import CostModel
from crossfade.topology import Topology
from crossfade.types import DRIVER, Transport

NUMBERS = [(4, 8), (8, 8), (8, 16), (2, 4), (6, 9)]
"""Stages and microbatches."""


@pytest.mark.parametrize(("num_stages", "num_microbatches"), NUMBERS, ids=str)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("transport", [Transport.SHM, Transport.GLOO, Transport.COPY])
def test_every_schedule_is_a_sound_plan_that_does_each_pass_once(
    schedule: str, num_stages: int, num_microbatches: int, transport: Transport
) -> None:
    order = order_of(schedule, num_stages, num_microbatches)
    passes = passes_of(order)
    counts = Counter(each for mine in passes.values() for each in mine)
    assert set(counts.values()) == {1}
    for stage in range(num_stages):
        for number in range(num_microbatches):
            assert counts[Pass(Kind.FORWARD, stage, number)] == 1
            divided = [counts[Pass(kind, stage, number)] for kind in (Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)]
            whole = counts[Pass(Kind.BACKWARD, stage, number)]
            assert (whole, *divided) in ((1, 0, 0), (0, 1, 1))
    gpus = {rank: rank for rank in order} if transport is Transport.COPY else None
    plan = plan_of(order, transport, gpus)
    validate(plan)
    assert parse_plan(str(plan)) == plan
    for rank, mine in passes.items():
        ran = [action.target for action in plan.programs[f"rank{rank}"] if action.verb is Verb.RUN]
        assert ran == [id_of(each) for each in mine]


@pytest.mark.parametrize("transport", [Transport.COPY, Transport.STAGED, Transport.NCCL])
def test_plans_of_gpus_are_sound_and_simulated(transport: Transport) -> None:
    prediction = predict(stages(4, 1000, 2000), "Interleaved1F1B", 4, 2, torch.device("cuda"), transport=transport)
    assert prediction.plan.devices == {"rank0": (0,), "rank1": (1,)}
    assert 4 * 2 * 3000 <= prediction.step_us < 2 * 4 * 2 * 3000


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("device", "far"), [("cuda", Transport.NCCL), ("cpu", Transport.TCP)])
def test_every_schedule_is_sound_on_the_hosts_of_a_cluster(schedule: str, device: str, far: Transport) -> None:
    group = HostGroup(Network(10.0, 5.0), num_cores=2, num=4, num_gpus=2)
    found = predict(stages(8), schedule, 8, None, torch.device(device), topology=Topology(hosts=(group,)))
    hosts, plan = found.plan.hosts, found.plan  # predict has validated it
    between = [(each, hosts[each.writer] != hosts[reader]) for each in plan.channels for reader in each.readers]
    moved = [(each.transport is far, is_far) for each, is_far in between if DRIVER not in (each.writer, *each.readers)]
    assert all(goes_far == is_far for goes_far, is_far in moved)
    assert {is_far for _, is_far in moved} == {False, True}
    assert any("host0 -> host1" in each.name for each in found.bounds.links)
    assert found.step_us >= 8 * 30


def test_one_forward_one_backward_is_the_textbooks() -> None:
    order = passes_of(order_of("1F1B", 2, 3))
    assert [id_of(each) for each in order[0]] == ["F0.0", "F0.1", "B0.0", "F0.2", "B0.1", "B0.2"]
    assert [id_of(each) for each in order[1]] == ["F1.0", "B1.0", "F1.1", "B1.1", "F1.2", "B1.2"]


def time_of(us: float) -> PassTime:
    """Of what takes a host and a GPU equally long."""
    return PassTime(us, us)


def stages(num: int, forward_us: float = 10.0, backward_us: float = 20.0) -> list[StageReport]:
    half = time_of(backward_us / 2)
    times = StageTimes(time_of(forward_us), time_of(backward_us), half, half, 100, 0, 0)
    return [StageReport("a", "b", times, 1000, 1000, 0) for _ in range(num)]


def without_costs(schedule: str, num_stages: int, num_microbatches: int, num_ranks: int | None = None) -> Prediction:
    """A prediction in which only passes take time."""
    free = CostModel(
        write_us=0, write_large_us=0, write_us_per_mb=0, read_us=0, read_large_us=0, hop_us=0, wake_us=0, step_us=0,
        num_cores=num_stages,
    )  # fmt: skip
    return predict(stages(num_stages), schedule, num_microbatches, num_ranks, torch.device("cpu"), free)


@pytest.mark.parametrize(("num_stages", "num_microbatches"), [(2, 4), (4, 4), (4, 12)], ids=str)
@pytest.mark.parametrize("schedule", ["GPipe", "1F1B"])
def test_the_predicted_step_is_the_textbooks(schedule: str, num_stages: int, num_microbatches: int) -> None:
    found = without_costs(schedule, num_stages, num_microbatches)
    assert found.step_us == pytest.approx((num_microbatches + num_stages - 1) * 30.0)
    bubble = (num_stages - 1) / (num_microbatches + num_stages - 1)
    assert found.bubbles == pytest.approx([bubble] * num_stages)
    assert found.exposed_us == pytest.approx([0.0] * num_stages, abs=1e-6)
    alive = [num_microbatches if schedule == "GPipe" else num_stages - stage for stage in range(num_stages)]
    assert found.memory_bytes == tuple(2000 + 100 * num for num in alive)


GPU_STEPS_US = {"GPipe": 190.0, "1F1B": 175.0}
"""Of two stages and four microbatches; forward passes of 10 us, backward passes of 20, transfers of 5."""


@pytest.mark.parametrize("schedule", GPU_STEPS_US)
def test_gpus_move_nothing_before_the_receiver_has_come_to_it(schedule: str) -> None:
    free = CostModel(
        push_host_us=0,
        accept_host_us=0,
        copy_us=0,
        copy_gbs=1.0,
        read_us=0,
        write_us=0,
        hop_us=0,
        wake_us=0,
        step_us=0,
        num_cores=8,
    )
    times = StageTimes(PassTime(0, 10), PassTime(0, 20), None, None, 100, 5000, 5000)
    seen = [StageReport("a", "b", times, 1000, 1000, 0)] * 2
    found = predict(seen, schedule, 4, 2, torch.device("cuda"), free)
    assert found.step_us == pytest.approx(GPU_STEPS_US[schedule], abs=0.01)
    assert found.bubbles == pytest.approx([1 - 120 / found.step_us] * 2)


def test_a_host_that_is_slower_than_its_gpu_is_what_counts() -> None:
    times = StageTimes(PassTime(50, 10), PassTime(100, 20), None, None, 100, 0, 0)
    seen = [StageReport("a", "b", times, 1000, 1000, 0)] * 2
    found = predict(seen, "GPipe", 8, 2, torch.device("cuda"))
    assert found.step_us > 8 * 150
    assert min(found.bubbles) > 0.8


def test_values_of_several_senders_do_not_wait_for_each_other() -> None:
    """A rank in the middle has posted receives from both neighbours."""
    times = StageTimes(PassTime(0, 4000), PassTime(0, 8000), PassTime(0, 4000), PassTime(0, 4000), 100, 10**9, 10**9)
    seen = [StageReport("a", "b", times, 1000, 1000, 0)] * 8
    steps_us = [predict(seen, name, 8, 4, torch.device("cuda")).step_us for name in ("DualPipeV", "Interleaved1F1B")]
    assert steps_us[0] < 1.05 * steps_us[1]


def test_what_is_busy_of_a_rank_with_a_gpu_is_its_gpu() -> None:
    times = StageTimes(PassTime(3500, 1000), PassTime(1500, 4000), None, None, 100, 0, 0)
    found = predict([StageReport("a", "b", times, 1000, 1000, 0)] * 2, "GPipe", 8, 2, torch.device("cuda"))
    busy = {each.name: each.busy for each in found.bounds.actors}
    for rank, bubble in enumerate(found.bubbles):
        assert busy[f"rank{rank}"] == pytest.approx((1 - bubble) * found.step_us / found.bounds.step_us)


def test_by_tcp_there_are_hosts() -> None:
    with pytest.raises(GraphError, match="between hosts"):
        predict(stages(2), "1F1B", 4, 2, torch.device("cpu"), transport="tcp")


def test_interleaved_has_a_smaller_bubble_and_zero_bubble_a_smaller_one_still() -> None:
    plain, interleaved, zero = (
        max(without_costs(schedule, num_stages, 8).bubbles)
        for schedule, num_stages in (("1F1B", 4), ("Interleaved1F1B", 8), ("ZBVZeroBubble", 8))
    )
    assert plain > interleaved > zero


REFUSED = [
    ("1F2B", 4, 8, None, "there is no schedule '1F2B'", "1F1B"),
    ("1f1b", 4, 8, None, "there is no schedule '1f1b'", "did you mean '1F1B'?"),
    ("GPipe", 4, 8, 2, "one stage on each rank, not 4 on 2", "cut it into 2 stages"),
    ("1F1B", 4, 2, None, "as many microbatches as stages, 4", "GPipe"),
    ("Interleaved1F1B", 4, 8, 3, "4 do not go on 3", "a multiple of 3"),
    ("ZBVZeroBubble", 8, 8, 2, "torch refuses ZBVZeroBubble with 8 stages, 2 ranks", "other numbers"),
    ("DualPipeV", 8, 4, 4, "torch refuses DualPipeV", "other numbers"),
    ("GPipe", 4, 0, None, "0 microbatches", "at least 1"),
]


@pytest.mark.parametrize(("schedule", "num_stages", "num", "num_ranks", "says", "hint"), REFUSED)
def test_what_a_schedule_cannot_do_is_refused_with_the_reason(
    schedule: str, num_stages: int, num: int, num_ranks: int | None, says: str, hint: str
) -> None:
    with pytest.raises(GraphError) as caught:
        order_of(schedule, num_stages, num, num_ranks)
    message, _, told = str(caught.value).partition("\nhint: ")
    assert says in message
    assert hint in told


@pytest.mark.parametrize(
    ("asked", "hint"), [("foo", "the transports are auto, "), ("Shm", "did you mean 'shm'? "), ("communicator", "the ")]
)
def test_a_transport_that_does_not_exist_is_refused_with_the_names(asked: str, hint: str) -> None:
    with pytest.raises(
        UnknownTransport, match=rf"^there is no transport '{asked}' between ranks\nhint: .*{re.escape(hint)}"
    ):
        predict(stages(4), "1F1B", 4, None, torch.device("cpu"), transport=asked)


def test_stages_that_cannot_divide_their_backward_pass_are_refused_where_it_matters() -> None:
    whole = [
        StageReport(each.first, each.last, StageTimes(time_of(1), time_of(2), None, None, 0, 0, 0), 0, 0, 0)
        for each in stages(4)
    ]
    assert predict(whole, "Interleaved1F1B", 4, 2, torch.device("cpu")).step_us > 0
    with pytest.raises(GraphError, match="torch cannot divide"):
        predict(whole, "ZBVZeroBubble", 4, 2, torch.device("cpu"))


def test_an_order_that_stops_is_an_error_that_names_the_passes() -> None:
    order = {0: (Pass(Kind.BACKWARD, 0, 0), Pass(Kind.FORWARD, 0, 0)), 1: (Pass(Kind.FORWARD, 1, 0),)}
    with pytest.raises(PlanError, match=r"PL-2: the schedule stops before B0\.0, F1\.0"):
        plan_of(order, Transport.SHM)


def test_a_torch_without_what_is_needed_is_named_by_its_version() -> None:
    with pytest.raises(CrossfadeError, match=rf"torch {torch.__version__.split('+')[0]}.* has no pipeline_order"):
        schedule_order(SimpleNamespace())
