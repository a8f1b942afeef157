"""What the streams of an actor's GPUs go through, for the simulator.

The host runs the actor's program and enqueues; a stream goes through what was enqueued on it, in order, when its needs are there:

===========  =====================================================================================================
``compute``  kernels of methods, which wait for what was pushed to them; then the end of each value's use
``push``     copies to other GPUs, which wait for the kernels that made the value and for a free slot; posted receives
``up``       copies to the host of what leaves by shared memory, which publish it there; the start of staged transfers
``down``     copies from the host of what comes by shared memory and is wanted on the GPU
``nccl``     the start of NCCL's transfers
``coll``     collectives, one after another of each set of actors, which wait for what the actor's methods computed before
===========  =====================================================================================================

A receive that its reader has posted starts its end of the transfer when all is computed that was enqueued before it.

A transfer takes its time once both ends have started it (`schedule.simulate`), and is shown on the streams that
`crossfade.plan.device_streams` names for its transport. A collective begins when the streams of all its parties have come to it,
and they come to it only once all hosts are known to have started it (`crossfade.collectives.group`).

A value that is pushed to several readers reaches all of them when the last copy ends, since their chunks take turns.

Large values that several senders push into one receiver go one after the other (`crossfade.plan.turns`): the host holds a push
until its predecessor's is enqueued, at most for as long as it takes alone; the stream then waits for those that are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TypeAlias

from crossfade.plan.actions import MAIN, Action, Verb
from crossfade.plan.device_streams import DeviceStream, stream_in, stream_out
from crossfade.plan.plan import ChannelSpec, CollectiveSpec, Plan
from crossfade.plan.turns import LARGE_BYTES
from crossfade.schedule.collective_costs import is_on_gpus
from crossfade.schedule.cost import CostModel
from crossfade.schedule.gpus import Kernels, Push, push_time_us
from crossfade.schedule.strands import Need, Step
from crossfade.schedule.transports import gpu_pairs
from crossfade.schedule.workload import Workload
from crossfade.types import TargetDevice, Transport

_THROUGH_HOSTS = frozenset({Transport.SHM, Transport.TCP})

Before: TypeAlias = Mapping[tuple[str, str], str]
"""The predecessor of a channel at a reader."""


def is_pushed(plan: Plan, channel: ChannelSpec) -> bool:
    """Whether a channel's values go from GPU to GPU."""
    has_gpus = plan.devices.get
    return (
        channel.transport.moves_device_memory and bool(has_gpus(channel.writer)) and all(map(has_gpus, channel.readers))
    )


def is_posted_on_gpus(plan: Plan, channel: ChannelSpec) -> bool:
    """Whether a channel's values go from GPU to GPU into memory that the reader gives, so that streams wait for both ends."""
    return channel.is_posted and is_pushed(plan, channel)


def goes_up(plan: Plan, workload: Workload, channel: ChannelSpec) -> bool:
    """Whether a channel's values are copied from its writer's GPU to the host: kernels make them, and the method does not wait; or
    a collective between GPUs does.
    """
    if channel.transport not in _THROUGH_HOSTS or not plan.devices.get(channel.writer):
        return False
    node = plan.maker.get(channel.value)
    if node is None:
        collective = plan.collective_of.get((channel.value, channel.writer))
        return collective is not None and is_on_gpus(plan, collective)
    return workload.device_time_us(node) > 0 and not workload.is_synchronous(node)


def comes_down(plan: Plan, workload: Workload, channel: ChannelSpec, reader: str) -> bool:
    """Whether a channel's values are copied from the host to a reader's GPU: they are wanted there, or come from a GPU."""
    if channel.transport not in _THROUGH_HOSTS or not plan.devices.get(reader):
        return False
    match channel.device:
        case TargetDevice.CUDA:
            return True
        case TargetDevice.CPU:
            return False
        case _:
            return goes_up(plan, workload, channel)


def host_enqueued(action: Action, actor: str) -> str:
    """The fact that an actor's host has enqueued what the action needs of a stream."""
    return f"enqueued {action} by {actor}"


def all_started(spec: CollectiveSpec) -> tuple[Need, ...]:
    """When it is known that all parties of a collective between GPUs have started it: then each enqueues its part."""
    return (Need(f"started {spec.id}", is_hop=True),)


def push_of(plan: Plan, workload: Workload, channel: ChannelSpec, reader: str) -> Push:
    """The transfer of a channel's value to one reader."""
    source, target = gpu_pairs(plan.devices[channel.writer], plan.devices[reader])[0]
    return Push(channel.transport, source, target, workload.size_bytes(channel.value))


