"""A plan in the making: what the passes of ``schedule.compile`` hand to each other."""

from __future__ import annotations

from dataclasses import dataclass, field

from crossfade.graph.communicators import Communicator
from crossfade.graph.members import members_of
from crossfade.plan.actions import Action, Verb
from crossfade.plan.call import Call
from crossfade.plan.plan import ChannelSpec, CollectiveSpec, CommunicatorSpec, InputSpec, NodeSpec, Plan
from crossfade.schedule.transports import Wish


@dataclass(slots=True)
class Draft:
    """Everything that a plan has, still open to change, and what only the passes need."""

    max_inflight: int
    # inputs, nodes, collectives, channels, programs, outputs, returns_list, max_inflight, devices, static, hosts, communicators:
    # as in `Plan`.
    inputs: list[InputSpec] = field(default_factory=list)
    nodes: list[NodeSpec] = field(default_factory=list)
    collectives: list[CollectiveSpec] = field(default_factory=list)
    channels: list[ChannelSpec] = field(default_factory=list)
    programs: dict[str, list[Action]] = field(default_factory=dict)
    outputs: tuple[str, ...] = ()
    returns_list: bool = False
    # the arguments of each node, by id; also each communicator, as the only argument under its own id.
    calls: dict[str, Call] = field(default_factory=dict)
    maker: dict[str, str] = field(default_factory=dict)  # who makes each value, by value id
    devices: dict[str, tuple[int, ...]] = field(default_factory=dict)
    static: list[str] = field(default_factory=list)
    communicators: list[CommunicatorSpec] = field(default_factory=list)
    hosts: dict[str, str] = field(default_factory=dict)
    wishes: dict[str, Wish] = field(default_factory=dict)  # what the user asked for, by value id
    # the same for one reader, where it differs, by value id and actor.
    wishes_to: dict[tuple[str, str], Wish] = field(default_factory=dict)

    def wish(self, value: str, reader: str) -> Wish:
        """What the user asked for on a value's way to a reader."""
        return self.wishes_to.get((value, reader), self.wishes[value])

    def enter(self, communicator: Communicator) -> CommunicatorSpec:
        """Returns the plan's entry for a communicator, new or known. The actors of its group become parties, even without nodes.
        Refuses a group that is not valid (`GraphError`).
        """
        for spec in self.communicators:
            if self.calls[spec.id].args[0] is communicator:
                return spec
        spec = CommunicatorSpec(f"m{len(self.communicators)}", tuple(info.id for info in members_of(communicator)))
        self.communicators.append(spec)
        self.calls[spec.id] = Call((communicator,), {})
        for party in spec.parties:
            self.programs.setdefault(party, [])
        return spec

    def values(self) -> dict[str, dict[tuple[Verb, str], tuple[tuple[str, ...], tuple[str, ...]]]]:
        """Ids of the values that each ``run`` and ``coll`` of each party takes and makes, by party, verb and target."""
        values: dict[str, dict[tuple[Verb, str], tuple[tuple[str, ...], tuple[str, ...]]]]
        values = {party: {} for party in self.programs}
        for node in self.nodes:
            values[node.actor][Verb.RUN, node.id] = node.inputs, node.outputs
        for collective in self.collectives:
            for party, inputs, outputs in zip(collective.parties, collective.inputs, collective.outputs, strict=True):
                values[party][Verb.COLL, collective.id] = inputs, outputs
        return values

    def plan(self) -> Plan:
        """The finished plan."""
        return Plan(
            inputs=tuple(self.inputs),
            nodes=tuple(self.nodes),
            channels=tuple(self.channels),
            programs={party: tuple(actions) for party, actions in self.programs.items()},
            outputs=self.outputs,
            returns_list=self.returns_list,
            max_inflight=self.max_inflight,
            collectives=tuple(self.collectives),
            devices=self.devices,
            static=tuple(self.static),
            communicators=tuple(self.communicators),
            hosts={party: self.hosts[party] for party in self.programs if party in self.hosts},
        )
