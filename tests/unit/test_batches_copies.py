"""Calls of copy engines on a GPU's stream: captured when they come again, on torch's CUDA as played on a CPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="carriers take torch tensors")

import torch

from crossfade.batches.carriers import buffers, copy_engines
from crossfade.batches.carriers.copy_engines import _Track
from crossfade.batches.carriers.process_groups import ProcessGroups
from crossfade.batches.coroutines.parts import Run
from crossfade.errors import DeviceError
from tests.helpers.cuda_graphs import Machine, play

CALLER = (5, 0, 1)


class Streams:
    """The current stream of a thread, and what happens on streams, in order."""

    def __init__(self, machine: Machine) -> None:
        self.current = CALLER
        self.log: list[str] = []
        self.num_events = 0
        self._machine = machine

    def set(self, stream_id: int, device_index: int, device_type: int) -> None:
        self.current = stream_id, device_index, device_type

    def stream(self, use: str, part: int, device: int = 0) -> Any:
        return SimpleNamespace(
            stream_id=10 + part, device_index=0, device_type=1, wait_event=lambda event: self.wait(10 + part, event)
        )

    def at(self, place: tuple[int, int, int]) -> Any:
        return self.stream("", place[0] - 10)

    def wait(self, stream: int, event: Any) -> None:
        self.log.append(f"{stream} waits for {event.at}")

    def event(self) -> Any:
        self.num_events += 1
        event = SimpleNamespace(at=None)
        event.record = lambda stream: setattr(event, "at", stream.stream_id)
        return event


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    machine = play(monkeypatch)
    made = Streams(machine)
    monkeypatch.setattr(torch.cuda, "Event", made.event)
    monkeypatch.setattr(copy_engines, "own_stream", made.stream)
    monkeypatch.setattr(copy_engines, "_stream_at", made.at)
    calls = SimpleNamespace(
        _cuda_getCurrentStream=lambda device: made.current,
        _cuda_setStream=made.set,
        _cuda_isCurrentStreamCapturing=lambda: machine.is_capturing,
    )
    monkeypatch.setattr(copy_engines, "_C", calls)
    return made


class Peers:
    """A group of one rank, as far as a call needs one."""

    def __init__(self, streams: Streams) -> None:
        self.belongings: dict[str, Any] = {}
        self.identity = 1
        self.memory = SimpleNamespace(driver=SimpleNamespace(device=0, identity_of=lambda address: self.identity))
        self.broken: list[BaseException] = []
        self._lane = SimpleNamespace(check=lambda: None, begin=lambda stream: None, cut_off=self.broken.append)
        self._streams = streams

    def lane(self, index: int) -> Any:
        return self._lane

    def current_stream(self) -> int:
        return self._streams.current[0]

    def check_call(self, lane: Any) -> None: ...


def test_a_call_that_comes_again_is_replayed_behind_its_caller(streams: Streams) -> None:
    machine, peers, track, seen = streams._machine, Peers(streams), _Track(1, 0), list[int]()

    def double(source: torch.Tensor, group: Any, out: torch.Tensor, *, lane: int) -> None:
        seen.append(lane)
        machine.do(lambda: torch.mul(source, 2, out=out))

    source, out, another = torch.ones(3), torch.zeros(3), torch.zeros(3)
    for value in range(1, 6):
        source.fill_(value)
        work, was_ready = track.enqueue(peers, double, source, out)  # type: ignore[arg-type]
        assert was_ready == (value > 2), "it is done once, then captured"
        assert streams.current == CALLER
        work.wait()
        assert out.tolist() == [2.0 * value] * 3
        del work
    assert (machine.num_captures, machine.num_replays, seen) == (1, 4, [1, 1])
    assert streams.log == ["11 waits for 5", "5 waits for 11"] * 5
    assert streams.num_events == 2, "one for each begin, and one for the works, of which one is there at a time"
    track.enqueue(peers, double, source, another)  # type: ignore[arg-type]
    assert (machine.num_captures, machine.num_replays, len(seen)) == (1, 4, 3)


def test_events_belong_to_one_work_at_a_time(streams: Streams) -> None:
    peers, track = Peers(streams), _Track(0, 0)
    tensors = [torch.ones(1) for _ in range(3)]
    works = [track.enqueue(peers, lambda *_, lane: None, each, each)[0] for each in tensors]  # type: ignore[arg-type]
    assert streams.num_events == 4
    works.clear()
    track.enqueue(peers, lambda *_, lane: None, tensors[0], tensors[0])  # type: ignore[arg-type]
    assert streams.num_events == 4


def test_a_call_that_fails_leaves_the_callers_stream_current(streams: Streams) -> None:
    def fail(*_: Any, lane: int) -> None:
        raise ValueError("no kernel")

    one = torch.ones(1)
    with pytest.raises(ValueError, match="no kernel"):
        _Track(0, 0).enqueue(Peers(streams), fail, one, one)  # type: ignore[arg-type]
    assert streams.current == CALLER


def test_what_the_caller_captures_is_no_use_of_a_replay(streams: Streams, monkeypatch: pytest.MonkeyPatch) -> None:
    machine, peers, track, seen = streams._machine, Peers(streams), _Track(0, 0), list[int]()

    def act(*_: Any, lane: int) -> None:
        seen.append(lane)

    one = torch.ones(1)
    monkeypatch.setattr(copy_engines._C, "_cuda_isCurrentStreamCapturing", lambda: True)
    for _ in range(3):
        track.enqueue(peers, act, one, one)  # type: ignore[arg-type]
    assert (machine.num_captures, len(seen)) == (0, 3)


def test_a_graph_is_of_the_memory_that_it_was_captured_with(streams: Streams) -> None:
    """A tensor may get the address of one whose memory was given back to the device; the copies of a graph do not know that."""
    machine, peers, track = streams._machine, Peers(streams), _Track(0, 0)

    def double(source: torch.Tensor, group: Any, out: torch.Tensor, *, lane: int) -> None:
        machine.do(lambda: torch.mul(source, 2, out=out))

    source, out = torch.ones(3), torch.zeros(3)
    for identity, num_captures, num_replays in ((1, 0, 0), (1, 1, 1), (2, 1, 1), (2, 2, 2), (2, 2, 3)):
        peers.identity = identity
        track.enqueue(peers, double, source, out)  # type: ignore[arg-type]
        assert (machine.num_captures, machine.num_replays) == (num_captures, num_replays)
        assert out.tolist() == [2.0] * 3
        out.zero_()


def test_copy_engines_count_the_collectives_that_were_no_replays(
    streams: Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    peers, machine = Peers(streams), streams._machine
    engines = copy_engines.CopyEngines(2, ProcessGroups())
    monkeypatch.setattr(copy_engines, "open_buffers", lambda group, device, num_parts, size_bytes: peers)
    no_group: Any = None
    tracks = [_Track(part, 0) for part in range(2)]
    monkeypatch.setattr(copy_engines, "_track", lambda part, device: tracks[part])
    one: Any = SimpleNamespace(
        device=SimpleNamespace(type="cuda", index=0), data_ptr=lambda: 1, shape=(1,), dtype=torch.float32, nbytes=4
    )

    def act(*_: Any, lane: int) -> None:
        machine.do(lambda: None)

    counted = []
    for _ in range(3):
        run = Run(engines)
        for part in (0, 1):
            engines._do(part, no_group, act, one, one)
        counted.append(run.num_not_replayed)
    assert counted == [2, 2, 0], "done once, captured, then replayed"


@pytest.mark.parametrize("reaches", [False, True])
def test_copies_go_through_the_hosts_memory_where_gpus_do_not_reach_each_other(
    reaches: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = list[dict[str, Any]]()

    def open_group(group: Any, **options: Any) -> Any:
        asked.append(options)
        return SimpleNamespace(is_closed=False)

    monkeypatch.setattr(buffers, "_OPENED", [])
    monkeypatch.setattr(buffers, "can_reach", lambda: reaches)
    monkeypatch.setattr(buffers, "open_group", open_group)
    monkeypatch.setattr(buffers, "keep", lambda _: None)
    group: Any = object()
    for kind in ("cuda", "cpu"):
        buffers.open_buffers(group, torch.device(kind), 2)
        buffers._OPENED.clear()
    assert [each["is_staged"] for each in asked] == [not reaches, False]


@pytest.mark.parametrize("reaches", [False, True])
@pytest.mark.parametrize("has_memory", [False, True])
def test_large_tensors_have_larger_buffers_where_there_is_memory_for_them(
    reaches: bool, has_memory: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = list[int]()

    def open_group(group: Any, *, buffer_bytes: int, **options: Any) -> Any:
        asked.append(buffer_bytes)
        if buffer_bytes > buffers.BUFFER_BYTES and not has_memory:
            raise DeviceError("no memory", hint="")
        return SimpleNamespace(
            is_of=group.__eq__, num_lanes=options["num_lanes"], buffer_bytes=buffer_bytes, is_closed=False
        )

    monkeypatch.setattr(buffers, "_OPENED", [])
    monkeypatch.setattr(buffers, "can_reach", lambda: reaches)
    monkeypatch.setattr(buffers, "open_group", open_group)
    monkeypatch.setattr(buffers, "keep", lambda _: None)
    group: Any = object()
    device = torch.device("cuda")
    sizes = buffers.BUFFER_BYTES, buffers.BUFFER_BYTES + 1, buffers.LARGE_BUFFER_BYTES
    opened: list[Any] = [buffers.open_buffers(group, device, 2, size) for size in sizes]
    small, large, again = opened
    assert again is large
    tried = [buffers.LARGE_BUFFER_BYTES] if reaches else []
    assert asked == [buffers.BUFFER_BYTES, *tried], "each once"
    assert (large is small) == (not (reaches and has_memory))
    assert small.buffer_bytes == buffers.BUFFER_BYTES
    if reaches and has_memory:
        assert large.buffer_bytes == buffers.LARGE_BUFFER_BYTES
    buffers._OPENED.clear()
