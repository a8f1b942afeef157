"""A lane: buffers and signals for one collective after another. Several lanes may be in flight at the same time.

Each rank has two buffers in a lane and, into each, a signal *full* from every other rank. Exchange number n uses buffer n % 2 and
its signals, and every rank waits in it for every other rank. This is why no rank needs to say that a buffer is free again (PR-1)::

    a rank sets `full` of exchange n + 1 behind all that it did in exchange n, on its lane's stream.
    a rank that begins exchange n + 2 has waited for `full` of exchange n + 1 of all ranks;
    so all ranks have done with the buffer, and with the signals, of exchange n.

A captured graph repeats its buffers and signals, so two of them in a row must look like one program: a *replayable* lane ends each
collective on an even number of exchanges, with an empty one where that is needed.
"""

from __future__ import annotations

from typing import NamedTuple

from crossfade.device.copies import cut, enqueue, stagger
from crossfade.device.signals import CLEAR, SET, Signal
from crossfade.errors import ChannelBroken, DeviceError
from crossfade.host.memory import align
from crossfade.peers.memory import GroupMemory

NUM_EPOCHS = 2
SLOT_ALIGNMENT = 256


def num_words(num_lanes: int, num_ranks: int) -> int:
    """Signals into one rank."""
    return NUM_EPOCHS * num_lanes * num_ranks


class LaneStatistics(NamedTuple):
    """Counters of one lane of one rank; replays of captured calls are not counted."""

    num_calls: int  # collectives
    num_exchanges: int  # exchanges, the empty ones included
    num_bytes: int  # bytes that this rank copied to or from others


class Epoch(NamedTuple):
    """One buffer of a lane on each rank, and its signals."""

    buffers: tuple[int, ...]  # for each rank, where its buffer lies
    incoming: dict[int, Signal]  # for each other rank, its signal ``full`` to this one
    outgoing: dict[int, Signal]  # for each other rank, this one's signal ``full`` to it


