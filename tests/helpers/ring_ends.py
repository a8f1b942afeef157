"""A ring on the fake machine whose two ends a test drives by hand."""

from __future__ import annotations

from crossfade.device.memory import Pool
from crossfade.device.records import Enqueued, Record
from crossfade.device.ring import num_signals
from crossfade.device.ring_receiver import Lease, RingReceiver
from crossfade.device.ring_sender import RingSender
from crossfade.device.signals import HostBoard
from crossfade.host.memory import Memory
from crossfade.testing.fake import FakeDriver, Machine
from tests.helpers.running_driver import run


class Ends:
    """A ring whose two ends the test drives by hand, records going over at once."""

    def __init__(self, num_slots: int = 2, slot_bytes: int = 512, *, is_delivering: bool = True) -> None:
        self.machine = Machine()
        self.driver = FakeDriver(self.machine, "process")
        self.pool = Pool(self.driver)
        memory = Memory.create("signals", 65536)
        board = HostBoard(self.driver, memory, num_signals(num_slots), "ring")
        self.to_sender: list[Record] = []
        self.to_receiver: list[Record] = []
        self.copies, self.use = self.driver.create_stream("copies"), self.driver.create_stream("use")
        self.receiver = RingReceiver(
            self.driver, self.pool, board, self.to_sender.append, "ring", num_slots=num_slots, slot_bytes=slot_bytes
        )
        self.sender = RingSender(self.driver, board, self.copies, self.to_receiver.append, "ring")
        self.source = self.pool.take(1, "source", "test").address
        if is_delivering:
            self.deliver()

    def deliver(self) -> None:
        while self.to_sender:
            self.sender.on_record(self.to_sender.pop(0))

    def accept_all(self) -> list[Lease]:
        """The receiver takes what was told: leases on the values."""
        records, self.to_receiver[:] = list(self.to_receiver), []
        leases = []
        for record in records:
            if isinstance(record, Enqueued):
                leases.append(self.receiver.accept(record, self.use))
            else:
                self.receiver.on_record(record)
        return leases

    def run(self) -> None:
        """Lets the device do all that it can."""
        run(self.machine)

    def use_one(self) -> None:
        """The receiver is done with the value that came, and the sender hears of it."""
        self.accept_all()[0].release()
        self.deliver()
        self.run()

    def is_given_back(self) -> bool:
        """Whether the receiver has all its slots again when the device has done all that it can."""
        self.run()
        self.receiver.collect()
        return self.receiver.is_empty


def one_sent() -> Ends:
    """A value of eight bytes is under way."""
    ends = Ends()
    assert ends.sender.try_send(ends.source, 8)
    return ends


def grow(ends: Ends, size_bytes: int) -> None:
    """Sends a value of this length, of which no byte is copied; the ring gets longer where it has to."""
    ends.driver.copy = lambda *args: None  # type: ignore[method-assign]
    block = Pool(ends.driver).take(size_bytes, "source", "test")
    for _ in range(6):
        if ends.sender.try_send(block.address, size_bytes):
            break
        ends.accept_all()
        ends.deliver()
        ends.run()
    for lease in ends.accept_all():
        lease.release()
    ends.run()
    ends.deliver()
    ends.sender.collect()
    ends.accept_all()
    ends.receiver.collect()


def finish_receiver(ends: Ends) -> None:
    """Both sides are closed: what the receiver is told then gives all slots back."""
    ends.run()
    ends.receiver.close()
    assert ends.accept_all() == []
    ends.receiver.collect()
    assert ends.receiver.is_empty
    assert ends.driver.ledger.held("event") == ends.driver.ledger.held("opened") == []
