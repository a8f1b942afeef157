"""Values through the host's memory on the fake machine; and staged copies with a fault each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from crossfade.device.memory import Pool
from crossfade.device.signals import Counter
from crossfade.device.staged import StagedReceiver, StagedSender, StagedStreams
from crossfade.device.staged_layout import StagedLayout
from crossfade.testing.fake import FakeDriver, FakeLink, Machine, Until
from crossfade.testing.fake.clocks import join
from crossfade.testing.fake.machine import Program
from tests.helpers.worlds.kit import check_seen, close_pool, content, finish, make, scratch, use


def staged_streams(driver: FakeDriver, label: str, num_streams: int) -> StagedStreams:
    """One for all, or three."""
    made = [driver.create_stream(f"{label} {i}") for i in range(num_streams)]
    return StagedStreams(*(made * 3)[:3])


@dataclass
class StagedWorld:
    """Values through the host's memory, chunk by chunk."""

    sizes_bytes: Sequence[int] = (10_000, 3, 0, 4096)  # their lengths
    num_chunks: int = 2
    num_streams: int = 3  # of each side
    num_queues: int | None = None
    sender: Callable[..., StagedSender] = StagedSender  # classes with or without a fault
    receiver: Callable[..., StagedReceiver] = StagedReceiver

    def __call__(self, machine: Machine) -> Mapping[str, Program]:
        layout = StagedLayout(self.num_chunks, 4096)
        memory = scratch(layout.size_bytes)
        machine.at_end.append(memory.close)
        here = FakeDriver(machine, "sender", 0, num_queues=self.num_queues)
        there = FakeDriver(machine, "receiver", 1, num_queues=self.num_queues)
        ahead, back = FakeLink(machine, "sender", "receiver"), FakeLink(machine, "receiver", "sender")
        up = staged_streams(here, "up", self.num_streams)
        down = staged_streams(there, "down", self.num_streams)
        sender = self.sender(here, memory, layout, up, ahead.send, "staged")
        receiver = self.receiver(there, memory, layout, down, back.send, "staged")
        # Both ends exist before the first value moves; the hosts agree on that when they connect.
        join(machine.line("receiver").clock, machine.line("sender").clock)
        return {
            "sending host": self._send(here, sender, up, back),
            "receiving host": self._receive(there, receiver, down, ahead),
        }

    def _send(self, driver: FakeDriver, ring: StagedSender, streams: StagedStreams, back: FakeLink) -> Program:
        compute = driver.create_stream("compute")
        pool = Pool(driver)
        for index, size_bytes in enumerate(self.sizes_bytes):
            source = pool.take(size_bytes, f"value {index}", "sender").address
            ready = make(driver, compute, f"value {index}", source, content(index, size_bytes))
            cut = size_bytes // 3  # in two places, as several tensors of one value are
            ring.send_parts([(0, source, cut), (cut, source + cut, size_bytes - cut)], ready=ready)
            yield None
        while not ring.is_flushed:
            yield Until("a free chunk", back.has_record)
            ring.on_record(back.take())
        yield from finish(driver, streams)
        ring.close()
        close_pool(pool, "sender")

    def _receive(self, driver: FakeDriver, ring: StagedReceiver, streams: StagedStreams, ahead: FakeLink) -> Program:
        compute = driver.create_stream("use")
        pool = Pool(driver)
        seen: list[bytes] = []
        for index, size_bytes in enumerate(self.sizes_bytes):
            target = pool.take(size_bytes, f"place {index}", "receiver").address
            while ring.next_bytes is None:
                yield Until(f"value {index}", ahead.has_record)
                ring.on_record(ahead.take())
            ring.receive(target)
            while not ring.is_enqueued:
                yield Until(f"all of value {index}", ahead.has_record)
                ring.on_record(ahead.take())
            ring.join(compute)
            use(driver, compute, f"value {index}", target, size_bytes, seen)
            yield None
        yield from finish(driver, [*streams, compute])
        ring.close()
        close_pool(pool, "receiver")
        check_seen(seen, [content(index, size) for index, size in enumerate(self.sizes_bytes)], "staged values")


# faults


class StagedTooEarly(StagedReceiver):
    """Frees a chunk before it was copied."""

    def _enqueue(self, pieces: list[tuple[int, int, int]], execution: int | None) -> None:
        super()._set(self._free, self._number + 1)
        super()._enqueue(pieces, execution)

    def _set(self, counter: Counter, value: int) -> None:
        pass


class StagedTooEager(StagedSender):
    """Waits for chunks whose release is not enqueued."""

    def _pump(self) -> None:
        self._credits += 2
        super()._pump()


class StagedFlagBeforeData(StagedSender):
    """Says that a chunk is full before it is copied."""

    def _enqueue(self, pieces: list[tuple[int, int, int]], execution: int | None) -> None:
        super()._set(self._full, self._number + 1)
        super()._enqueue(pieces, execution)

    def _set(self, counter: Counter, value: int) -> None:
        pass