class Lane:
    """One lane, as one rank has it. Its calls come in the same order on all ranks. All lanes of a group have the same
    ``buffer_bytes`` and ``cut_bytes``: tensors of more are cut into pieces, which move one way while others move the other way. 0
    for none but those that are longer than a buffer.
    """

    def __init__(
        self,
        memory: GroupMemory,
        index: int,
        buffer_bytes: int,
        *,
        is_replayable: bool = False,
        cut_bytes: int = 0,
    ) -> None:
        self.memory = memory
        self._cut_bytes = cut_bytes
        # The other ranks, in the order in which this one serves them.
        self.order = stagger(memory.rank, memory.num_ranks)
        self.arrivals = self.order[::-1]  # in the order in which they come to serve this one
        self.index = index
        self.buffer_bytes = buffer_bytes
        # What one rank can put into another's buffer in one exchange.
        self.slot_bytes = buffer_bytes // memory.num_ranks // SLOT_ALIGNMENT * SLOT_ALIGNMENT
        self.is_replayable = is_replayable
        self.broken = ""  # why it cannot be used any more
        self._epochs = [self._make_epoch(number) for number in range(NUM_EPOCHS)]
        self._num_calls = self._num_exchanges = self.num_bytes = 0
        driver = memory.driver
        self.local = driver.create_stream(f"lane {index}, local", is_urgent=True)
        self.streams: list[int] = [self.local]
        self._events = [driver.create_event() for _ in range(3)]
        self._stream: int | None = None

    def _make_epoch(self, number: int) -> Epoch:
        memory = self.memory
        before = NUM_EPOCHS * self.index + number
        offset, first = before * self.buffer_bytes, before * memory.num_ranks
        memory.driver.name_range(
            memory.buffers[memory.rank] + offset,
            self.buffer_bytes,
            f"buffer {number} of lane {self.index} of rank {memory.rank}",
        )

        def full(source: int, target: int) -> Signal:
            label = f"full from rank {source} to rank {target} (lane {self.index}, buffer {number})"
            return memory.boards[target].signal(first + source, label)

        return Epoch(
            tuple(address + offset for address in memory.buffers),
            {peer: full(peer, memory.rank) for peer in memory.peers},
            {peer: full(memory.rank, peer) for peer in memory.peers},
        )

    # calls

    def begin(self, stream: int, *, is_captured: bool = False) -> None:
        """A collective begins on a stream, behind those that came before on this lane.

        A captured one does not: the launch of the graph is put in order with other uses of the lane. In one capture, a
        lane is used by streams that are in order already.
        """
        self.check()
        if is_captured and not self.is_replayable:
            raise DeviceError(
                "a collective is captured on a lane that cannot be replayed",
                hint="open the group with is_replayable=True",
            )
        driver = self.memory.driver
        if stream != self._stream:
            if stream not in self.streams:
                self.streams.append(stream)
            if self._stream is not None and not is_captured:
                driver.record_event(self._events[-1], self._stream)
                driver.wait_event(stream, self._events[-1])
        if not is_captured:
            self._stream = stream
        self._num_calls += 1

    @property
    def is_uneven(self) -> bool:
        """Whether an empty exchange is due at the end of a collective."""
        return self.is_replayable and self._num_exchanges % NUM_EPOCHS != 0

    def check(self) -> None:
        """Raises if a rank has died."""
        if self.broken:
            raise ChannelBroken(
                f"{self.broken}; results of collectives that had not finished are not valid",
                hint="close the group and open it again on all ranks, or on those that are left; crossfade.peers.close_groups() "
                "closes what has opened by itself",
            )

    def cut_off(self, error: BaseException) -> None:
        """A collective has ended half-way, so this rank and the others are out of step from here on."""
        if not self.broken:
            self.broken = f"a collective on lane {self.index} ended half-way ({type(error).__name__})"

    # parts of an exchange

    def advance(self) -> Epoch:
        """The next exchange's buffers and signals."""
        self.check()
        epoch = self._epochs[self._num_exchanges % NUM_EPOCHS]
        self._num_exchanges += 1
        return epoch

    def piece_bytes(self, size_bytes: int, num_pieces: int, most_bytes: int) -> int:
        """The length of a piece: at most ``most_bytes``, and so many pieces where tensors are cut."""
        if not self._cut_bytes:
            return most_bytes
        wanted = max(-(-size_bytes // num_pieces), self._cut_bytes)
        return min(align(wanted, SLOT_ALIGNMENT * self.memory.num_ranks), most_bytes)

    def next_buffer(self) -> int:
        """This rank's buffer of the exchange that comes next, free to be written behind the waits of the one before (PR-1)."""
        return self._epochs[self._num_exchanges % NUM_EPOCHS].buffers[self.memory.rank]

    def copy(self, stream: int, target: int, source: int, size_bytes: int) -> None:
        """Enqueues a copy between two ranks, or inside one."""
        enqueue(self.memory.driver, cut(target, source, size_bytes), stream)
        self.num_bytes += size_bytes

    def announce(self, epoch: Epoch, peers: list[int], stream: int, step: int = SET) -> None:
        """Sets ``full`` for these ranks, behind all that is on the stream; to a step of an exchange that has several."""
        if len(peers) > 1:
            self.memory.driver.write_values(stream, [epoch.outgoing[peer].address for peer in peers], step)
            return
        for peer in peers:
            epoch.outgoing[peer].set(stream, step)

    def await_full(self, epoch: Epoch, peers: list[int], stream: int) -> None:
        """Waits for ``full`` of these ranks, and clears it."""
        if len(peers) > 1:
            addresses = [epoch.incoming[peer].address for peer in peers]
            self.memory.driver.wait_all_and_reset(stream, addresses, SET, CLEAR)
            return
        for peer in peers:
            epoch.incoming[peer].wait(stream)

    def await_step(self, epoch: Epoch, peers: list[int], stream: int, step: int, num_steps: int) -> None:
        """Waits until ``full`` of these ranks has come to a step, and clears it with the last of the steps."""
        for peer in peers:
            epoch.incoming[peer].expect(step)
        if step == num_steps and peers:
            addresses = [epoch.incoming[peer].address for peer in peers]
            self.memory.driver.wait_all_and_reset(stream, addresses, step, CLEAR)
            return
        for peer in peers:
            epoch.incoming[peer].wait_for_step(stream, step)

    def fork_local(self, stream: int) -> int:
        """A stream for what this rank does by itself, which waits for ``stream``."""
        self.memory.driver.record_event(self._events[-2], stream)
        self.memory.driver.wait_event(self.local, self._events[-2])
        return self.local

    def join_local(self, stream: int) -> None:
        """The stream waits for what this rank does by itself."""
        self.memory.driver.record_event(self._events[-3], self.local)
        self.memory.driver.wait_event(stream, self._events[-3])

    def incoming(self) -> list[Signal]:
        """All signals that others set for this rank."""
        return [signal for epoch in self._epochs for signal in epoch.incoming.values()]

    def statistics(self) -> LaneStatistics:
        """The counters."""
        return LaneStatistics(self._num_calls, self._num_exchanges, self.num_bytes)

    def close(self) -> None:
        """Gives streams and events back; all operations must have finished. Idempotent."""
        driver = self.memory.driver
        if self.local in self.streams:
            driver.destroy_stream(self.local)
        while self._events:
            driver.destroy_event(self._events.pop())
        self.streams.clear()
