"""The simulator against a second one, written from the actions' semantics and in the plainest way: tick by tick.

All costs are whole microseconds, so a clock that ticks once a microsecond sees every moment at which something happens.
There are as many cores as parties, and what the driver does costs nothing, so that neither is shared. With more than
one execution in flight nobody sleeps: submitting can keep the driver awake that waits for an output, which is too fine
for the clock.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import pytest

from crossfade.errors import PlanError
from crossfade.plan.actions import MAIN, Action, Verb
from crossfade.plan.plan import ChannelSpec, InputSpec, NodeSpec, Plan
from crossfade.schedule.cost import CostModel
from crossfade.schedule.simulate import simulate
from crossfade.schedule.workload import Workload
from crossfade.types import DRIVER, Transport
from tests.helpers.counts import num

SLEEPY = CostModel(
    write_us=0,
    write_large_us=0,
    write_us_per_mb=1,
    read_us=0,
    read_large_us=0,
    read_us_per_mb=0,
    hop_us=2,
    wake_us=5,
    spin_us=6,
    latency_us=7,
    gbs=1.0,
    host_us=1,
    receive_host_us=1,
    host_us_per_mb=2000,
    step_us=0,
    num_cores=1000,
)
SPINNING = replace(SLEEPY, spin_us=1e9)
NUM_EXECUTIONS = 5
Spans = dict[tuple[str, str, int], tuple[int, int]]


@dataclass
class Walker:
    """One strand of one actor: the actions of all its rounds, one after the other."""

    actor: str
    actions: list[tuple[Action, int]]
    place: int = 0
    since: int = 0
    until: int | None = None
    start: int = 0
    has_worked: bool = False
    is_gated: bool = False


@dataclass
class TickMachine:
    """Moves every walker as far as it gets, then lets the clock tick."""

    plan: Plan
    workload: Workload
    costs: CostModel
    inflight: int
    now: int = 0
    driver_awake: int = 0
    spans: Spans = field(default_factory=dict)
    done: dict[tuple[str, str, str, int], int] = field(default_factory=dict)
    started: dict[tuple[str, str, int], int] = field(default_factory=dict)
    sent: list[tuple[str, str, int]] = field(default_factory=list)
    arrival: dict[tuple[str, str, int], int] = field(default_factory=dict)

    def run(self) -> Spans:
        walkers = [walker for actor in self.plan.programs for walker in self.walkers_of(actor)]
        quiet = 0
        while any(walker.place < len(walker.actions) for walker in walkers):
            moved = False
            while any([self.move(walker) for walker in walkers] + [self.start_transfers()]):
                moved = True
            under_way = [walker.until for walker in walkers if walker.until is not None]
            quiet = 0 if moved or under_way or any(end > self.now for end in self.arrival.values()) else quiet + 1
            if quiet > self.costs.hop_us + self.costs.wake_us + 1:
                raise PlanError("stuck", hint="none")
            self.now += 1
        return self.spans

    def walkers_of(self, actor: str) -> list[Walker]:
        program = self.plan.programs[actor]
        if actor != DRIVER:
            first = -max(action.ahead for action in program)
            rounds = [(action, t + action.ahead) for t in range(first, NUM_EXECUTIONS) for action in program]
            return [Walker(actor, [(action, e) for action, e in rounds if 0 <= e < NUM_EXECUTIONS])]
        submit = [action for action in program if action.verb in (Verb.WRITE, Verb.SEND)]
        gets = [
            [each for each in program if each.target == value and each not in submit] for value in self.plan.outputs
        ]
        return [
            Walker(actor, [(action, e) for e in range(NUM_EXECUTIONS) for action in part]) for part in (submit, *gets)
        ]

    def move(self, walker: Walker) -> bool:
        """One change of one walker, if there is one to make at this tick."""
        if walker.place == len(walker.actions):
            return False
        action, execution = walker.actions[walker.place]
        if walker.until is None and not walker.has_worked:
            if not self.may_start(walker, action, execution):
                return False
            walker.start, walker.until = self.now, self.now + self.duration(action)
            return True
        if walker.until is not None:
            if self.now < walker.until:
                return False
            self.finish(walker, action, execution)
            walker.until, walker.has_worked = None, True
            return True
        if not self.may_leave(walker, action, execution):
            return False
        walker.place, walker.has_worked, walker.since = walker.place + 1, False, self.now
        return True

    def duration(self, action: Action) -> int:
        if action.verb is Verb.RUN:
            return int(self.workload.time_us(self.plan.node[action.target]))
        if action.verb is Verb.WRITE:
            return self.workload.size_bytes(self.plan.channel[action.target].value) // 1_000_000
        return int(self.costs.host_us) if action.verb in (Verb.SEND, Verb.RECV) else 0

    def may_start(self, walker: Walker, action: Action, execution: int) -> bool:
        if walker.actor == DRIVER and not self.driver_may(action, execution):
            walker.is_gated = True
            return False
        if walker.is_gated:
            walker.is_gated, walker.since = False, self.now
        actor = walker.actor
        if action.verb is Verb.READ:
            return self.is_seen(walker, [("write", self.plan.channel[action.target].writer, action.target, execution)])
        if action.verb is Verb.RECV:
            channel = self.plan.channel[action.target]
            return execution < channel.depth or ("free", actor, channel.value, execution - channel.depth) in self.done
        if not all(self.is_there(actor, value, execution) for value in self.values_of(action)):
            return False
        if action.verb in (Verb.WRITE, Verb.SEND) and execution >= self.least_room(self.plan.channel[action.target]):
            channel = self.plan.channel[action.target]
            before = execution - channel.depth
            if action.verb is Verb.SEND:
                return all(self.arrival.get((channel.id, r, before), 1 << 60) <= self.now for r in channel.readers)
            if channel.transport is Transport.COPY:
                before = max(before, execution - channel.slots)
            return self.is_seen(walker, [("free", reader, channel.value, before) for reader in channel.readers])
        return True

    def least_room(self, channel: ChannelSpec) -> int:
        """How many values may be under way in the narrower of a channel's ring and, where it has them, its slots."""
        return min([channel.depth] + [channel.slots] * (channel.transport is Transport.COPY))

    def driver_may(self, action: Action, execution: int) -> bool:
        program = self.plan.programs[DRIVER]
        if action.verb in (Verb.WRITE, Verb.SEND):
            before = execution - self.inflight
            return before < 0 or all(("free", DRIVER, value, before) in self.done for value in self.plan.outputs)
        last = [action for action in program if action.verb in (Verb.WRITE, Verb.SEND)][-1]
        return ("write", DRIVER, last.target, execution) in self.done

    def values_of(self, action: Action) -> tuple[str, ...]:
        if action.verb is Verb.RUN:
            return self.plan.node[action.target].inputs
        return (action.target if action.verb is Verb.FREE else self.plan.channel[action.target].value,)

    def is_there(self, actor: str, value: str, execution: int) -> bool:
        """Whether a value that gloo brings to the actor has arrived."""
        brought = [c.id for c in self.plan.channels if c.is_ordered and c.value == value and actor in c.readers]
        return all(self.arrival.get((name, actor, execution), 1 << 60) <= self.now for name in brought)

    def is_seen(self, walker: Walker, facts: list[tuple[str, str, str, int]]) -> bool:
        """Whether a walker that looked for facts one by one, polling and then asleep, is past the last by now."""
        seen = max(walker.since, self.driver_awake) if walker.actor == DRIVER else walker.since
        for fact in facts:
            if fact not in self.done:
                return False
            moment = self.done[fact] + int(self.costs.hop_us)
            if moment > seen:
                seen = moment + (int(self.costs.wake_us) if moment - seen > self.costs.spin_us else 0)
        return seen <= self.now

    def finish(self, walker: Walker, action: Action, execution: int) -> None:
        if action.verb is not Verb.FREE:
            self.spans[walker.actor, str(action), execution] = (walker.start, self.now)
        if walker.actor == DRIVER:  # its walkers are one thread, which is awake for all of them
            self.driver_awake = self.now
        self.done[str(action.verb), walker.actor, action.target, execution] = self.now
        if action.verb is Verb.SEND:
            self.sent += [(action.target, reader, execution) for reader in self.plan.channel[action.target].readers]
        if action.verb is Verb.RECV:
            self.started[action.target, walker.actor, execution] = self.now

    def may_leave(self, walker: Walker, action: Action, execution: int) -> bool:
        if action.stream != MAIN or action.verb not in (Verb.SEND, Verb.RECV):
            return True
        readers = self.plan.channel[action.target].readers if action.verb is Verb.SEND else (walker.actor,)
        return all(self.arrival.get((action.target, reader, execution), 1 << 60) <= self.now for reader in readers)

    def start_transfers(self) -> bool:
        """Starts, at each idle receiver, the receive that started first, if it is its sender's first unstarted send."""
        moved = False
        for reader in self.plan.programs:
            busy = any(key[1] == reader and end > self.now for key, end in self.arrival.items())
            key = next((key for key in self.started if key[1] == reader and key not in self.arrival), None)
            if busy or key is None:
                continue
            writer = self.plan.channel[key[0]].writer
            sent = [k for k in self.sent if k[1] == reader and self.plan.channel[k[0]].writer == writer]
            if sent and sent[0] == key:
                self.arrival[key] = self.now + self.transfer_time(self.plan.channel[key[0]])
                self.sent.remove(key)
                moved = True
        return moved

    def transfer_time(self, channel: ChannelSpec) -> int:
        """The longer of what the receiver's and the sender's core do."""
        size = self.workload.size_bytes(channel.value)
        return max(int(self.costs.latency_us) + size // 1_000, int(self.costs.host_us_per_mb) * size // 1_000_000)


def random_plan(rng: random.Random) -> tuple[Plan, Workload]:
    """One to three actors, one to six nodes, rings of one to three slots; some plans stop for ever. There are no GPUs."""
    actors = [f"A{number}" for number in range(rng.randint(1, 3))]
    nodes, made = list[NodeSpec](), ["i0"]
    for number in range(rng.randint(1, 6)):
        inputs = tuple(sorted(rng.sample(made, rng.randint(1, min(2, len(made))))))
        nodes.append(NodeSpec(f"n{number}", rng.choice(actors), f"m{number}", inputs, (f"n{number}",)))
        made.append(f"n{number}")
    maker = {"i0": DRIVER} | {node.id: node.actor for node in nodes}
    used = {value for node in nodes for value in node.inputs}
    outputs = tuple(node.id for node in nodes if node.id not in used)
    channels = list[ChannelSpec]()
    for value in made:
        readers = sorted({node.actor for node in nodes if value in node.inputs and node.actor != maker[value]})
        if value in outputs:
            readers = [DRIVER]
        if readers:
            kinds = [Transport.SHM, Transport.SHM, Transport.GLOO, Transport.GLOO, Transport.COPY]
            kind = Transport.SHM if DRIVER in (maker[value], *readers) else rng.choice(kinds)
            slots = rng.randint(1, 2) if kind is Transport.COPY else 0
            channels.append(
                ChannelSpec(value, value, maker[value], tuple(readers), kind, rng.randint(1, 3), slots=slots)
            )
    driver = [Action(Verb.WRITE, c.id) for c in channels if c.writer == DRIVER]
    for value in outputs:
        driver += [Action(Verb.READ, value), Action(Verb.FREE, value)]
    programs = {actor: program_of(actor, nodes, channels, rng) for actor in actors}
    programs = {DRIVER: tuple(driver)} | {actor: program for actor, program in programs.items() if program}
    plan = Plan((InputSpec("i0", "*"),), tuple(nodes), tuple(channels), programs, outputs, True, rng.randint(1, 4))
    sizes = {node.id: 1000 * rng.randint(0, 12) for node in nodes if node.id not in outputs}
    sizes |= {c.value: 1_000_000 * rng.randint(0, 9) for c in channels if c.value in sizes and not c.is_ordered}
    times = {node.id: float(rng.randint(0, 30)) for node in nodes}
    return plan, Workload(times, sizes, default_value_bytes=0)


def program_of(
    actor: str, nodes: list[NodeSpec], channels: list[ChannelSpec], rng: random.Random
) -> tuple[Action, ...]:
    """Nodes in order; values are taken by their first use, given after their run, and freed, but for a few."""
    mine = [node for node in nodes if node.actor == actor]
    program = list[Action]()
    taken = set[str]()
    for place, node in enumerate(mine):
        for channel in channels:
            if actor in channel.readers and channel.value in node.inputs and channel.value not in taken:
                taken.add(channel.value)
                if not channel.is_ordered:
                    program.append(Action(Verb.READ, channel.id))
                elif rng.random() < 0.5:
                    program.append(Action(Verb.RECV, channel.id, rng.choice([MAIN, "recv"])))
                else:
                    ahead = rng.randint(0, min(1, channel.depth - 1))
                    program.insert(rng.randint(0, len(program)), Action(Verb.RECV, channel.id, "recv", ahead))
        program.append(Action(Verb.RUN, node.id))
        for channel in channels:
            if channel.value == node.id:
                stream = rng.choice([MAIN, "send"]) if channel.is_ordered else MAIN
                program.append(Action(Verb.SEND if channel.is_ordered else Verb.WRITE, channel.id, stream))
        later = {value for other in mine[place + 1 :] for value in other.inputs}
        program += [Action(Verb.FREE, value) for value in node.inputs if value in taken and value not in later]
    frees = [action for action in program if action.verb is Verb.FREE]
    if frees and rng.random() < 0.05:
        program.remove(rng.choice(frees))
    return tuple(program)


def attempt(job: Callable[[], Spans]) -> Spans | str:
    try:
        return job()
    except PlanError:
        return "stuck"


def simulated(plan: Plan, workload: Workload, costs: CostModel, inflight: int) -> Spans:
    """What the simulator says, in the tick machine's form: the work of each action, without waits and transfers."""
    timeline = simulate(plan, workload, costs, NUM_EXECUTIONS, inflight)
    labels = {str(action) for program in plan.programs.values() for action in program}
    found: Spans = {}
    for span in timeline.spans:
        is_transfer = span.stream != MAIN and span.actor != DRIVER
        if span.kind != "wait" and span.label in labels and not is_transfer:
            found[span.actor, span.label, span.execution] = (round(span.start_us), round(span.end_us))
            assert span.start_us == pytest.approx(round(span.start_us), abs=1e-6)
    return found


@pytest.mark.soak
@pytest.mark.parametrize(("costs", "max_inflight"), [(SPINNING, 4), (SLEEPY, 1)], ids=["spinning", "sleepy"])
def test_the_simulator_equals_a_clock_that_ticks(costs: CostModel, max_inflight: int) -> None:
    """On plans of which some are stuck."""
    num_plans, num_stuck = num(150, 4_000), 0
    for seed in range(num_plans):
        plan, workload = random_plan(random.Random(seed))
        inflight = min(plan.max_inflight, max_inflight)
        expected = attempt(TickMachine(plan, workload, costs, inflight).run)
        found = attempt(partial(simulated, plan, workload, costs, inflight))
        assert found == expected, f"seed {seed}\n{plan.programs}"
        num_stuck += expected == "stuck"
    assert num_plans / 50 <= num_stuck <= num_plans / 2
