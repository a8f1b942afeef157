"""One party's part in collectives of device tensors, when its thread and its main thread meet; the other party is the test."""

from __future__ import annotations

import os
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest

torch: Any = pytest.importorskip("torch")

from crossfade.collectives.end import GroupCollective  # noqa: E402
from crossfade.collectives.group import Group  # noqa: E402
from crossfade.collectives.parties import Parties  # noqa: E402
from crossfade.collectives.protocol import Caller  # noqa: E402
from crossfade.collectives.table import Message, Part, RendezvousTable, Status  # noqa: E402
from crossfade.collectives.terms import Terms, make_offer  # noqa: E402
from crossfade.device.context import DeviceContext  # noqa: E402
from crossfade.device.host_driver import HostDriver  # noqa: E402
from crossfade.device.memory import Pool  # noqa: E402
from crossfade.device.streams import Streams  # noqa: E402
from crossfade.errors import ChannelBroken  # noqa: E402
from crossfade.host.memory import Memory  # noqa: E402
from crossfade.host.processes import Alive, open_pidfd  # noqa: E402
from crossfade.types import CollectiveKind, ReduceOp  # noqa: E402
from tests.helpers.bells import new_bell  # noqa: E402

pytestmark = pytest.mark.timeout(60)

LIMIT_S = 10.0
NUM_SLOTS = 8
TERMS = Terms("c0", CollectiveKind.ALLREDUCE, ReduceOp.SUM, 0, ("A", "B"))


class Mover:
    """Enqueues when it may, as on a device where hosts only enqueue; here that is the CPU.

    Attributes:
        begun, may_go: of each exchange.
        num_moved: exchanges that are enqueued.
    """

    caller = Caller.ANY
    signal_bytes = 0

    def __init__(self) -> None:
        self.begun, self.may_go = threading.Semaphore(0), threading.Semaphore(0)
        self.num_moved = 0

    def move(self, terms: Terms, rank: int, tensors: Sequence[Any], outs: Sequence[Any]) -> None:
        self.begun.release()
        assert self.may_go.acquire(timeout=LIMIT_S)
        for tensor, out in zip(tensors, outs, strict=True):
            out.copy_(tensor)
        self.num_moved += 1

    def describe(self) -> str:
        return ""

    def connect(self, *args: Any) -> None: ...

    def abort(self, reason: str) -> None: ...

    def close(self) -> None: ...


class World:
    """Party A's group, and what the other one says."""

    def __init__(self) -> None:
        parts = [Part.create(name, bytes(16), 0, NUM_SLOTS) for name in "AB"]
        theirs = [Part(Memory(os.dup(part.memory.fd)), 0, NUM_SLOTS) for part in parts]
        self.driver = HostDriver(LIMIT_S)
        home = DeviceContext(self.driver, Pool(self.driver), Streams(self.driver))
        self.mover = Mover()
        self._other = RendezvousTable(theirs, 1)
        self._bells = {name: new_bell() for name in "AB"}
        with ExitStack() as undo:
            alive = Alive({"B": open_pidfd(os.getpid(), undo)})
        table, parties = RendezvousTable(parts, 0), Parties("AB", "A", self._bells, alive)

        def give_back() -> None:
            table.close()
            parties.alive.close()

        self.group = Group(table, self.mover, home, parties, give_back)
        self.end = GroupCollective(self.group, TERMS, 0, 0, 1)

    def offer(self) -> None:
        """The other party comes to the collective."""
        self._other.publish(Message(Status.OFFER, 0, make_offer(TERMS, 1, [torch.ones(3)]).layout()))

    def close(self) -> None:
        self.group.ask_to_end()
        self._other.end()
        self._other.finish()
        for _ in range(NUM_SLOTS):
            self.mover.may_go.release()
        self.group._thread.join(LIMIT_S)
        assert not self.group._thread.is_alive()
        for bell in self._bells.values():
            bell.close()
        assert self.driver.ledger.held() == []


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.close()


def test_pl5_a_method_begins_when_all_that_everybody_has_come_to_is_enqueued(world: World) -> None:
    """The party's thread is about to enqueue its part, and has not: the main thread waits for that."""
    world.end.start([torch.ones(3)])
    world.group.enqueue_all()  # the other one has not come: there is nothing to wait for
    world.offer()
    assert world.mover.begun.acquire(timeout=LIMIT_S)
    has_begun: list[int] = []

    def run() -> None:
        world.group.enqueue_all()
        has_begun.append(world.mover.num_moved)

    main = threading.Thread(target=run)
    main.start()
    main.join(0.1)
    assert has_begun == []
    world.mover.may_go.release()
    main.join(LIMIT_S)
    assert has_begun == [1]
    result = world.end.try_finish()
    assert result is not None
    world.group.enqueue_all()


