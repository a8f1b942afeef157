"""Generators and checks of the fuzz tests (by hypothesis; atheris is not among the development packages).

They start from what is valid and change bytes, lengths, order and ends; a few inputs that found something stay as examples.
"""

from __future__ import annotations

import marshal
import os
import pickle
import random
import socket
import time
from array import array as int_array
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st

from crossfade.channels import shm_reader
from crossfade.channels.protocol import EMPTY
from crossfade.channels.ring_layout import RECORD_BYTES, RingBlock, RingLayout, format_ring
from crossfade.channels.shm_reader import ShmReader
from crossfade.channels.shm_ring import ShmWriter
from crossfade.channels.values import arrays, codec
from crossfade.channels.values.layout import split
from crossfade.errors import Failure, PlanError, PlanSyntaxError
from crossfade.host.doorbell import Bell, Doorbell
from crossfade.host.frames import KEY_BYTES, FrameError, Opener, Sealer
from crossfade.host.memory import Heap, Memory
from crossfade.host.sockets import Connection
from crossfade.plan.parse import parse_plan
from crossfade.plan.text import format_plan
from crossfade.plan.validate import validate
from tests.helpers.edited_plans import any_plan
from tests.helpers.plans import sound_plan

KEY = bytes(range(KEY_BYTES))
LIMIT_S = 20.0
"""Far above what one example takes, also on a busy machine."""

INTERESTING = (
    0,
    1,
    7,
    8,
    15,
    16,
    127,
    255,
    1024,
    4095,
    4096,
    1 << 16,
    1 << 31,
    1 << 60,
    (1 << 63) - 1,
    1 << 63,
    (1 << 64) - 1,
)


def fuzz_for(check: Callable[[], None], title: str) -> None:
    """Runs a hypothesis test again and again, for as many seconds as CROSSFADE_FUZZ_S says (``make soak``: 600)."""
    duration_s = float(os.environ.get("CROSSFADE_FUZZ_S", "600"))
    deadline, num_rounds = time.monotonic() + duration_s, 0
    while time.monotonic() < deadline:
        check()
        num_rounds += 1
    print(f"{title}: {num_rounds} rounds of examples in {duration_s:.0f} s")


LONG = settings(settings.get_profile("default"), max_examples=500, database=None, derandomize=False)


@st.composite
def mutations(draw: st.DrawFn, valid: bytes) -> bytes:
    """A few changes to valid bytes."""
    data = bytearray(valid)
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, max(0, len(data) - 1)))
        to = at + draw(st.integers(1, 64))
        match draw(st.sampled_from(("set", "flip", "word", "drop", "cut", "insert", "again", "swap"))):
            case "set":
                data[at : at + 1] = bytes([draw(st.integers(0, 255))])
            case "flip" if data:
                data[at] ^= 1 << draw(st.integers(0, 7))
            case "word":
                word = draw(st.sampled_from(INTERESTING)).to_bytes(8, "little")
                place = at & ~7 if draw(st.booleans()) else at
                data[place : place + 8] = word
            case "drop":
                del data[at:to]
            case "cut":
                del data[at:]
            case "insert":
                data[at:at] = draw(st.binary(max_size=40))
            case "again":
                data[at:at] = data[at:to]
            case "swap":
                other = draw(st.integers(0, max(0, len(data) - 1)))
                one, two = bytes(data[at:to]), bytes(data[other : other + to - at])
                data[at:to] = two
                data[other : other + len(one)] = one
    return bytes(data)


# Frames and the control socket


@st.composite
def streams(draw: st.DrawFn) -> tuple[list[bytes], bytes, list[int]]:
    """(payloads, a stream of their frames with changes, where to cut it)."""
    payloads = draw(st.lists(st.binary(max_size=60), min_size=1, max_size=4))
    frames = _sealed(payloads)
    order = draw(st.one_of(st.just(list(range(len(frames)))), st.lists(st.integers(0, len(frames) - 1), max_size=6)))
    stream = draw(mutations(b"".join(frames[index] for index in order)))
    return payloads, stream, draw(st.lists(st.integers(1, 80), max_size=5))


