"""Graphs of which an actor could open some channels and not all: nothing of them stays, and nobody waits."""

from __future__ import annotations

import gc
import os
import threading
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")

import crossfade  # noqa: E402
from crossfade.channels.slots import WriterSlots  # noqa: E402
from crossfade.collective import allreduce  # noqa: E402
from crossfade.device.host_driver import HostDriver, SharedRange  # noqa: E402
from crossfade.device.ledger import Ledger  # noqa: E402
from crossfade.errors import DeviceError, TaskError  # noqa: E402
from crossfade.host.memory import Memory  # noqa: E402
from tests.helpers.builds import interpreted_only  # noqa: E402
from tests.helpers.calm import calm_s  # noqa: E402

pytestmark = pytest.mark.usefixtures("torn_down")

_set_aside = WriterSlots.set_aside
_map_host = HostDriver.map_host
_is_idle, _has_happened = HostDriver.is_idle, HostDriver.has_happened


class Short:
    """Runs out of memory when it is told to, and says what it holds."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self._kept: Any = None

    def make(self, value: int) -> Any:
        return torch.full((4,), value)

    def count(self, value: int) -> int:
        return value + 1

    def keep(self, kept: Any, seen: Any) -> int:
        self._kept = kept
        return int(kept.sum() + seen.sum())

    def drop(self) -> None:
        self._kept = None

    def has_room_for(self, num_rings: int | None) -> None:
        """From now on memory is there for so many rings of a graph, or for all of them."""
        left = iter(range(num_rings or 0))

        def refuse(slots: WriterSlots, num: int, size_bytes: int) -> None:
            if next(left, None) is None:
                raise OSError(12, "no memory on this actor")
            _set_aside(slots, num, size_bytes)

        WriterSlots.set_aside = _set_aside if num_rings is None else refuse  # type: ignore[method-assign, assignment]

    def can_pin(self, num_pieces: int) -> None:
        """From now on so many pieces of memory."""
        left = iter(range(num_pieces))

        def refuse(driver: HostDriver, memory: Memory, offset: int, size_bytes: int, label: str) -> SharedRange:
            if next(left, None) is None:
                raise DeviceError("no memory that can be pinned")
            return _map_host(driver, memory, offset, size_bytes, label)

        HostDriver.map_host = refuse  # type: ignore[method-assign, assignment]

    def held(self) -> tuple[list[str], int, list[str]]:
        """Threads that graphs have, open descriptors, pinned memory."""
        gc.collect()
        threads = [thread.name for thread in threading.enumerate()]
        ledgers = [each for each in gc.get_objects() if isinstance(each, Ledger)]
        pinned = [held for ledger in ledgers for held in ledger.held() if held.startswith("mapped")]
        of_graphs = [
            name for name in threads if name.startswith(("crossfade-coll", "crossfade-give", "crossfade-meet"))
        ]
        return of_graphs, len(os.listdir("/proc/self/fd")), pinned

    def have_others_enqueue(self) -> None:
        """From now on its streams are never idle, and nothing ends that is marked on them."""
        late: set[int] = set()
        record_event = HostDriver.record_event

        def record(driver: HostDriver, event: int, stream: int) -> None:
            late.add(event)
            record_event(driver, event, stream)

        def is_idle(driver: HostDriver, stream: int) -> bool:
            return False

        def has_happened(driver: HostDriver, event: int) -> bool:
            return event not in late

        HostDriver.record_event = record  # type: ignore[method-assign, assignment]
        HostDriver.is_idle = is_idle  # type: ignore[method-assign, assignment]
        HostDriver.has_happened = has_happened  # type: ignore[method-assign, assignment]

    def have_others_end(self) -> None:
        """Streams are idle again."""
        HostDriver.is_idle = _is_idle  # type: ignore[method-assign]
        HostDriver.has_happened = _has_happened  # type: ignore[method-assign]


def held(actors: list[Any]) -> list[Any]:
    found: list[Any] = crossfade.get([actor.held.remote() for actor in actors], timeout=30)
    return found


def total(actors: list[Any], how: str) -> Any:
    with crossfade.InputNode() as given:
        sums = allreduce.bind([actor.make.bind(given) for actor in actors], transport=how)
        return crossfade.MultiOutputNode(sums)


@interpreted_only("it replaces a method of a compiled class")
@pytest.mark.parametrize("num_short", [1, 2])
@pytest.mark.parametrize("how", ["copy", "gloo"])
def test_groups_of_collectives_end_and_nobody_waits_for_it(how: str, num_short: int) -> None:
    actors = [crossfade.remote(Short).remote() for _ in range(2)]
    graph = total(actors, how).compile(buffer_bytes=1 << 16)
    graph.teardown()
    before = after = held(actors)
    crossfade.get([actor.has_room_for.remote(0) for actor in actors[:num_short]])
    for _ in range(3):
        start_s = calm_s()
        with pytest.raises(TaskError, match="no memory on this actor"):
            total(actors, how).compile(buffer_bytes=1 << 16)
        after = held(actors)
        assert calm_s() - start_s < 3  # joining threads that wait for each other takes five
    start_s = calm_s()
    while [threads for threads, _, _ in after] != [[], []]:
        assert calm_s() - start_s < 10, after
        after = held(actors)
    assert [num for _, num, _ in after] <= [num + 1 for _, num, _ in before]
    crossfade.get([actor.has_room_for.remote(None) for actor in actors])
    graph = total(actors, how).compile(buffer_bytes=1 << 16)
    assert [each.tolist() for each in crossfade.get(graph.execute(3), timeout=30)] == [[6] * 4] * 2


@interpreted_only("it replaces a method of a compiled class")
def test_memory_that_was_pinned_is_given_up() -> None:
    actor = crossfade.remote(Short).options(num_gpus=1).remote()

    def both() -> Any:
        with crossfade.InputNode() as given:
            return crossfade.MultiOutputNode([actor.make.bind(given), actor.count.bind(given)])

    both().compile(buffer_bytes=1 << 16).teardown()
    _, num_open, pinned = held([actor])[0]
    crossfade.get(actor.has_room_for.remote(1))
    for _ in range(3):
        with pytest.raises(TaskError, match="no memory on this actor"):
            both().compile(buffer_bytes=1 << 16)
        assert held([actor]) == [([], num_open, pinned)]


@pytest.mark.parametrize("role", ["writer", "reader"])
def test_chunks_that_were_pinned_are_given_up(role: str) -> None:
    """The plan's signals are a piece; a lane, of which an edge has one to each reader, needs two."""
    maker, *readers = (crossfade.remote(Short).remote() for _ in range(3))
    short = maker if role == "writer" else readers[0]

    def staged() -> Any:
        with crossfade.InputNode() as given:
            made = maker.make.bind(given).with_tensor_transport("staged")
            more = maker.make.bind(given).with_tensor_transport("staged")
            return crossfade.MultiOutputNode([reader.keep.bind(made, more) for reader in readers])

    graph = staged().compile()
    graph.teardown(timeout=30)
    before = held([maker, *readers])
    num_failed = 0
    while True:
        crossfade.get(short.can_pin.remote(num_failed))
        try:
            graph = staged().compile()
        except TaskError as error:
            assert "no memory that can be pinned" in str(error)  # noqa: PT017
        else:
            break
        num_failed += 1
        start_s = calm_s()
        while (after := held([maker, *readers])) != before:
            assert calm_s() - start_s < 10, (before, after)
    assert num_failed == (8 if role == "writer" else 4)
    assert crossfade.get(graph.execute(1), timeout=30) == [8, 8]


