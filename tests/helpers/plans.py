"""Sound plans: random ones, and long chains.

A random one comes from one global sequence: each step gets a moment, such that whatever it waits for within a round has
an earlier one, and each party does its steps in the order of their moments. Nothing can wait in a circle then.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from random import Random

from crossfade.plan.actions import COLL_STREAM, MAIN, RECV_STREAM, SEND_STREAM, Action, Verb
from crossfade.plan.plan import ChannelSpec, CollectiveSpec, InputSpec, NodeSpec, Plan
from crossfade.types import DRIVER, CollectiveKind, ReduceOp, Transport

START, END = -2.0, 100.0
"""Events before and after all runs; node number i runs at i + 0.5."""
TICK = 1e-6
"""Between moments that belong together."""
TRANSPORTS = (*[Transport.SHM] * 2, *[Transport.GLOO] * 3, *[Transport.COPY] * 2, Transport.STAGED, Transport.NCCL)
"""Of the channels of sound plans."""


@dataclass(frozen=True)
class Size:
    """The most of everything that a random plan has."""

    nodes: int = 4
    actors: int = 3
    inputs: int = 2
    inputs_per_node: int = 2
    depth: int = 2
    collectives: int = 2


SMALL = Size()


def sound_plan(rng: Random, size: Size = SMALL) -> Plan:
    """A plan that keeps all invariants."""
    return _Draft(rng, size).plan()


class _Draft:
    """A sound plan in the making.

    ``has_at`` are moments from which a party has a value for sure, ``uses`` those at which it needs it, ``sends`` those
    of the transfers to each party, which has one receiving thread.
    """

    def __init__(self, rng: Random, size: Size) -> None:
        self.rng, self.size = rng, size
        actors = [f"A{i}" for i in range(rng.randint(1, size.actors))]
        inputs = [f"i{i}" for i in range(rng.randint(1, size.inputs))]
        self.parties = [DRIVER, *actors]
        self.maker = dict.fromkeys(inputs, DRIVER)
        self.has_at = {(DRIVER, value): START for value in inputs}
        self.steps: dict[str, list[tuple[float, Action]]] = {party: [] for party in self.parties}
        self.uses: dict[tuple[str, str], list[float]] = defaultdict(list)
        self.sends: dict[str, list[tuple[float, ChannelSpec, str]]] = defaultdict(list)
        self.channels: list[ChannelSpec] = []
        self.nodes: list[NodeSpec] = []
        self.collectives: list[CollectiveSpec] = []
        self.started: dict[str, float] = dict.fromkeys(actors, START)  # each party's last start of a collective
        self.collected: list[tuple[str, tuple[str, ...], float]] = []
        num_collectives = rng.choice([0, 0, rng.randint(0, size.collectives)]) if len(actors) > 1 else 0
        kinds = ["node"] * rng.randint(1, size.nodes) + ["collective"] * num_collectives
        rng.shuffle(kinds)
        for i, kind in enumerate(kinds):
            if kind == "node":
                self.nodes.append(self._node(i, rng.choice(actors)))
            else:
                self.collectives.append(self._collective(i, rng.sample(actors, rng.randint(2, len(actors)))))
        made = [value for node in self.nodes for value in node.outputs]
        made += [
            value for each in self.collectives for values in each.outputs for value in values if rng.random() < 0.5
        ]
        used = {value for node in self.nodes for value in node.inputs}
        used |= {value for each in self.collectives for values in each.inputs for value in values}
        self.inputs = [value for value in inputs if value in used]
        self.outputs = [value for value in made if value not in used or rng.random() < 0.2]
        for value in self.outputs:
            self.uses[DRIVER, value].append(rng.uniform(self.has_at[self.maker[value], value] + 0.2, END))

    def _node(self, i: int, actor: str) -> NodeSpec:
        rng, values = self.rng, list(self.maker)
        name = f"n{len(self.nodes)}"
        inputs = rng.sample(values, min(len(values), rng.randint(0 if i else 1, self.size.inputs_per_node)))
        outputs: tuple[str, ...] = (name,) if rng.random() < 0.8 else (f"{name}.0", f"{name}.1")
        for value in outputs:
            self.maker[value], self.has_at[actor, value] = actor, i + 0.5 + TICK
        for value in inputs:
            self.uses[actor, value].append(i + 0.5)
        self._do(actor, i + 0.5, Action(Verb.RUN, name))
        return NodeSpec(name, actor, "step", tuple(inputs), outputs)

    def _collective(self, i: int, parties: list[str]) -> CollectiveSpec:
        """All start it at i + 0.5 or, in the background, earlier, but after their last start; it is over at i + 0.5."""
        rng, values = self.rng, list(self.maker)
        name = f"c{len(self.collectives)}"
        inputs: list[tuple[str, ...]] = []
        outputs: list[tuple[str, ...]] = []
        for rank, party in enumerate(parties):
            mine = rng.sample(values, min(len(values), rng.randint(0, 1)))
            moment, stream = i + 0.5, rng.choice([MAIN, COLL_STREAM])
            if stream != MAIN:
                there = [self.has_at[self.maker[value], value] for value in mine]
                moment = rng.uniform(max([*there, self.started[party]]) + TICK, moment)
            for value in mine:
                self.uses[party, value].append(moment)
            self._do(party, moment, Action(Verb.COLL, name, stream))
            self.started[party] = moment
            made: tuple[str, ...] = (
                (f"{name}.{rank}",) if rng.random() < 0.8 else (f"{name}.{rank}.0", f"{name}.{rank}.1")
            )
            if stream != MAIN:
                self.collected.append((party, made, i + 0.5))
            inputs.append(tuple(mine))
            outputs.append(made)
        for party, made in zip(parties, outputs, strict=True):
            for value in made:
                self.maker[value], self.has_at[party, value] = party, i + 0.5 + TICK
        kind = rng.choice(list(CollectiveKind))
        op = rng.choice(list(ReduceOp)) if kind.reduces else None
        return CollectiveSpec(name, kind, op, 0, Transport.GLOO, tuple(parties), tuple(inputs), tuple(outputs))

    def _do(self, party: str, moment: float, action: Action) -> None:
        self.steps[party].append((moment, action))

    def plan(self) -> Plan:
        for value, maker in self.maker.items():
            readers = [party for party in self.parties if party != maker and self.uses[party, value]]
            readers = [reader for _, reader in sorted((min(self.uses[party, value]), party) for party in readers)]
            while readers:
                some = [readers.pop(0) for _ in range(self.rng.randint(1, len(readers)))]
                self._open(value, some)
        freed_at = self._free()
        for party, values, moment in self.collected:
            if not any(self.uses[party, value] for value in values):
                self._do(party, self.rng.uniform(moment + 2 * TICK, END), Action(Verb.FREE, values[-1]))
        for reader, sends in self.sends.items():
            self._receive(reader, sorted(sends, key=lambda send: send[0]), freed_at)
        return Plan(
            inputs=tuple(InputSpec(value, f"[{i}]") for i, value in enumerate(self.inputs)),
            nodes=tuple(self.nodes),
            channels=tuple(self.channels),
            programs={party: self._program(party) for party in self.parties},
            outputs=tuple(self.outputs),
            returns_list=len(self.outputs) != 1,
            max_inflight=self.rng.randint(1, 10),
            collectives=tuple(self.collectives),
        )

    def _program(self, party: str) -> tuple[Action, ...]:
        return tuple(action for _, action in sorted(self.steps[party], key=lambda step: step[0]))

    def _open(self, value: str, readers: list[str]) -> None:
        """A channel to some readers, from whoever has the value early enough."""
        rng = self.rng
        needed_at = min(min(self.uses[reader, value]) for reader in readers)
        have = [party for party, what in self.has_at if what == value and self.has_at[party, what] < needed_at]
        writer = rng.choice([self.maker[value], *have])
        taken = sum(channel.value == value for channel in self.channels)
        transport = rng.choice(TRANSPORTS)
        channel = ChannelSpec(
            id=f"{value}~{taken}" if taken else value,
            value=value,
            writer=writer,
            readers=tuple(readers),
            transport=transport,
            depth=rng.randint(1, self.size.depth),
            slots=rng.randint(1, self.size.depth) if transport is Transport.COPY else 0,
        )
        self.channels.append(channel)
        put_at = rng.uniform(self.has_at[writer, value], needed_at)
        self.uses[writer, value].append(put_at)
        if channel.is_ordered:
            stream = rng.choice([SEND_STREAM, SEND_STREAM, MAIN])
            self._do(writer, put_at, Action(Verb.SEND, channel.id, stream))
            for reader in readers:
                self.sends[reader].append((put_at, channel, stream))
                self.has_at[reader, value] = put_at + 4 * TICK
        else:
            self._do(writer, put_at, Action(Verb.WRITE, channel.id))
            for reader in readers:
                read_at = rng.uniform(put_at, min(self.uses[reader, value]))
                self._do(reader, read_at, Action(Verb.READ, channel.id))
                self.has_at[reader, value] = read_at

    def _free(self) -> dict[tuple[str, str], float]:
        """What came through a channel is freed after its last use, of the rest some. Gives the moments."""
        freed_at = {}
        for (party, value), moments in self.uses.items():
            if moments and (party != self.maker[value] or self.rng.random() < 0.3):
                later = self.rng.choice([TICK, self.rng.uniform(TICK, END)])
                freed_at[party, value] = max(moments) + 8 * TICK + later
                self._do(party, freed_at[party, value], Action(Verb.FREE, value))
        return freed_at

    def _receive(
        self, reader: str, sends: list[tuple[float, ChannelSpec, str]], freed_at: Mapping[tuple[str, str], float]
    ) -> None:
        """The receives of one party, given the sends to it in order.

        The first ``num_sooner`` run one round further ahead than the rest do, and come after these in the round: each
        execution's are then still in the order of the sends.
        """
        rng = self.rng
        least_ahead = rng.choice([0, 0, 0, 0, 1, self.size.depth])
        num_sooner = rng.choice([0, 0, rng.randint(0, len(sends) - 1)])
        aheads = [least_ahead + (place < num_sooner) for place in range(len(sends))]
        if any(ahead > channel.depth for ahead, (_, channel, _) in zip(aheads, sends, strict=True)):
            aheads = [0] * len(sends)
        bound = END
        moments = []
        for (sent_at, channel, stream), ahead in reversed(list(zip(sends, aheads, strict=True))):
            if ahead:
                continue
            first_use = min([*self.uses[reader, channel.value], END])
            bound, on_main = self._receive_at(sent_at, stream, min(bound, first_use))
            moments.append(bound)
            self._do(reader, bound, Action(Verb.RECV, channel.id, MAIN if on_main else RECV_STREAM))
        after = max(moments, default=START)
        later = [(channel, ahead) for (_, channel, _), ahead in zip(sends, aheads, strict=True) if ahead]
        for channel, ahead in sorted(later, key=lambda each: each[1]):
            if ahead == channel.depth:
                after = max(after, freed_at[reader, channel.value])
            after = rng.uniform(after + TICK, after + 2.0)
            self._do(reader, after, Action(Verb.RECV, channel.id, RECV_STREAM, ahead))

    def _receive_at(self, sent_at: float, stream: str, bound: float) -> tuple[float, bool]:
        """When to receive, before ``bound``, and whether on ``main``."""
        rng = self.rng
        on_main = bound > sent_at + 4 * TICK and rng.random() < 0.3
        if on_main:
            return (sent_at + TICK if stream == MAIN else rng.uniform(sent_at, bound)), True
        return rng.uniform(START - 1.0, min(bound, sent_at) if stream == MAIN else bound), False


def chain_plan(num_nodes: int, num_actors: int = 4, transport: Transport = Transport.SHM) -> Plan:
    """Nodes one after the other, each on the next of at least two actors: the longest way from input to output."""
    values = ["i0", *(f"n{i}" for i in range(num_nodes))]
    where = [DRIVER, *(f"A{i % num_actors}" for i in range(num_nodes)), DRIVER]
    programs: dict[str, list[Action]] = {party: [] for party in dict.fromkeys(where)}
    put, take, streams = Verb.WRITE, Verb.READ, (MAIN, MAIN)
    if transport is Transport.GLOO:
        put, take, streams = Verb.SEND, Verb.RECV, (SEND_STREAM, RECV_STREAM)
    before = ""
    for value, writer, reader in zip(values, where, where[1:], strict=False):
        if value != "i0":
            programs[writer].append(Action(Verb.RUN, value))
        programs[writer].append(Action(put, value, streams[0]))
        if value != "i0":
            programs[writer].append(Action(Verb.FREE, before))
        before = value
        programs[reader].append(Action(take, value, streams[1]))
    programs[DRIVER].append(Action(Verb.FREE, values[-1]))
    return Plan(
        inputs=(InputSpec("i0", "*"),),
        nodes=tuple(NodeSpec(f"n{i}", where[i + 1], "step", (values[i],), (f"n{i}",)) for i in range(num_nodes)),
        channels=tuple(
            ChannelSpec(value, value, writer, (reader,), transport, depth=2)
            for value, writer, reader in zip(values, where, where[1:], strict=False)
        ),
        programs={party: tuple(actions) for party, actions in programs.items()},
        outputs=(values[-1],),
        returns_list=False,
        max_inflight=2,
    )