def check_frames(payloads: Sequence[bytes], stream: bytes, cuts: Sequence[int]) -> None:
    """What comes out is what was sent, from the start, or nothing more."""
    opener, taken, at = Opener(KEY, "actor"), [], 0
    for length in (*cuts, len(stream) or 1):
        taken += [frame.payload for frame in opener.take(stream[at : at + length])]
        at += length
    assert taken == list(payloads[: len(taken)])
    if not stream.startswith(b"".join(_sealed(payloads[: len(taken)]))):
        raise AssertionError("a frame was taken that was not sent")


def _sealed(payloads: Sequence[bytes]) -> list[bytes]:
    sealer, frames = Sealer(KEY, "driver"), []
    for payload in payloads:
        head, tail = sealer.seal(payload)
        sealer.number += 1
        frames.append(head + payload + tail)
    return frames


def check_socket(payloads: Sequence[bytes], stream: bytes, cuts: Sequence[int], fd_counts: Sequence[int]) -> None:
    """The same through a socket, with descriptors where none belong: none of them stays open."""
    num_open = len(os.listdir("/proc/self/fd"))
    mine, theirs = socket.socketpair()
    end = Connection(theirs, KEY, "actor")
    at, has_fds = 0, False
    with open(os.devnull) as file:
        for length, num_fds in zip((*cuts, len(stream) or 1), (*fd_counts, *[0] * 10), strict=False):
            piece = stream[at : at + length]
            at += length
            if piece:
                fds = int_array("i", [file.fileno()] * num_fds)
                mine.sendmsg([piece], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)] if num_fds else [])
                has_fds = has_fds or num_fds > 0
    mine.close()
    taken = []
    try:
        while (message := end.take()) is not None:
            assert message.fds == ()
            taken.append(message.payload)
    except FrameError:
        pass
    end.close()
    assert taken == list(payloads[: len(taken)])
    assert len(os.listdir("/proc/self/fd")) == num_open


# Plans


def plan_texts() -> st.SearchStrategy[str]:
    return st.integers(0, 1 << 32).flatmap(_changed_plan)


def _changed_plan(seed: int) -> st.SearchStrategy[str]:
    rng = random.Random(seed)
    text = format_plan(sound_plan(rng) if seed % 4 else any_plan(rng))
    return mutations(text.encode("utf-8", "surrogatepass")).map(lambda data: data.decode("utf-8", "replace"))


def check_plan(text: str) -> None:
    """A plan, or the right error, soon."""
    start = time.process_time()
    try:
        plan = parse_plan(text)
        try:
            validate(plan)
        except PlanError:
            pass
        assert parse_plan(format_plan(plan)) == plan
    except PlanSyntaxError:
        pass
    assert time.process_time() - start < LIMIT_S


# The ring's reader


class _Guard:
    """In the place of `pickle`, or `marshal`: what a writer made is loaded, anything else gives what the fuzzer wants."""

    def __init__(self, known: frozenset[bytes], otherwise: object, load: Callable[..., Any] = pickle.loads) -> None:
        self._known, self._otherwise, self._load = known, otherwise, load

    def loads(self, data: Any, **how: Any) -> Any:
        if bytes(data) in self._known:
            return self._load(data, **how)
        if isinstance(self._otherwise, Exception):
            raise self._otherwise
        return self._otherwise


VALUES: tuple[Any, ...] = (
    7,
    b"b" * 300,
    b"b" * 5000,
    "t" * 3000,
    np.arange(20),
    np.arange(3000),
    [np.arange(800), np.ones((40, 30)), "text"],
    {"k": np.zeros(0), "l": b"x" * 2000},
)

DTYPES = ("<i8", "<f4", "|O", "|V8", "<M8[ns]", "no type", 3, None, "O,i4", "(9999999,)i4", "|S0", "<U1")
DIMENSIONS = (0, 1, -1, 20, 3000, 1 << 31, 1 << 62, 1 << 64, "x", None)


@st.composite
def otherwises(draw: st.DrawFn) -> object:
    """What the guarded unpickler gives for bytes that no writer made."""
    if draw(st.booleans()):
        return pickle.UnpicklingError("not a writer's pickle")
    shape = tuple(draw(st.lists(st.sampled_from(DIMENSIONS), max_size=4)))
    return draw(st.sampled_from(DTYPES)), draw(st.sampled_from((shape, 5, None)))


