"""Which calls are captured and replayed (`crossfade.ops.replays`), with graphs and tensors that only look like torch's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest

from crossfade.errors import ChannelBroken
from crossfade.ops import recording, replays
from crossfade.ops.candidate import Candidate
from crossfade.ops.job import Job, Once
from crossfade.ops.replays import MOST_CALLS, enqueue

ROUNDS = Candidate.of("rounds")


class Graph:
    """A graph of torch: what is done between begin and end is done at a replay."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._work: list[str] = []

    def capture_begin(self, pool: object, *, capture_error_mode: str) -> None:
        assert capture_error_mode == "thread_local"  # other threads of the program go on
        self._world.pools.append(pool)
        self._world.captured = self._work

    def capture_end(self) -> None:
        self._world.captured = None

    def replay(self) -> None:
        self._world.done += [f"replayed {each}" for each in self._work]
        self._world.log.append("replay")


@dataclass
class World:
    """A group on one lane, the part of torch that captures, and what was done."""

    device_type: str = "cuda"
    is_replayable: bool = True
    is_captured_by_caller: bool = False
    belongings: dict[str, Any] = field(default_factory=dict)
    done: list[str] = field(default_factory=list)  # by ways, at once or by a replay
    captured: list[str] | None = None  # what is being captured; None outside
    log: list[str] = field(default_factory=list)  # calls of the lane and of graphs, in order
    pools: list[object] = field(default_factory=list)
    num_graphs: int = 0
    broken: str = ""
    current: str = "caller's"
    home: Any = field(default_factory=lambda: SimpleNamespace(driver=SimpleNamespace(device=0)))

    # the group

    def lane(self, index: int = 0) -> Any:
        return SimpleNamespace(
            index=index,
            is_replayable=self.is_replayable,
            begin=lambda stream: self.log.append(f"begin lane {index} on the {stream} stream"),
            check=self._check,
            cut_off=lambda error: setattr(self, "broken", str(error)),
        )

    def _check(self) -> None:
        if self.broken:
            raise ChannelBroken(self.broken)

    def is_capturing(self) -> bool:
        return self.is_captured_by_caller or self.captured is not None

    def current_stream(self) -> str:
        return self.current

    def check_call(self, lane: Any) -> None:
        self.log.append(f"check lane {lane.index}")

    # torch

    def torch(self) -> Any:
        return SimpleNamespace(
            cuda=SimpleNamespace(
                Stream=lambda device: SimpleNamespace(wait_stream=lambda other: self.log.append(f"behind {other}")),
                graph_pool_handle=object,
                current_stream=lambda device: self.current_stream(),
                stream=self._on,
                CUDAGraph=self._graph,
            ),
            backends=SimpleNamespace(
                cuda=SimpleNamespace(
                    preferred_blas_library=str,
                    matmul=SimpleNamespace(allow_bf16_reduced_precision_reduction=True, fp32_precision="ieee"),
                )
            ),
            bfloat16="bfloat16",
            float16="float16 that nothing is made of",
        )

    @contextmanager
    def _on(self, stream: object) -> Iterator[None]:
        self.current = "capture's"
        try:
            yield
        finally:
            self.current = "caller's"

    def _graph(self) -> Graph:
        self.num_graphs += 1
        return Graph(self)

    # ways

    def way(self, job: Job) -> None:
        what = f"{job.name} of {job.a.data_ptr()}"  # a graph knows addresses
        (self.done if self.captured is None else self.captured).append(what)
        job.fill()


class Tensor:
    """What the key of a call is made of."""

    def __init__(self, address: int, shape: tuple[int, ...] = (4, 4), dtype: str = "bfloat16") -> None:
        self.shape, self.dtype, self._address = shape, dtype, address

    def data_ptr(self) -> int:
        return self._address

    def stride(self) -> tuple[int, ...]:
        return (self.shape[-1], 1)


def tensor(address: int, **more: Any) -> Any:
    return Tensor(address, **more)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    made = World()
    for module in (recording, replays):
        monkeypatch.setattr(module, "torch_or_raise", made.torch)
    return made


def job_of(world: World, address: int = 1, **more: Any) -> Job:
    group: Any = world
    return Job("sum", group, 0, tensor(address), tensor(2), None, tensor(3), **more)


def do(world: World, num: int = 3, candidate: Candidate = ROUNDS, job: Job | None = None) -> list[str]:
    for _ in range(num):
        enqueue(candidate, world.way, job or job_of(world))
    return world.done