def holds(plan: Plan, workload: Workload, costs: CostModel, channel: ChannelSpec, before: Before) -> tuple[Need, ...]:
    """For which writes of others the host of a channel's writer holds its own, and how long."""
    others = [other for reader in channel.readers if (other := before.get((channel.id, reader)))]
    if not others or workload.size_bytes(channel.value) < LARGE_BYTES:
        return ()
    patience_us = max(push_time_us(costs, push_of(plan, workload, channel, reader)) for reader in channel.readers)
    return tuple(Need(f"written {other}", is_hop=True, patience_us=patience_us) for other in others)


def device_steps(
    plan: Plan, workload: Workload, costs: CostModel, actor: str, before: Before
) -> dict[tuple[str, str], tuple[Step, ...]]:
    """The steps of each stream of an actor's GPUs, in the order of its program; nothing for one that has none. A stream is called
    by what it is for, and by what tells it from others of that name.
    """
    if not plan.devices.get(actor):
        return {}
    enqueuer = _Enqueuer(plan, workload, costs, actor, before)
    streams: dict[tuple[str, str], list[Step]] = {}
    for action in plan.programs[actor]:
        for stream, step in enqueuer.steps(action):
            spec = step.collective
            which = "" if spec is None else f" of {', '.join(spec.group)} by {spec.transport}"
            streams.setdefault((stream, which), []).append(step)
    return {(str(stream), which): tuple(steps) for (stream, which), steps in streams.items()}


