"""The parts of a plan, and the plan without its text form.

A plan holds no live object. The methods' constant arguments travel beside it (``plan.call``), so that two plans are
equal when they move the same values in the same order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from crossfade.plan.actions import Action
from crossfade.types import CollectiveKind, ReduceOp, TargetDevice, Transport

_ORDERED = frozenset({Transport.GLOO, Transport.STAGED, Transport.NCCL, Transport.COMMUNICATOR})


@dataclass(frozen=True, slots=True)
class InputSpec:
    """One value that the driver writes for each execution."""

    value: str  # the value's id: i0, i1, ...
    # which part of the arguments of ``execute`` it is: ``*`` for all of it, ``[0]`` for a position or an item, ``.x`` for a
    # keyword, ``go`` for the bare fact that an execution starts.
    key: str


@dataclass(frozen=True, slots=True)
class NodeSpec:
    """One method call."""

    id: str  # n0, n1, ...
    actor: str  # the id of the actor on which it runs
    method: str
    inputs: tuple[str, ...]  # ids of the values that its arguments hold, in order, each once
    # ids of the values it makes: its own id, or n0.0, n0.1, ... for a method with several returns.
    outputs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CommunicatorSpec:
    """A user-defined communicator."""

    id: str  # m0, m1, ...
    parties: tuple[str, ...]  # the actors of its group, in the order of their ranks


@dataclass(frozen=True, slots=True)
class ChannelSpec:
    """What carries one value from the actor that makes it to the actors that need it."""

    # the id of the value; where the value has a channel already, followed by ``~transport``, or ``~transport-device`` if the
    # readers want the tensors somewhere else than by default.
    id: str
    value: str
    writer: str
    readers: tuple[str, ...]
    transport: Transport
    depth: int  # slots of the ring: how many executions' values it holds
    buffer_bytes: int = 0  # memory set aside for each slot in advance, 0 for none (slots grow when a value needs it)
    device: TargetDevice = TargetDevice.DEFAULT  # where those of the readers that have a GPU want the tensors in it
    # for ``copy``, slots of each reader in device memory, which only values with device tensors take, and whose size
    # ``buffer_bytes`` then is; 0 for others.
    slots: int = 0
    # for ``copy``, the place of its first use among what comes to the same reader by ``copy``: who writes several channels at once
    # pushes those of low turns first, and large values of several writers go in this order (`crossfade.plan.turns`).
    turn: int = 0
    # for ``communicator``, the id of the communicator that moves the tensors; such a channel has one reader.
    communicator: str = ""
    # whether its reader gives the memory, as a receive of torch.distributed does: it has ``send`` and ``recv`` over any transport,
    # and on GPUs nothing moves before the reader's stream has come to the ``recv``. For predictions: engines do not carry it.
    is_posted: bool = False

    @property
    def landing(self) -> str:
        """The reader whose process the value comes to first: from another host, on behalf of all readers of its own."""
        return self.readers[0]

    @property
    def is_ordered(self) -> bool:
        """Whether it has ``send`` and ``recv``, which need both hosts: values of several such channels between the same two actors
        arrive in one order (PL-1). Others have ``write`` and ``read``, and a value is there once it is written.
        """
        return self.is_posted or self.transport in _ORDERED

    @property
    def credit(self) -> int:
        """How many executions a writer may be ahead of the releases that it waits for: the slots that every value needs."""
        has_slots = self.transport is Transport.COPY and not self.is_posted
        return min(self.depth, self.slots) if has_slots else self.depth


@dataclass(frozen=True)
class CollectiveSpec:
    """What several actors do together, once per execution: a rendezvous."""

    id: str  # c0, c1, ...
    kind: CollectiveKind
    op: ReduceOp | None  # how tensors are reduced, or None for kinds that do not reduce
    root: int  # the rank whose tensor a broadcast gives to all
    transport: Transport
    parties: tuple[str, ...]  # the actors, in rank order
    inputs: tuple[tuple[str, ...], ...]  # for each rank the ids of the values that it brings
    # for each rank the ids of the values that it gets: c0.0 at rank 0, or c0.0.0, c0.0.1, ... where they are several.
    outputs: tuple[tuple[str, ...], ...]
    communicator: str = ""  # for ``communicator``, the id of the communicator that does the collective

    def inputs_of(self, party: str) -> tuple[str, ...]:
        """What a party brings; nothing for who is none."""
        return self.inputs[self._ranks[party]] if party in self._ranks else ()

    def outputs_of(self, party: str) -> tuple[str, ...]:
        """What a party gets; nothing for who is none."""
        return self.outputs[self._ranks[party]] if party in self._ranks else ()

    @cached_property
    def _ranks(self) -> Mapping[str, int]:
        """By party, its first place in ``parties``."""
        return {party: rank for rank, party in reversed(list(enumerate(self.parties)))}

    @cached_property
    def group(self) -> tuple[str, ...]:
        """Who it is done with: the same for all collectives of the same actors, in whichever order."""
        return tuple(sorted(self.parties))


@dataclass(frozen=True)
class BarePlan:
    """A plan without its text form: what every actor will do, round after round."""

    inputs: tuple[InputSpec, ...]
    nodes: tuple[NodeSpec, ...]  # the method calls, in the global order that every actor keeps to
    channels: tuple[ChannelSpec, ...]  # what carries values between actors
    # the actions of each party, the driver included and first, in order; each runs its list once per execution.
    programs: Mapping[str, tuple[Action, ...]]
    outputs: tuple[str, ...]  # ids of the values that an execution gives, in the user's order
    returns_list: bool  # whether the user asked for several outputs (a list) or for one value
    max_inflight: int  # how many executions may be under way
    # what several actors do together, in the order that every actor keeps to.
    collectives: tuple[CollectiveSpec, ...] = ()
    # indices of the GPUs of the actors that have any.
    devices: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    static: tuple[str, ...] = ()  # ids of the values whose tensors, as the user promises, are alike in every execution
    communicators: tuple[CommunicatorSpec, ...] = ()  # the user-defined communicators that move values
    hosts: Mapping[str, str] = field(
        default_factory=dict
    )  # where each party is, the driver included; none for one host

    def host_of(self, party: str) -> str:
        """Where a party is; the same for all where there is one host."""
        return self.hosts.get(party, "")

    def is_wired(self, spec: ChannelSpec) -> bool:
        """Whether a channel comes from another host, so that its messages go over a wire."""
        return spec.transport is Transport.TCP or self.is_apart((spec.writer, *spec.readers))

    def is_apart(self, parties: Iterable[str]) -> bool:
        """Whether these parties are on several hosts."""
        return bool(self.hosts) and len({self.host_of(party) for party in parties}) > 1

    @cached_property
    def node(self) -> Mapping[str, NodeSpec]:
        """Nodes by id."""
        return {node.id: node for node in self.nodes}

    @cached_property
    def maker(self) -> Mapping[str, NodeSpec]:
        """Nodes by the values that they make."""
        return {value: node for node in self.nodes for value in node.outputs}

    @cached_property
    def channel(self) -> Mapping[str, ChannelSpec]:
        """Channels by id."""
        return {channel.id: channel for channel in self.channels}

    @cached_property
    def collective(self) -> Mapping[str, CollectiveSpec]:
        """Collectives by id."""
        return {collective.id: collective for collective in self.collectives}

    @cached_property
    def collectives_on_devices(self) -> frozenset[str]:
        """Ids of the collectives whose tensors go from device to device."""
        return frozenset(
            each.id
            for each in self.collectives
            if each.transport.moves_device_memory and all(self.devices.get(party) for party in each.parties)
        )

    @cached_property
    def collective_of(self) -> Mapping[tuple[str, str], CollectiveSpec]:
        """For a value that a party gets from a collective, by value and party: the first collective that gives it."""
        found: dict[tuple[str, str], CollectiveSpec] = {}
        for collective in self.collectives:
            for party, outputs in zip(collective.parties, collective.outputs, strict=True):
                for value in outputs:
                    found.setdefault((value, party), collective)
        return found
