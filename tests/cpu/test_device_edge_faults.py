"""What the driver hears of edges between devices when a party dies or its device refuses; CPU tensors stand for device ones."""

from __future__ import annotations

import os
import signal
import struct
import time
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")

import crossfade  # noqa: E402
from crossfade.device.host_driver import HostDriver  # noqa: E402
from crossfade.engines import actor_process, local_processes  # noqa: E402
from crossfade.engines.device_ends import DeviceEnds  # noqa: E402
from crossfade.errors import DeviceError  # noqa: E402
from tests.helpers.calm import calm_s  # noqa: E402

pytestmark = [
    pytest.mark.usefixtures("torn_down"),
    pytest.mark.timeout(60),
    pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has GPUs: see tests/gpu2"),
]
torch.set_num_threads(1)

_LIMIT_S = 2.0


class Worker:
    """Makes tensors, on a device that can be made to refuse."""

    def __init__(self) -> None:
        from crossfade.edges import nccl_link
        from tests.helpers.nccl_pair import StandIn

        torch.set_num_threads(1)
        nccl_link.nccl_group = StandIn
        self._held: Any = None
        self._mended: Any = None

    def make(self, size: int) -> Any:
        return torch.arange(size)

    def pid(self) -> int:
        return os.getpid()

    def look(self, size: int) -> int:
        return size

    def total(self, value: Any, size: int) -> int:
        return int(value.sum())

    def hold(self, size_bytes: int) -> None:
        """Has memory that takes the system a while to give back, which it does before it says that the process has ended."""
        self._held = torch.ones(size_bytes, dtype=torch.uint8)

    def refuse(self, name: str, num_before: int) -> int:
        """The device does this so many times more, and then never again, until it is mended."""
        from tests.helpers.nccl_pair import StandIn

        owner: Any = StandIn if name in ("send", "recv") else HostDriver
        done, left = getattr(owner, name), [num_before]
        self._mended = owner, name, done

        def refused(*args: Any) -> Any:
            if not left[0]:
                raise (RuntimeError if owner is StandIn else DeviceError)("an illegal address")
            left[0] -= 1
            return done(*args)

        setattr(owner, name, refused)
        return os.getpid()

    def mend(self) -> int:
        setattr(*self._mended)
        return os.getpid()

    def cannot_write_when_dead(self, pid: int) -> None:
        """It cannot open an end, since somebody else is dead by then."""

        def opened_too_late(*args: Any) -> Any:
            os.kill(pid, signal.SIGKILL)
            while os.path.exists(f"/proc/{pid}/fd/0"):
                os.sched_yield()
            raise DeviceError("nobody is there")

        DeviceEnds.writer = opened_too_late  # type: ignore[method-assign, assignment]

    def kill_who_offers(self) -> None:
        """From now on whoever offers memory is dead before it is opened: its descriptors are closed, at the least."""
        open_handle = HostDriver.open_handle

        def opened_too_late(driver: HostDriver, handle: bytes, label: str) -> int:
            pid, fd = struct.unpack_from("<II", handle)
            os.kill(pid, signal.SIGKILL)
            while os.path.exists(f"/proc/{pid}/fd/{fd}"):
                os.sched_yield()
            return open_handle(driver, handle, label)

        HostDriver.open_handle = opened_too_late  # type: ignore[method-assign, assignment]


Remote = crossfade.remote(Worker)


@pytest.fixture(scope="module")
def actors(session: None) -> list[Any]:
    return [Remote.options(num_gpus=1, name=name).remote() for name in ("maker", "taker")]


def pair(writer: Any, reader: Any, transport: Any, **options: Any) -> crossfade.CompiledGraph:
    """One value from one to the other; the reader is busy with something else first."""
    with crossfade.InputNode() as given:
        made = writer.make.bind(given).with_tensor_transport(transport)
        graph: crossfade.CompiledGraph = reader.total.bind(made, reader.look.bind(given)).compile(**options)
    return graph


