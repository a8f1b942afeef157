"""Calls that come again, on torch's tensors: which calls a graph may stand for, in whose memory it works, what a failure leaves."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="operators take torch tensors")

import torch

from crossfade.errors import ChannelBroken
from crossfade.ops.algorithms import fused
from crossfade.ops.calls.counts import Counts
from crossfade.ops.calls.job import Job, Once
from crossfade.ops.choice import replays, tune
from crossfade.ops.choice.candidate import Candidate
from crossfade.peers import replays as peer_replays
from tests.helpers.cuda_graphs import Machine, play

ROUNDS, FUSED = Candidate("rounds"), Candidate("fused")


class Lane:
    """As far as a call needs one."""

    def __init__(self, index: int, machine: Machine) -> None:
        self.index, self._log = index, machine.log
        self.is_replayable = True
        self.broken = ""

    def check(self) -> None:
        if self.broken:
            raise ChannelBroken(self.broken)

    def begin(self, stream: int) -> None:
        self.check()
        self._log.append(f"begin lane {self.index} on stream {stream}")

    def cut_off(self, error: BaseException) -> None:
        self.broken = self.broken or f"cut off by {error}"


class Group:
    """One of one rank, whose device is the machine's."""

    device_type, device = "cuda", "cuda:0"
    memory = SimpleNamespace(driver=SimpleNamespace(device=0, identity_of=lambda address: 1))

    def __init__(self, machine: Machine) -> None:
        self.belongings: dict[str, Any] = {}
        self.lanes = [Lane(index, machine) for index in range(2)]
        self.stream = 7
        self.is_captured_by_caller = False
        self._machine = machine

    def lane(self, index: int = 0) -> Any:
        return self.lanes[index]

    def current_stream(self) -> int:
        return self.stream

    def is_capturing(self) -> bool:
        return self.is_captured_by_caller or self._machine.is_capturing

    def check_call(self, lane: Lane) -> None:
        lane.check()
        self._machine.log.append(f"check lane {lane.index}")

    def barrier(self) -> None: ...

    def check(self) -> None: ...


class Way:
    """A product; notes the jobs that it was called for, at once or in a capture."""

    def __init__(self, machine: Machine) -> None:
        self.jobs: list[Job] = []
        self.is_computing = True
        self._machine = machine

    def __call__(self, job: Job) -> None:
        self.jobs.append(job)
        if self.is_computing:
            self._machine.do(lambda: torch.mm(job.a, job.b, out=job.out))
        job.fill()


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return play(monkeypatch)


@pytest.fixture
def settings() -> Iterator[Any]:
    matmul = torch.backends.cuda.matmul
    names = ("allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction", "allow_tf32")
    before = {name: getattr(matmul, name) for name in names}
    yield matmul
    for name, value in before.items():
        setattr(matmul, name, value)


@pytest.fixture
def group(machine: Machine) -> Group:
    made = Group(machine)
    made.belongings[tune._HEAT] = torch.ones(2, 2)  # what trials multiply to heat a GPU
    return made


@pytest.fixture
def way(machine: Machine) -> Way:
    return Way(machine)


def make(group: Any, **changes: Any) -> Job:
    dtype = changes.pop("dtype", torch.float32)
    a, b = torch.ones(2, 3, dtype=dtype), torch.ones(3, 4, dtype=dtype)
    return Job("an operator", group, **{"lane": 0, "a": a, "b": b, "bias": None, "out": a.new_zeros(2, 4), **changes})


def changed(job: Job, **changes: Any) -> Job:
    values = {name: getattr(job, name) for name in Job.__slots__}
    return Job(**{**values, **changes})


def times(number: int, job: Job, way: Way, candidate: Candidate = ROUNDS) -> None:
    for _ in range(number):
        replays.enqueue(candidate, way, job)


def test_the_second_call_is_captured_and_replayed(machine: Machine, group: Group, way: Way) -> None:
    job = make(group)
    for value in range(1, 6):
        job.a.fill_(value)
        times(1, job, way)
        assert torch.equal(job.out, torch.full((2, 4), 3.0 * value))
    assert (machine.num_captures, machine.num_replays, len(way.jobs)) == (1, 4, 2)
    assert machine.log == ["wait for a stream", *["begin lane 0 on stream 7", "replay", "check lane 0"] * 4]


@pytest.mark.parametrize(("name", "is_replayed"), [("rounds", True), ("plain", False), ("fused", True)])
def test_what_is_short_stays_as_it_is(machine: Machine, group: Group, way: Way, name: str, is_replayed: bool) -> None:
    times(3, make(group), way, Candidate(name))
    assert machine.num_captures == is_replayed
    assert any("replays" in name for name in group.belongings) is is_replayed


