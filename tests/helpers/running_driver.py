"""A fake GPU whose streams run by themselves, for tests of what does not depend on the order of steps."""

from __future__ import annotations

from crossfade.testing.fake import FakeDriver, Machine


class RunningDriver(FakeDriver):
    """A fake whose device runs whenever it is looked at."""

    def is_idle(self, stream: int) -> bool:
        run(self.machine)
        return super().is_idle(stream)


def run(machine: Machine) -> None:
    while ready := [name for name, queue in machine.queues.items() if queue and machine.can_run(queue[0])]:
        machine.run(ready[0])
