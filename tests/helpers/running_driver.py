"""A fake GPU whose streams run by themselves, for tests of what does not depend on the order of steps."""

from __future__ import annotations

from collections.abc import Iterator

from crossfade.device.signals import HostBoard
from crossfade.host.memory import Memory
from crossfade.testing.fake import FakeDriver, Machine


class RunningDriver(FakeDriver):
    """A fake whose device runs whenever it is looked at."""

    def is_idle(self, stream: int) -> bool:
        run(self.machine)
        return super().is_idle(stream)


def run(machine: Machine) -> None:
    while ready := [name for name, queue in machine.queues.items() if queue and machine.can_run(queue[0])]:
        machine.run(ready[0])


def running_driver() -> RunningDriver:
    """One of a machine of its own."""
    return RunningDriver(Machine(is_strict=False), "process")


def open_board(driver: FakeDriver) -> Iterator[HostBoard]:
    """Signals in memory of the host."""
    memory = Memory.create("signals", 65536)
    yield HostBoard(driver, memory, 64, "test")
    memory.close()