class _Enqueuer:
    """What the actions of one actor put on which stream."""

    def __init__(self, plan: Plan, workload: Workload, costs: CostModel, actor: str, before: Before) -> None:
        self._plan, self._workload, self._costs, self._actor = plan, workload, costs, actor
        taken = (action.target for action in plan.programs[actor] if action.verb in (Verb.READ, Verb.RECV))
        channels = [plan.channel[target] for target in taken if target in plan.channel]
        self._before = before
        self._pushed_here = {channel.value: channel for channel in channels if is_pushed(plan, channel)}
        brought_here = {each.value: each for each in channels if comes_down(plan, workload, each, actor)}
        self._arriving = {**brought_here, **self._pushed_here}
        done = (action.target for action in plan.programs[actor] if action.verb is Verb.COLL)
        met = [plan.collective[target] for target in done if target in plan.collective]
        self._over = {
            value: Need(f"over {each.id}") for each in met if is_on_gpus(plan, each) for value in each.outputs_of(actor)
        }
        self._last_run = ""

    def steps(self, action: Action) -> Iterator[tuple[str, Step]]:
        """Streams, and what they get."""
        channel = self._plan.channel.get(action.target)
        match action.verb:
            case Verb.RUN if action.target in self._plan.node:
                self._last_run = action.target
                yield DeviceStream.COMPUTE, self._run(action)
            case Verb.COLL if action.target in self._plan.collective:
                spec = self._plan.collective[action.target]
                if is_on_gpus(self._plan, spec):
                    yield DeviceStream.COLL, self._meet(spec)
                    if action.stream == MAIN:
                        yield DeviceStream.COMPUTE, Step(str(action), needs=(Need(f"over {spec.id}"),))
            case Verb.FREE if action.target in self._pushed_here:
                value = f"{action.target} by {self._actor}"
                yield DeviceStream.COMPUTE, Step(str(action), needs=(Need(f"freed {value}"),), fact=f"let go {value}")
            case Verb.SEND if channel is not None and is_pushed(self._plan, channel):
                needs = (Need(f"enqueued {channel.id}"), *self._made(channel.value))
                yield stream_out(channel.transport), Step(str(action), needs=needs, transfer=channel)
                if channel.is_posted and action.stream == MAIN:
                    arrived = tuple(Need(f"arrived {channel.id} at {reader}") for reader in channel.readers)
                    yield DeviceStream.COMPUTE, Step(str(action), needs=arrived)
            case Verb.RECV if channel is not None and is_posted_on_gpus(self._plan, channel):
                yield stream_in(channel.transport, is_posted=True), self._post(action, channel)
            case Verb.WRITE if channel is not None and is_pushed(self._plan, channel):
                for step in self._push(action, channel):
                    yield stream_out(channel.transport), step
            case Verb.WRITE if channel is not None and goes_up(self._plan, self._workload, channel):
                yield stream_out(channel.transport), self._bring_up(action, channel)
            case Verb.READ if channel is not None and comes_down(self._plan, self._workload, channel, self._actor):
                yield stream_in(channel.transport), self._bring_down(action, channel)

    def _run(self, action: Action) -> Step:
        node = self._plan.node[action.target]
        time_us = self._workload.device_time_us(node)
        arrived = (self._arriving[value] for value in node.inputs if value in self._arriving)
        over = (self._over[value] for value in node.inputs if value in self._over)
        return Step(
            label=str(action),
            what=node.method,
            kind="compute" if time_us else None,
            needs=(
                Need(f"enqueued {node.id}"),
                *(Need(f"arrived {each.id} at {self._actor}") for each in arrived),
                *over,
            ),
            fact=f"computed {node.id}",
            device=Kernels(self._plan.devices[self._actor], time_us) if time_us else None,
        )

    def _post(self, action: Action, channel: ChannelSpec) -> Step:
        """The reader's memory may be in use by what was enqueued before."""
        needs = (Need(host_enqueued(action, self._actor)), *self._computed_so_far())
        return Step(str(action), needs=needs, transfer=channel)

    def _meet(self, spec: CollectiveSpec) -> Step:
        """What it brings is there when all is computed that was enqueued before."""
        brought = [need for value in spec.inputs_of(self._actor) for need in self._made(value)]
        needs = (*all_started(spec), *self._computed_so_far(), *brought)
        return Step(f"{Verb.COLL} {spec.id}", needs=needs, collective=spec, then=(Need(f"over {spec.id}"),))

    def _computed_so_far(self) -> tuple[Need, ...]:
        """All that the actor's host has enqueued until now."""
        return (Need(f"computed {self._last_run}"),) if self._last_run else ()

    def _push(self, action: Action, channel: ChannelSpec) -> Iterator[Step]:
        arrived = [f"arrived {channel.id} at {reader}" for reader in channel.readers]
        for reader in channel.readers:
            free = Need(f"let go {channel.value} by {reader}", -channel.slots)
            yield Step(
                label=str(action),
                what=f"{channel.writer} -> {reader}",
                kind="communicate",
                needs=(Need(f"written {channel.id}"), *self._made(channel.value), free, *self._turn(channel, reader)),
                fact=arrived[0] if len(arrived) == 1 else "",
                device=push_of(self._plan, self._workload, channel, reader),
            )
        for fact in arrived if len(arrived) > 1 else ():
            yield Step(str(action), fact=fact)

    def _turn(self, channel: ChannelSpec, reader: str) -> tuple[Need, ...]:
        """The arrival of the value that comes before, if it was enqueued before."""
        before = self._before.get((channel.id, reader))
        if before is None:
            return ()
        values = (channel.value, self._plan.channel[before].value)
        if min(map(self._workload.size_bytes, values)) < LARGE_BYTES:
            return ()
        return (Need(f"arrived {before} at {reader}", only_if=(f"written {before}", f"written {channel.id}")),)

    def _bring_up(self, action: Action, channel: ChannelSpec) -> Step:
        time_us = self._costs.up_time_us(self._workload.size_bytes(channel.value))
        return Step(
            label=str(action),
            what=f"{channel.writer} -> {', '.join(channel.readers)}",
            kind="communicate",
            needs=(Need(host_enqueued(action, self._actor)), *self._made(channel.value)),
            fact="" if channel.transport is Transport.TCP else f"written {channel.id}",
            transfer=channel if channel.transport is Transport.TCP else None,
            device=Kernels((), time_us),
        )

    def _bring_down(self, action: Action, channel: ChannelSpec) -> Step:
        return Step(
            label=str(action),
            what=f"{channel.writer} -> {self._actor}",
            kind="communicate",
            needs=(Need(host_enqueued(action, self._actor)),),
            fact=f"arrived {channel.id} at {self._actor}",
            device=Kernels((), self._costs.down_time_us(self._workload.size_bytes(channel.value))),
        )

    def _made(self, value: str) -> tuple[Need, ...]:
        """When a value that leaves is there: its kernels have run, its collective is over, or it has come itself."""
        node = self._plan.maker.get(value)
        if node is not None and node.actor == self._actor:
            return (Need(f"computed {node.id}"),)
        collective = self._plan.collective_of.get((value, self._actor))
        if collective is not None:
            return (Need(f"over {collective.id}"),)
        channel = self._arriving.get(value)
        return (Need(f"arrived {channel.id} at {self._actor}"),) if channel is not None else ()