def test_who_waits_to_begin_a_method_is_let_go_when_a_party_is_gone(world: World) -> None:
    world.end.start([torch.ones(3)])
    world.offer()
    assert world.mover.begun.acquire(timeout=LIMIT_S)
    main = threading.Thread(target=world.group.enqueue_all)
    main.start()
    world.group.break_off("B is gone")
    main.join(LIMIT_S)
    assert not main.is_alive()


def test_an_end_keeps_no_tensor_once_it_is_closed() -> None:
    """One that the other party never came to: a program may keep its graph for long behind a death."""
    world = World()
    memory = np.ones(3, np.float32)
    kept = weakref.ref(memory)
    world.end.start([torch.from_numpy(memory)])
    del memory
    world.group.break_off("B is gone")
    world.end.close()
    world.close()
    assert kept() is None


def test_a_result_may_be_taken_while_the_group_ends(world: World) -> None:
    """The thread looks at what is under way, and the main thread takes it out meanwhile."""
    world.mover.may_go.release(2)
    for _ in range(2):
        world.end.start([torch.ones(3)])
        world.offer()
        world.group.enqueue_all()
    has_happened, is_ending = world.driver.has_happened, threading.Event()

    def happens(event: int) -> bool:
        if threading.current_thread() is world.group._thread and not is_ending.is_set():
            is_ending.set()
            world.group._kept.append(world.group._kept.popleft())  # what the main thread's taking does to it
        return has_happened(event)

    world.driver.has_happened = happens  # type: ignore[method-assign]
    world.group.ask_to_end()
    assert is_ending.wait(LIMIT_S)


# Recording


class Counted:
    """Counts what is enqueued on a device beside the exchanges, and who asked for spans."""

    execution = 0

    def __init__(self, world: World) -> None:
        self.num_events = 0
        self.spans: list[tuple[int, int | None, int]] = []
        self._record = world.driver.record_event
        world.driver.record_event = self.record_event  # type: ignore[method-assign]

    def record_event(self, event: int, stream: int) -> None:
        self.num_events += 1
        self._record(event, stream)

    def __call__(self, stream: int, execution: int | None = None) -> Callable[[int], None]:
        self.num_events += 1

        def end(size_bytes: int) -> None:
            self.num_events += 1
            self.spans.append((stream, execution, size_bytes))

        return end


@pytest.mark.parametrize("is_recorded", [False, True])
def test_a_collective_is_one_span_where_somebody_asks_and_else_nothing_is_enqueued_for_it(
    world: World, is_recorded: bool
) -> None:
    counted, hosts = Counted(world), []
    world.end.on_moved = lambda start_ns, end_ns: hosts.append(end_ns - start_ns)
    world.mover.may_go.release(3)
    if is_recorded:
        world.end.around = counted
    for number in range(3):
        world.end.start([torch.ones(3 if number else 4)])
        world.offer()  # of three elements: the first is no fit, and becomes an error
        world.group.enqueue_all()
        assert world.end.try_finish() is not None
    stream = world.group.streams.exchange
    assert counted.spans == ([(stream, 1, 12), (stream, 2, 12)] if is_recorded else [])
    assert counted.num_events == (3 + 2 + 4 if is_recorded else 3 + 2)
    assert len(hosts) == (0 if is_recorded else 3)  # the host's share is told where the device's is not


def test_a_span_ends_also_where_the_exchange_cannot_be_enqueued(world: World) -> None:
    counted = Counted(world)

    def refuse(*args: Any) -> None:
        raise RuntimeError("no memory for this")

    world.mover.move = refuse  # type: ignore[method-assign, assignment]
    world.end.around = counted
    world.end.start([torch.ones(3)])
    world.offer()
    world.group.enqueue_all()
    with pytest.raises(ChannelBroken, match="no memory for this"):
        world.end.try_finish()
    assert len(counted.spans) == 1


@pytest.mark.parametrize("kind", ["no memory", "nested"])
def test_a_tensor_that_torch_refuses_is_its_partys_failure_and_not_the_actors_end(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(tensor: Any) -> Any:
        raise RuntimeError("out of memory")

    tensor = torch.ones(3)
    if kind == "no memory":
        monkeypatch.setattr(torch.Tensor, "resolve_conj", refuse)
    else:
        with warnings.catch_warnings(action="ignore"):  # they are a prototype, says torch
            tensor = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    offer = make_offer(TERMS, 1, [tensor])
    assert offer.tensors == ()
    assert offer.failure is not None
    assert (offer.failure.actor, offer.failure.node) == ("B", TERMS.label)
    assert ("out of memory" if kind == "no memory" else "a nested tensor on cpu\nhint:") in offer.failure.message