@pytest.mark.parametrize("what", ["a CPU", "a lane that cannot be replayed", "a capture of the caller's"])
def test_calls_that_are_not_replayed(machine: Machine, group: Group, way: Way, what: str) -> None:
    group.device_type = "cpu" if what == "a CPU" else "cuda"
    group.lanes[0].is_replayable = what != "a lane that cannot be replayed"
    group.is_captured_by_caller = what == "a capture of the caller's"
    times(3, make(group), way)
    assert (len(way.jobs), machine.num_captures) == (3, 0)
    assert list(group.belongings) == [tune._HEAT]


def test_a_call_that_the_caller_captures_is_no_use_of_the_one_before(machine: Machine, group: Group, way: Way) -> None:
    job = make(group)
    times(1, job, way)
    group.is_captured_by_caller = True
    times(2, job, way)
    group.is_captured_by_caller = False
    assert machine.num_captures == 0
    times(1, job, way)
    assert machine.num_replays == 1


def test_work_that_a_call_takes_along_is_not_captured(machine: Machine, group: Group, way: Way) -> None:
    """A graph that had it would repeat the first call's in all others."""
    job, filled = make(group), list[tuple[int, int]]()
    for number in range(3):
        fill = Once(lambda number=number: filled.append((number, machine.num_replays)), group.is_capturing)  # type: ignore[misc]
        times(1, changed(job, fill=fill), way)
        fill()  # as operators do at their end
    assert filled == [(0, 0), (1, 1), (2, 2)]


def other(job: Job) -> dict[str, Job]:
    """Calls that are not the same one, by what tells them apart."""
    counts = Counts(((1, 1), (1, 1)), 0)
    wide = torch.ones(2, 6)
    return {
        "another a": changed(job, a=job.a.clone()),
        "a longer b": changed(job, b=torch.ones(3, 5)),
        "another type": changed(job, out=job.out.half()),
        "a bias": changed(job, bias=torch.ones(4)),
        "rows that are gathered": changed(job, gathered=torch.ones(2, 3)),
        "another operator": changed(job, name="another"),
        "another lane": changed(job, lane=1),
        "strides of b": changed(job, b=job.b.as_strided((3, 4), (1, 3))),
        "strides of a": changed(job, a=wide[:, :3]),
        "a bias that another rank adds": changed(job, has_bias=True),
        "counts": changed(job, counts=counts),
    }


@pytest.mark.parametrize("what", list(other(make(None))))
def test_another_call_has_a_graph_of_its_own(machine: Machine, group: Group, way: Way, what: str) -> None:
    """Graphs of one lane share what they need in between; two lanes run at the same time."""
    way.is_computing = False
    job = make(group)
    times(2, job, way)
    another = other(job)[what]
    times(1, another, way)
    assert way.jobs[-1] is another
    times(1, another, way)
    assert machine.num_captures == 2
    assert (machine.pools[0] == machine.pools[1]) is (another.lane == 0)


def test_another_candidate_has_a_graph_of_its_own(machine: Machine, group: Group, way: Way) -> None:
    job = make(group)
    times(3, job, way)
    times(1, job, way, Candidate.of("rounds", rounds=2))
    assert (len(way.jobs), machine.num_replays) == (3, 2)


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        (torch.float32, "allow_tf32"),
        (torch.bfloat16, "allow_bf16_reduced_precision_reduction"),
        (torch.float16, "allow_fp16_reduced_precision_reduction"),
    ],
)
def test_a_setting_of_torch_is_heeded(
    machine: Machine, group: Group, way: Way, settings: Any, dtype: torch.dtype, name: str
) -> None:
    job = make(group, dtype=dtype)
    setattr(settings, name, False)
    times(3, job, way)
    setattr(settings, name, True)
    times(1, job, way)
    assert (len(way.jobs), machine.num_replays) == (3, 2)
    setattr(settings, name, False)
    times(1, job, way)
    assert (len(way.jobs), machine.num_replays) == (3, 3)


def test_no_new_output_lies_in_a_graphs_memory(group: Group, way: Way) -> None:
    """A way may put another tensor in the place of an output that nobody has seen; one of a graph's is written again."""
    times(3, make(group, is_new_out=True), way, FUSED)
    assert [job.is_new_out for job in way.jobs] == [True, False]


def test_shared_memory_that_grew_is_heeded(machine: Machine, group: Group, way: Way) -> None:
    """torch's other ranks have gone over to it."""
    job = make(group)
    times(3, job, way, FUSED)
    fused._handles(group)[1 << 20] = object()  # type: ignore[arg-type]
    times(1, job, way, FUSED)
    assert (len(way.jobs), machine.num_replays) == (3, 2)


