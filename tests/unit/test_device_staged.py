"""Staged copies: how values are cut, and what the ends refuse."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossfade.device.records import Announced, ChunksEnqueued, ChunksFreeEnqueued, Enqueued, Record
from crossfade.device.staged import StagedReceiver, StagedSender, StagedStreams
from crossfade.device.staged_end import Rest
from crossfade.device.staged_layout import StagedLayout
from crossfade.errors import ChannelBroken, ChannelClosed, ChannelError
from crossfade.host.memory import PAGE_BYTES, Memory
from crossfade.testing.fake import FakeDriver, Machine
from crossfade.testing.fake.machine import Range
from tests.helpers.running_driver import run
from tests.helpers.staged_times import pipeline_us

MB = 1 << 20
GBS, COPY_US = 55.0, 3.5

LAYOUTS = st.builds(
    StagedLayout,
    num_chunks=st.integers(2, 9),
    chunk_bytes=st.integers(1, 64).map(lambda n: n * PAGE_BYTES),
)


@given(layout=LAYOUTS, size_bytes=st.integers(0, 5 * MB))
def test_chunks_cover_a_value_and_fit(layout: StagedLayout, size_bytes: int) -> None:
    lengths = layout.lengths(size_bytes)
    assert sum(lengths) == size_bytes
    assert all(0 < length <= layout.chunk_bytes for length in lengths)


@given(cuts=st.sets(st.integers(1, 64 * 16 - 1), max_size=60))
def test_no_other_cut_beats_equal_chunks(cuts: set[int]) -> None:
    """Any cut of 64 MB at multiples of 64 KB, long chunks and many chunks included."""
    ends = [0, *(cut * (MB // 16) for cut in sorted(cuts)), 64 * MB]
    other = [end - begin for begin, end in pairwise(ends)]
    equal = StagedLayout().lengths(64 * MB)
    assert pipeline_us(equal) <= pipeline_us(other) + 0.5


@given(lengths=st.lists(st.integers(1, 8 * MB), min_size=1, max_size=40))
def test_on_equal_links_only_the_number_and_the_longest_chunk_count(lengths: list[int]) -> None:
    expected = (sum(lengths) + max(lengths)) / (GBS * 1e3) + (len(lengths) + 1) * COPY_US
    assert pipeline_us(lengths) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("lengths", "num", "time_us"),
    [(StagedLayout().lengths(64 * MB), 19, 1354), ([3 * MB] * 21 + [MB], 22, 1358), ([4 * MB] * 16, 16, 1356)],
)
def test_the_figures_of_the_docstring(lengths: list[int], num: int, time_us: int) -> None:
    assert (len(lengths), round(pipeline_us(lengths))) == (num, time_us)


@pytest.mark.parametrize(("num_chunks", "chunk_bytes"), [(1, 4096), (2, 100), (2, 0)])
def test_a_layout_is_checked(num_chunks: int, chunk_bytes: int) -> None:
    with pytest.raises(ValueError, match="hint: at least 2 chunks"):
        StagedLayout(num_chunks, chunk_bytes)


@given(
    layout=LAYOUTS, sizes=st.lists(st.integers(1, 50_000), min_size=1, max_size=8), gaps=st.lists(st.integers(0, 300))
)
def test_the_pieces_of_chunks_are_the_parts_of_a_value(layout: StagedLayout, sizes: list[int], gaps: list[int]) -> None:
    parts, end = [], 0
    for index, size_bytes in enumerate(sizes):
        offset = end + (gaps[index] if index < len(gaps) else 0)
        parts.append((offset, 1_000_000 * (index + 1), size_bytes))
        end = offset + size_bytes
    lengths = layout.lengths(end)
    rest = Rest(deque(parts), deque(lengths))
    at, found = 0, []
    for length in lengths:
        for offset, address, size_bytes in rest.take():
            assert 0 <= offset < offset + size_bytes <= length
            found += [(at + offset + k, address + k) for k in (0, size_bytes - 1)]
        at += length
    assert not rest.parts
    where = {number: (offset, address) for number, (offset, address, _) in enumerate(parts)}
    for place, address in found:
        offset, first = where[address // 1_000_000 - 1]
        assert place - offset == address - first


class Ends:
    """A sender and a receiver whose records the test carries."""

    def __init__(self, layout: StagedLayout | None = None) -> None:
        layout = layout or StagedLayout(4, PAGE_BYTES)
        self.machine = Machine()
        self.driver = FakeDriver(self.machine, "process")
        memory = Memory.create("staged", layout.size_bytes)
        self.to_receiver: list[Record] = []
        self.to_sender: list[Record] = []
        up, down = (StagedStreams(*[self.driver.create_stream(way)] * 3) for way in ("up", "down"))
        self.sender = StagedSender(self.driver, memory, layout, up, self.to_receiver.append, "staged")
        self.receiver = StagedReceiver(self.driver, memory, layout, down, self.to_sender.append, "staged")
        self.source = self.driver.allocate(64 * PAGE_BYTES, "source")
        self.target = self.driver.allocate(64 * PAGE_BYTES, "target")

    def tell_receiver(self) -> None:
        while self.to_receiver:
            self.receiver.on_record(self.to_receiver.pop(0))

    def exchange(self) -> None:
        """Both hosts hear of everything, once."""
        self.tell_receiver()
        while self.to_sender:
            self.sender.on_record(self.to_sender.pop(0))

    def run(self) -> None:
        """Lets the device do all that it can."""
        run(self.machine)


def test_what_comes_back_is_told_for_half_of_the_chunks_and_at_the_end_of_a_value() -> None:
    ends = Ends()
    ends.sender.send(ends.source, 3 * PAGE_BYTES)
    ends.tell_receiver()
    ends.receiver.receive(ends.target)
    assert ends.to_sender == [ChunksFreeEnqueued(2), ChunksFreeEnqueued(1)]


def test_records_double_so_that_the_receiver_begins_early_and_hears_of_many_at_once() -> None:
    ends = Ends(StagedLayout(16, PAGE_BYTES))
    ends.sender.send(ends.source, 12 * PAGE_BYTES)
    numbers = [record.num_chunks for record in ends.to_receiver if isinstance(record, ChunksEnqueued)]
    assert numbers == [1, 1, 2, 4, 4]


def test_a_value_without_a_place_goes_by_and_the_next_one_comes_whole() -> None:
    ends = Ends(StagedLayout(2, PAGE_BYTES))
    ends.driver.kernel(ends.sender._streams.copies, "make", writes=((ends.source, b"next" * 5 * (PAGE_BYTES // 4)),))
    ends.sender.send(ends.source, 5 * PAGE_BYTES)
    ends.sender.send(ends.source, 4)
    for place in (None, ends.target):
        while ends.receiver.next_bytes is None or not ends.receiver.is_enqueued:
            ends.exchange()
        ends.receiver.receive(place)
        while not ends.receiver.is_enqueued:
            ends.exchange()
    seen: list[bytes] = []
    ends.driver.kernel(ends.receiver._streams.copies, "use", reads=(Range(ends.target, 4),), seen=seen)
    ends.run()
    assert ends.sender.is_flushed
    assert seen == [b"next"]


class Noted:
    """Who records, while a program goes on."""

    def __init__(self) -> None:
        self.execution = 0
        self.sizes: dict[int | None, int] = {}

    def __call__(self, stream: int, execution: int | None = None) -> Callable[[int], None]:
        def end(size_bytes: int) -> None:
            self.sizes[execution] = self.sizes.get(execution, 0) + size_bytes

        return end


def test_chunks_that_follow_later_are_recorded_as_of_their_own_execution() -> None:
    ends, up, down = Ends(StagedLayout(2, PAGE_BYTES)), Noted(), Noted()
    ends.sender.around, ends.receiver.around = up, down
    for up.execution, num_pages in enumerate((5, 4)):
        ends.sender.send(ends.source, num_pages * PAGE_BYTES)
    up.execution = 9
    for number in range(2):
        down.execution = number
        while ends.receiver.next_bytes is None or not ends.receiver.is_enqueued:
            ends.exchange()
        ends.receiver.receive(ends.target)
        down.execution = 9
        while not ends.receiver.is_enqueued:
            ends.exchange()
    ends.run()
    assert up.sizes == down.sizes == {0: 5 * PAGE_BYTES, 1: 4 * PAGE_BYTES}


def test_nothing_is_waited_for_that_the_host_can_see() -> None:
    ends = Ends()
    ends.sender.send(ends.source, 2 * PAGE_BYTES)
    ends.run()
    ends.tell_receiver()
    ends.receiver.receive(ends.target)
    labels = [operation.label for queue in ends.machine.queues.values() for operation in queue]
    assert any("copy chunk 0" in label for label in labels)
    assert not [label for label in labels if label.startswith("wait for full")]


def test_a_sender_with_values_that_wait_does_not_close_until_the_receiver_is_gone() -> None:
    ends = Ends()
    ends.sender.send(ends.source, 6 * PAGE_BYTES)
    ends.run()
    assert not ends.sender.is_flushed
    with pytest.raises(ChannelError, match="1 values are not sent yet"):
        ends.sender.close()
    ends.sender.break_off("the receiver died")
    with pytest.raises(ChannelBroken, match="the receiver died"):
        ends.sender.send(ends.source, 1)
    ends.sender.close()
    ends.sender.close()
    assert ends.sender.is_flushed


def test_an_end_does_not_close_while_copies_are_under_way() -> None:
    ends = Ends()
    ends.sender.send(ends.source, 8)
    with pytest.raises(ChannelError, match="under way"):
        ends.sender.close()
    ends.run()
    ends.sender.close()
    with pytest.raises(ChannelClosed):
        ends.sender.send(ends.source, 8)
    ends.receiver.close()
    assert ends.driver.ledger.held("event") == ends.driver.ledger.held("pinned") == []


def test_there_is_nothing_to_receive_before_it_is_announced() -> None:
    ends = Ends()
    with pytest.raises(ChannelError, match="hint: look at next_bytes first"):
        ends.receiver.receive(ends.target)
    ends.receiver.on_record(Announced(0))
    ends.receiver.receive(ends.target)
    assert ends.receiver.is_enqueued
    for end, record in ((ends.sender, Announced(3)), (ends.receiver, Enqueued(0, 0, 8))):
        with pytest.raises(ChannelError, match="cannot take"):
            end.on_record(record)