@pytest.mark.parametrize("is_open_before", [True, False])
def test_a_plan_that_is_left_over_ends_beside_others_that_go_on(is_open_before: bool) -> None:
    """It has staged ends as well, and shares their streams: those are not idle when the last tensor of the plan goes."""
    maker, keeper = (crossfade.remote(Short).remote() for _ in range(2))

    def other() -> Any:
        with crossfade.InputNode() as given:
            return keeper.keep.bind(made := maker.make.bind(given).with_tensor_transport("copy"), made).compile()

    with crossfade.InputNode() as given:
        kept = maker.make.bind(given).with_tensor_transport("copy")
        seen = maker.make.bind(given).with_tensor_transport("staged")
        graph = keeper.keep.bind(kept, seen).compile()

    def chunks() -> list[str]:
        return [name for name in held([keeper])[0][2] if "chunks" in name]

    assert crossfade.get(graph.execute(1), timeout=30) == 8
    beside = other() if is_open_before else None
    graph.teardown(timeout=30)
    crossfade.get(keeper.have_others_enqueue.remote())
    crossfade.get(keeper.drop.remote())
    beside = beside or other()
    for value in range(3):
        assert crossfade.get(beside.execute(value), timeout=30) == 8 * value
    assert chunks() != []
    crossfade.get(keeper.have_others_end.remote())
    start_s = calm_s()
    while left := chunks():
        assert calm_s() - start_s < 10, left