@pytest.mark.parametrize("buffer_bytes", [0, 10_000])
def test_ch3_a_death_wins_over_the_fault_that_it_led_to(
    session: None, buffer_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer finds closed what the reader has offered; nobody knows yet that the reader is dead, and it takes its time to end.
    It is found when a value is written, or between two, when slots come at once.
    """
    monkeypatch.setattr(local_processes, "_ENDING_S", 10.0)  # on a busy machine it may take longer than usual
    name = f"mortal{buffer_bytes}"
    writer, reader = Remote.remote(), Remote.options(name=name).remote()
    crossfade.get([reader.hold.remote(200 << 20), writer.kill_who_offers.remote()])
    begin = calm_s()
    with pytest.raises(crossfade.ActorDiedError, match=f"{name} is dead: it was killed by SIGKILL"):
        use(pair(writer, reader, "copy", buffer_bytes=buffer_bytes))
    assert calm_s() - begin < _LIMIT_S
    assert crossfade.get(pair(writer, writer, "copy").execute(100)) == 4950


def test_ch3_a_death_wins_over_what_could_not_be_opened_for_it(session: None) -> None:
    writer, reader = Remote.remote(), Remote.options(name="early").remote()
    crossfade.get(
        [reader.hold.remote(200 << 20), writer.cannot_write_when_dead.remote(crossfade.get(reader.pid.remote()))]
    )
    with pytest.raises(crossfade.ActorDiedError, match="early is dead: it was killed by SIGKILL"):
        pair(writer, reader, "copy")


def test_a_fault_is_held_back_for_an_actor_that_does_not_come_to_its_end_and_not_for_ever(
    actors: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    maker, taker = actors
    graph = pair(maker, taker, "staged")
    pid = crossfade.get(maker.refuse.remote("copy", 0))
    monkeypatch.setattr(actor_process, "is_ending", lambda each: each != pid)  # the taker seems to
    for least_s, most_s in (
        (local_processes._ENDING_S, 2 * local_processes._ENDING_S),
        (0.0, local_processes._ENDING_S / 2),
    ):
        begin, calm_begin = time.monotonic(), calm_s()
        with pytest.raises(crossfade.ActorError, match="maker cannot go on"):
            graph.execute(100).get(timeout=30)
        assert least_s <= time.monotonic() - begin
        assert calm_s() - calm_begin < most_s
    monkeypatch.undo()
    assert_mended(graph, actors, maker, "staged", pid)


def use(graph: crossfade.CompiledGraph) -> None:
    """What cannot be sent is an error in its value's place, and then a fault."""
    crossfade.get([graph.execute(1000) for _ in range(3)], timeout=30)


_SMALL, _LONG = 100, 5 << 20  # numbers: a few hundred bytes, or more chunks than there are

_REFUSALS = [
    ("staged", "copy", 0, _SMALL),
    ("staged", "wait_event", 0, _SMALL),
    ("staged", "copy", 6, _LONG),
    ("staged", "write_value", 5, _LONG),
    ("nccl", "send", 0, _SMALL),
    ("nccl", "wait_event", 0, _SMALL),
]


@pytest.mark.parametrize(("transport", "refused", "num_before", "size"), _REFUSALS)
def test_a_copy_that_cannot_be_enqueued_is_told_with_its_node_and_its_edge(
    actors: list[Any], transport: str, refused: str, num_before: int, size: int
) -> None:
    """While the value is written, or while the program stands elsewhere and the value goes on its way."""
    maker, taker = actors
    graph = pair(maker, taker, crossfade.Transport(transport))
    pid = crossfade.get(maker.refuse.remote(refused, num_before))
    refs = [graph.execute(size) for _ in range(2)]
    edge = r"at send n0[^,]*, the value of maker\.make \(node n0\) on its way to taker"
    begin = calm_s()
    for use in (*(ref.get for ref in refs), lambda timeout: graph.execute(size)):
        with pytest.raises(crossfade.ActorError, match=rf"maker cannot go on .*an illegal address \({edge}\)"):
            use(timeout=30)
    assert calm_s() - begin < _LIMIT_S
    assert_mended(graph, actors, maker, transport, pid)


@pytest.mark.parametrize(("transport", "refused"), [("staged", "copy"), ("staged", "write_value"), ("nccl", "recv")])
@pytest.mark.parametrize(("num_before", "size"), [(0, _SMALL), (1, _LONG)])
def test_a_reader_whose_device_refuses_tells_of_the_edge(
    actors: list[Any], transport: str, refused: str, num_before: int, size: int
) -> None:
    maker, taker = actors
    graph = pair(maker, taker, crossfade.Transport(transport))
    pid = crossfade.get(taker.refuse.remote(refused, num_before))
    refs = [graph.execute(size) for _ in range(3)]
    begin = calm_s()
    with pytest.raises(crossfade.ActorError, match=r"taker cannot go on .*make \(node n0\) on its way to taker"):
        refs[-1].get(timeout=30)
    with pytest.raises((crossfade.ActorError, DeviceError), match="an illegal address"):
        crossfade.get(refs, timeout=30)
    assert calm_s() - begin < _LIMIT_S
    assert_mended(graph, actors, taker, transport, pid)


def assert_mended(graph: crossfade.CompiledGraph, actors: list[Any], broken: Any, transport: str, pid: int) -> None:
    """The actors can be used again, as the error says, and are those that they were."""
    graph.teardown(timeout=20)
    assert crossfade.get(broken.mend.remote(), timeout=20) == pid
    again = pair(actors[0], actors[1], crossfade.Transport(transport))
    assert again.execute(100).get(timeout=20) == 4950
