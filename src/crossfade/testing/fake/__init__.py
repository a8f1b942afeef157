"""A deterministic machine in the place of GPUs: streams, signals, copies and hardware queues, in every order.

Ships with crossfade so that whatever stands on `crossfade.device` can be tested without a GPU::

    def world(machine):
        driver = FakeDriver(machine, "receiver")
        ...
        return {"receiver": program()}       # generators: each `yield` lets others go ahead

    verdict = explore(world)                 # or sample(world, seeds=range(200))
    assert verdict.is_ok, verdict

What it reports, each with the operations named: a *race* (a read that is not ordered after its write, or two writes without an
order, by vector clocks and not by luck), a *deadlock* (PL-5 broken, a wait in front of its producer in one hardware queue, a host
that waits for ever), a *leak* (memory, an opened handle, a lease) and a *use after free*.
"""

from crossfade.testing.fake.driver import FakeDriver, FakeLink
from crossfade.testing.fake.explore import Verdict, explore, sample
from crossfade.testing.fake.machine import Fault, Machine, Until

__all__ = ["FakeDriver", "FakeLink", "Fault", "Machine", "Until", "Verdict", "explore", "sample"]