def test_the_call_that_was_not_used_for_the_longest_time_is_forgotten(
    machine: Machine, group: Group, way: Way, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_replays, "MOST_CALLS", 3)
    first, second, third, fourth = (make(group) for _ in range(4))
    for job in (first, second, third):
        times(2, job, way)
    times(1, first, way)
    times(1, fourth, way)  # the second goes
    assert (machine.num_captures, machine.num_replays) == (3, 4)
    times(1, first, way)
    assert machine.num_replays == 5
    times(1, second, way)
    assert machine.num_replays == 5
    assert way.jobs[-1] is second


def test_a_call_that_failed_is_not_remembered(machine: Machine, group: Group) -> None:
    def fail(job: Job) -> None:
        raise ChannelBroken("rank 1 died")

    job = make(group)
    for _ in range(2):
        with pytest.raises(ChannelBroken):
            replays.enqueue(ROUNDS, fail, job)
    assert machine.num_captures == 0


def test_graphs_are_captured_again_after_all_were_forgotten(
    machine: Machine, group: Group, way: Way, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_replays, "MOST_CALLS", 2)
    job = make(group)
    times(2, job, way)
    others = [make(group) for _ in range(3)]
    for each in others:
        times(1, each, way)
    times(3, job, way)
    assert (machine.num_captures, machine.num_replays) == (2, 3)
    replays.forget(group)  # type: ignore[arg-type]
    replays.forget(group, 1)  # type: ignore[arg-type]
    times(3, job, way)
    assert (machine.num_captures, machine.num_replays) == (3, 5)


def test_a_capture_that_fails_says_why_and_breaks_its_lane_only(
    machine: Machine, group: Group, way: Way, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other ranks do the call."""
    job, good = make(group), make(group)
    times(2, good, way)
    times(1, job, way)

    def fail(job: Job) -> None:
        raise ValueError("no kernel")

    machine.is_unjoined = True
    with pytest.raises(ValueError, match="no kernel"):
        replays.enqueue(ROUNDS, fail, job)
    machine.is_unjoined = False
    assert not machine.is_recording, "torch's allocator would free no memory any more"
    with pytest.raises(ChannelBroken, match="no kernel"):
        times(1, good, way)
    times(3, make(group, lane=1), way)
    group.lanes[0].broken = ""
    times(2, job, way)  # in a pool that is not in the midst of a capture
    assert machine.num_captures == 4


def test_nothing_is_replayed_when_a_rank_has_died(machine: Machine, group: Group, way: Way) -> None:
    job, new = make(group), make(group)
    times(2, job, way)
    times(1, new, way)
    group.lanes[0].broken = "rank 1 died"
    for each in (job, new):
        with pytest.raises(ChannelBroken, match=r"^rank 1 died$"):
            times(1, each, way)
    assert (machine.num_captures, machine.num_replays) == (1, 1)


def test_trials_keep_no_graphs_and_share_a_stream(machine: Machine, group: Group, way: Way) -> None:
    for _ in range(3):
        job = make(group)
        trial = tune.trial_of(group, partial(replays.enqueue, ROUNDS, way, job))  # type: ignore[arg-type]
        assert trial(2) == [8.0 / tune.NUM_IN_GRAPH] * 2
        assert len(trial(3)) == 3
    num_streams = machine.num_streams
    assert num_streams == 2, "one for calls that come again, one for trials"
    kept = group.belongings[replays._name(0)]
    assert not kept._graphs


def test_what_a_trial_captures_is_not_launched_before_all_ranks_have_agreed_that_they_could(
    machine: Machine, group: Group, way: Way
) -> None:
    """A rank whose capture failed does not launch it, and the others' GPUs would wait for that rank."""
    # Not by `replays`, which launches graphs of its own while a trial warms up.
    trial = tune.trial_of(group, partial(way, make(group)))  # type: ignore[arg-type]
    assert trial(0) == []
    assert (machine.num_captures, machine.num_replays) == (1, 0)
    assert len(trial(2)) == 2
    assert machine.num_replays > 2, "some in front of those that are timed"


def test_products_heat_the_device_in_front_of_what_is_timed_and_of_nothing_else(
    machine: Machine, group: Group, way: Way, monkeypatch: pytest.MonkeyPatch
) -> None:
    heated_at: list[int] = []
    monkeypatch.setattr(tune, "_heat", lambda group: heated_at.append(machine.num_replays))
    trial = tune.trial_of(group, partial(way, make(group)))  # type: ignore[arg-type]
    assert trial(0) == []
    assert heated_at == []
    trial(2)
    assert heated_at == [0]