def _known_pickles() -> frozenset[bytes]:
    known = set()
    for value in VALUES:
        prepared = codec.prepare(value)
        if isinstance(prepared, bytes):
            known.add(prepared)
        else:
            known.add(bytes(split(memoryview(bytearray(prepared.to_bytes())))[2]))
    return frozenset(known)


KNOWN = _known_pickles()
KNOWN_SIMPLE = frozenset(marshal.dumps(value, 4) for value in VALUES if isinstance(value, int))


class RingBench:
    """A ring with one reader, whose memory the test changes."""

    def __init__(self, depth: int = 2, num_readers: int = 1) -> None:
        self.layout = RingLayout(depth, num_readers)
        self._board_memory, self._heap_memory = Memory.create("board", self.layout.size_bytes), Memory.create("heap", 0)
        self.board = self._board_memory.map(self.layout.size_bytes)
        self.block = RingBlock(self.board, 0, self.layout)
        format_ring(*self.block)
        self._bells = [Bell(Memory(fd), event) for fd, event in (Doorbell.create_fds("fuzz") for _ in range(2))]
        self.writer = ShmWriter("c", self.block, Heap(self._heap_memory), self._bells[1:] * num_readers)
        self.reader = ShmReader("c", self.block, 0, self._heap_memory, self._bells[0])

    def heap(self) -> Any:
        size_bytes = self._heap_memory.size_bytes
        return self._heap_memory.map(size_bytes) if size_bytes else bytearray()

    def close(self) -> None:
        self.writer.close()
        self.reader.close()
        for memory in (self._board_memory, self._heap_memory):
            memory.close()
        for bell in self._bells:
            bell.close()


@st.composite
def damages(draw: st.DrawFn) -> tuple[int, list[tuple[int, int]], bytes, object]:
    """(which value, words of its record to overwrite, changes to the heap's start, what unknown pickles give)."""
    words = st.one_of(
        st.sampled_from(INTERESTING),
        st.integers(0, (1 << 64) - 1),
        st.tuples(st.integers(0, 8), st.sampled_from(INTERESTING)).map(
            lambda pair: (pair[1] << 8 | pair[0]) & (1 << 64) - 1
        ),
        st.integers(0, 20).map(lambda page: page * 4096),
    )
    places = st.integers(0, 7)
    which = draw(st.integers(0, len(VALUES) - 1))
    head = draw(st.one_of(st.just(b""), mutations(bytes(codec.message_of(VALUES[which]).head))))
    return which, draw(st.lists(st.tuples(places, words), max_size=4)), head, draw(otherwises())


def check_ring(which: int, words: Sequence[tuple[int, int]], head: bytes, otherwise: object) -> None:
    """The reader gives a value or a Failure that names the channel, and all of what it gives can be looked at."""
    guard: Any = _Guard(KNOWN, otherwise)
    simple = _Guard(KNOWN_SIMPLE, otherwise, marshal.loads)
    bench = RingBench()
    arrays.understand.cache_clear()
    start = time.process_time()
    with (
        mock.patch.object(codec, "pickle", guard),
        mock.patch.object(shm_reader, "_loads", guard.loads),
        mock.patch.object(shm_reader, "_simple", simple.loads),
        mock.patch.object(arrays, "pickle", guard),
    ):
        with mock.patch.object(codec, "pickle", pickle), mock.patch.object(arrays, "pickle", pickle):
            assert bench.writer.try_write(VALUES[which])
        record = memoryview(bench.board)[bench.layout.records : bench.layout.records + RECORD_BYTES]
        for place, word in words:
            record[8 * place : 8 * place + 8] = word.to_bytes(8, "little")
        heap = bench.heap()
        target = memoryview(heap) if len(heap) >= len(head) > 0 else record[8:]
        target[: len(head)] = head[: len(target)]
        del target, record, heap
        value = bench.reader.try_read()
        assert value is not EMPTY
        if isinstance(value, Failure):
            assert "value of c" in value.node
        _look_at(value)
        del value
    arrays.understand.cache_clear()
    assert time.process_time() - start < LIMIT_S
    bench.close()


def _look_at(value: object) -> None:
    if isinstance(value, np.ndarray):
        value.tobytes()
    elif isinstance(value, list | tuple):
        for each in value:
            _look_at(each)
    elif isinstance(value, dict):
        _look_at(list(value.values()))
