"""A rank that dies in the middle of a collective, on the fake machine: may another one take rubbish for a result?

Races are not looked for here: streams that were let go by force are in no order with anything. What counts is whether a rank whose
`check` finds nothing has the right result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from crossfade.peers import sums
from crossfade.peers.lane import Lane
from crossfade.testing.fake import FakeDriver, Fault, Machine, Until
from crossfade.testing.fake.clocks import Clock, Word
from crossfade.testing.fake.explore import _Run
from crossfade.testing.fake.machine import Program, Range
from tests.helpers.peer_worlds import WORD, Call, PeerWorld, content, expected

__all__ = ["DeathWorld", "LooseMachine", "drive"]

VICTIM = 2
QUEUE = "queue 1"
"""Of the stream that computes; queue 0 is that of the lane's local one."""


class LooseMachine:
    """What replaces the machine's search for races."""

    @staticmethod
    def touch(machine: Machine, *where: object, is_write: bool) -> None:
        pass

    @staticmethod
    def store(machine: Machine, word: Word, value: int, label: str, line: str, clock: Clock) -> None:
        word.value, word.clock, word.writer = value, dict(clock), label
        word.num_writes += 1


class DeathWorld:
    """Three ranks in one all-reduce, of which the last one dies; the others hear of it later.

    Args:
        call: what they do.
        num_left: operations that the victim has not done when it dies.
        is_asking: whether a rank's check asks the system who is alive, and not only its own watchdog.
    """

    def __init__(self, call: Call, num_left: int, *, is_asking: bool) -> None:
        self._num_left = num_left
        self._call = call
        self._is_asking = is_asking
        self._world = PeerWorld([call], num_ranks=3)

    def __call__(self, machine: Machine) -> Mapping[str, Program]:
        ranks = self._world.open(machine)
        is_dead: list[bool] = []
        driver, lanes, _ = ranks[VICTIM]
        programs: dict[str, Program] = {"victim": self._die(machine, driver, lanes[0], is_dead)}
        for rank, (driver, lanes, _) in enumerate(ranks[:VICTIM]):
            heard: list[bool] = []
            stream, seen = self._enqueue(driver, lanes[0])
            programs[f"host {rank}"] = self._use(driver, stream, seen, heard, is_dead)
            programs[f"watchdog {rank}"] = self._watch(driver, lanes[0], stream, heard, is_dead)
        machine.at_end.append(lambda: machine.allocations.clear())
        return programs

    def _enqueue(self, driver: FakeDriver, lane: Lane) -> tuple[int, list[bytes]]:
        stream, seen = driver.create_stream("compute"), list[bytes]()
        size_bytes = self._call.count * WORD.size_bytes
        source = driver.allocate(size_bytes, "input")
        target = driver.allocate(size_bytes, "output")
        data = content(driver.device, 0, 0, self._call.count)
        driver.kernel(stream, "make the input", writes=((source, data),))
        lane.begin(stream, num_streams=1, is_captured=False)
        job = sums.Job(target, source, self._call.count, WORD)
        sums.all_reduce([lane], stream, [job], self._call.tuning(driver.device))
        driver.kernel(stream, "use the output", reads=(Range(target, size_bytes),), seen=seen)
        return stream, seen

    def _die(self, machine: Machine, driver: FakeDriver, lane: Lane, is_dead: list[bool]) -> Program:
        self._enqueue(driver, lane)
        queue = machine.queues[f"{QUEUE} of {driver.process}"]
        yield Until("the moment of death", lambda: len(queue) <= self._num_left)
        queue.clear()
        is_dead.append(True)

    def _watch(
        self, driver: FakeDriver, lane: Lane, stream: int, heard: list[bool], is_dead: Sequence[bool]
    ) -> Program:
        """As the watchdog and the group do it: the lane is broken first, then signals are set until the stream has run dry."""
        yield Until("the victim's end", lambda: bool(is_dead))
        heard.append(True)
        while not driver.is_idle(stream):
            for signal in lane.incoming():
                if not signal.is_set():
                    signal.release()
            yield None

    def _use(
        self,
        driver: FakeDriver,
        stream: int,
        seen: Sequence[bytes],
        heard: Sequence[bool],
        is_dead: Sequence[bool],
    ) -> Program:
        yield driver.until_idle(stream)
        if heard or (self._is_asking and is_dead):
            return
        sources = [content(rank, 0, 0, self._call.count) for rank in range(3)]
        if list(seen) != [expected(self._call, driver.device, sources)]:
            raise Fault("wrong value", f"{driver.process} takes rubbish for a result")


_LAST = (f"{QUEUE} of rank 1", "watchdog 1")


def drive(world: DeathWorld) -> Fault | None:
    """The victim is quick, then rank 0, and its watchdog; rank 1 is slow, and hears of the death last of all."""

    def place(choice: tuple[str, str]) -> int:
        kind, name = choice
        if name in _LAST:
            return 10 + _LAST.index(name)
        if kind == "queue" or name == "victim":
            return 0 if name in ("victim", f"{QUEUE} of rank {VICTIM}") else 1
        return 2

    run = _Run(world, False)
    try:
        while choices := run.choices():
            run.step(min(choices, key=place))
        run.finish()
    except Fault as fault:
        return fault
    return None