def test_the_second_equal_call_is_captured_and_replayed(world: World) -> None:
    assert do(world, 4) == ["sum of 1", *["replayed sum of 1"] * 3]
    assert world.num_graphs == 1
    call = ["begin lane 0 on the caller's stream", "replay", "check lane 0"]
    assert world.log == ["behind caller's", *call * 3]


@pytest.mark.parametrize(
    ("name", "is_replayed"),
    [("rounds", True), ("tiles", True), ("plain", False), ("fused", True)],
)
def test_what_is_short_stays_as_it_is(world: World, name: str, is_replayed: bool) -> None:
    do(world, candidate=Candidate.of(name))
    assert world.num_graphs == is_replayed
    assert any("replays" in name for name in world.belongings) is is_replayed


@pytest.mark.parametrize(
    "more", [{"device_type": "cpu"}, {"is_replayable": False}, {"is_captured_by_caller": True}], ids=str
)
def test_calls_that_are_not_replayed(world: World, more: dict[str, Any]) -> None:
    for name, value in more.items():
        setattr(world, name, value)
    assert do(world) == ["sum of 1"] * 3
    assert world.belongings == {}


def test_a_call_that_the_caller_captures_is_no_use_of_the_one_before(world: World) -> None:
    do(world, 1)
    world.is_captured_by_caller = True
    do(world, 2)
    world.is_captured_by_caller = False
    assert world.num_graphs == 0
    assert do(world, 1)[-1] == "replayed sum of 1"


@pytest.mark.parametrize(
    "change",
    [
        lambda job: replace(job, a=tensor(9)),
        lambda job: replace(job, b=tensor(2, shape=(4, 5))),
        lambda job: replace(job, out=tensor(3, dtype="float16")),
        lambda job: replace(job, bias=tensor(4)),
        lambda job: replace(job, gathered=tensor(4)),
        lambda job: replace(job, counts=(1, 2)),
        lambda job: replace(job, name="other"),
        lambda job: replace(job, lane=1),
    ],
)
def test_another_call_has_a_graph_of_its_own(world: World, change: Callable[[Job], Job]) -> None:
    do(world)
    other = change(job_of(world))
    do(world, 1, job=other)
    assert not world.done[-1].startswith("replayed")
    do(world, 1, job=other)
    assert world.done[-1].startswith("replayed")
    assert world.num_graphs == 2
    # Graphs of one lane share what they need in between; two lanes run at the same time.
    assert (world.pools[0] is world.pools[1]) == (other.lane == 0)


def test_another_candidate_has_a_graph_of_its_own(world: World) -> None:
    do(world)
    do(world, 1, Candidate.of("rounds", rounds=2))
    assert world.done[-1] == "sum of 1"


def test_work_that_a_call_takes_along_is_not_captured(world: World) -> None:
    """A graph that had it would repeat the first call's in all others."""
    for number in range(3):
        fill = Once(lambda number=number: world.done.append(f"fill {number}"), world.is_capturing)  # type: ignore[misc]
        enqueue(ROUNDS, world.way, job_of(world, fill=fill))
        fill()  # as operators do at their end
    replayed = "replayed sum of 1"
    assert world.done == ["sum of 1", "fill 0", replayed, "fill 1", replayed, "fill 2"]


def test_the_call_that_was_not_used_for_the_longest_time_is_forgotten(world: World) -> None:
    for address in range(MOST_CALLS):
        do(world, 2, job=job_of(world, address))
    do(world, 1, job=job_of(world, 0))
    do(world, 1, job=job_of(world, MOST_CALLS))  # 1 goes
    assert world.num_graphs == MOST_CALLS
    assert do(world, 1, job=job_of(world, 0))[-1] == "replayed sum of 0"
    assert do(world, 1, job=job_of(world, 1))[-1] == "sum of 1"


def test_a_call_that_failed_is_not_remembered_and_a_failed_capture_breaks_the_lane(world: World) -> None:
    def fails(job: Job) -> None:
        raise ChannelBroken("rank 1 died")

    for _ in range(2):
        with pytest.raises(ChannelBroken):
            enqueue(ROUNDS, fails, job_of(world))
    assert world.num_graphs == 0
    do(world, 1)
    with pytest.raises(ChannelBroken):
        enqueue(ROUNDS, fails, job_of(world))
    assert world.captured is None
    with pytest.raises(ChannelBroken, match="rank 1 died"):  # the other ranks do the call
        do(world, 1)
    world.broken = ""
    assert do(world, 1)[-1] == "replayed sum of 1"
