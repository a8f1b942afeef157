"""What a plan's actions wait for, cost and bring about, as data for the simulator.

Each party becomes one or two *strands*: lists of steps that are gone through in order, once per round. A step waits for
its needs, works, brings about a fact, and may wait again (a send or receive on ``main``, for its transfer). A *fact* is
something that becomes true once per execution: ``written n0``, ``freed n0 by A``, ``arrived n0 at A``, ``over c0``; what goes to
another host is there when it has ``reached node1 as n0``. With a
collective between GPUs a host continues as soon as all have started it (``started c0``), and only streams wait for its end.

An actor with GPUs has a strand more for each stream of theirs that the plan uses (`schedule.device_steps`); its host only enqueues.

The driver has several strands, all on one thread: one submits inputs, and each output has its own, since it is taken as soon as it
has arrived. With m executions in flight, submitting e starts once all outputs of e - m are taken, and taking outputs of e starts
once e is submitted.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain

from crossfade.errors import PlanError
from crossfade.plan.actions import MAIN, Action, Verb
from crossfade.plan.plan import ChannelSpec, CollectiveSpec, Plan
from crossfade.plan.turns import predecessors
from crossfade.schedule.collective_costs import is_on_gpus
from crossfade.schedule.cost import CostModel
from crossfade.schedule.device_steps import (
    Before,
    all_started,
    comes_down,
    device_steps,
    goes_up,
    holds,
    host_enqueued,
    is_posted_on_gpus,
    is_pushed,
)
from crossfade.schedule.network import Hosts
from crossfade.schedule.strands import Need, Step, Strand
from crossfade.schedule.workload import Workload
from crossfade.types import DRIVER, Transport

GET_STREAM = "get"
"""The stream on which a predicted timeline shows the driver getting outputs."""
NETWORK_STREAM = "network"
"""The stream on which it shows what a party has on its way to other hosts."""


def reached(channel: ChannelSpec, host: str) -> str:
    """The fact that a value has come to another host."""
    return f"reached {host} as {channel.id}"


def strands_of(plan: Plan, workload: Workload, costs: CostModel, inflight: int, hosts: Hosts) -> list[Strand]:
    """The strands of every party, in the order of ``plan.programs``."""
    strands = []
    before = predecessors(plan)
    for actor, actions in plan.programs.items():
        maker = _StepMaker(plan, workload, costs, actor, before, hosts)
        if actor == DRIVER:
            strands += _driver_strands(maker, actions, inflight)
        else:
            strands.append(_strand(actor, MAIN, [maker.step(action) for action in actions]))
            for (stream, which), steps in device_steps(plan, workload, costs, actor, before).items():
                strands.append(Strand(actor, stream, steps, thread=f"{actor}'s {stream}{which}"))
    return strands


def _strand(actor: str, stream: str, steps: list[Step]) -> Strand:
    return Strand(actor, stream, tuple(steps), -max((step.ahead for step in steps), default=0), actor)


def _driver_strands(maker: _StepMaker, actions: tuple[Action, ...], inflight: int) -> list[Strand]:
    submit = [Step("submit", needs=(Need("got", -inflight),))]
    gets: dict[str, list[Step]] = {}
    for action in actions:
        value = maker.received_by(action)
        if value is None:
            submit.append(maker.step(action))
        else:
            gets.setdefault(value, [Step("get", needs=(Need("submitted"),))]).append(maker.step(action))
    submit.append(Step("submitted", fact="submitted"))
    for value, steps in gets.items():
        steps.append(Step("got", fact="got" if len(gets) == 1 else f"got {value}"))
    strands = [_strand(DRIVER, GET_STREAM, steps) for steps in gets.values()]
    if len(gets) != 1:
        strands.append(
            _strand(DRIVER, GET_STREAM, [Step("got", needs=tuple(Need(f"got {v}") for v in gets), fact="got")])
        )
    return [_strand(DRIVER, MAIN, submit), *strands]


class _StepMaker:
    """Turns the actions of one actor into steps."""

    def __init__(
        self, plan: Plan, workload: Workload, costs: CostModel, actor: str, before: Before, hosts: Hosts
    ) -> None:
        self._before, self._hosts = before, hosts
        self._plan, self._workload, self._costs, self._actor = plan, workload, costs, actor
        mine = [self._channel(action) for action in plan.programs[actor] if action.verb in (Verb.READ, Verb.RECV)]
        self._received = {channel.value for channel in mine}
        # what using a value needs, where gloo or a collective brings it: others are there by program order, or streams wait.
        self._used: dict[str, tuple[Need, ...]] = {
            channel.value: (Need(f"arrived {channel.id} at {actor}"),)
            for channel in mine
            if channel.is_ordered and not is_pushed(plan, channel)
        }
        for action in plan.programs[actor]:
            if action.verb is Verb.COLL and action.stream != MAIN:
                collective = self._collective(action)
                self._used |= dict.fromkeys(collective.outputs_of(actor), self._met(collective))
        self._makers: dict[Verb, Callable[[Action], Step]] = {
            Verb.RUN: self._run,
            Verb.WRITE: self._write,
            Verb.READ: self._read,
            Verb.SEND: self._send,
            Verb.RECV: self._recv,
            Verb.COLL: self._coll,
            Verb.FREE: self._free,
        }

    def step(self, action: Action) -> Step:
        return self._makers[action.verb](action)

    def received_by(self, action: Action) -> str | None:
        """Returns the value that the action takes from a channel, or that it uses after another action has taken it."""
        value = action.target if action.verb is Verb.FREE else self._channel(action).value
        return value if value in self._received else None

    def _channel(self, action: Action) -> ChannelSpec:
        try:
            return self._plan.channel[action.target]
        except KeyError:
            raise self._unknown(action, "channel") from None

    def _collective(self, action: Action) -> CollectiveSpec:
        try:
            return self._plan.collective[action.target]
        except KeyError:
            raise self._unknown(action, "collective") from None

    def _unknown(self, action: Action, what: str) -> PlanError:
        return PlanError(
            f"PL-1: {self._actor} has the action {str(action)!r}, but the plan has no {what} {action.target!r}",
            hint="crossfade.plan.validate.validate(plan) shows the step in the plan's grid",
        )

    def _arrived(self, *values: str) -> tuple[Need, ...]:
        """What using values needs, each need once."""
        used = [self._used[value] for value in values if value in self._used]
        return tuple(dict.fromkeys(chain.from_iterable(used))) if used else ()

    def _met(self, collective: CollectiveSpec) -> tuple[Need, ...]:
        """When this host may use the outputs."""
        if is_on_gpus(self._plan, collective):
            return all_started(collective)
        return (Need(f"over {collective.id}"),)

    def _is_free(self, channel: ChannelSpec, reader: str) -> Need:
        is_hop, latency_us = reader != self._actor, self._hosts.latency_us(self._actor, reader)
        return Need(f"freed {channel.value} by {reader}", -channel.credit, is_hop=is_hop, latency_us=latency_us)

    def _size_bytes(self, channel: ChannelSpec) -> int:
        return self._workload.size_bytes(channel.value)

    def _run(self, action: Action) -> Step:
        node = self._plan.node.get(action.target)
        if node is None:
            raise self._unknown(action, "node")
        work_us = self._costs.step_us + self._workload.time_us(node)
        has_gpus = self._actor in self._plan.devices
        return Step(
            label=str(action),
            what=node.method,
            ahead=action.ahead,
            kind="compute",
            needs=self._arrived(*node.inputs),
            work_us=work_us,
            fact=f"enqueued {node.id}" if has_gpus else "",
            then=(Need(f"computed {node.id}"),) if has_gpus and self._workload.is_synchronous(node) else (),
        )

    def _write(self, action: Action) -> Step:
        channel = self._channel(action)
        needs = self._arrived(channel.value) + tuple(self._is_free(channel, reader) for reader in channel.readers)
        if is_pushed(self._plan, channel):
            needs += holds(self._plan, self._workload, self._costs, channel, self._before)
            work_us = self._costs.write_us + self._costs.push_host_us * len(channel.readers)
        elif goes_up(self._plan, self._workload, channel):
            work_us = self._costs.write_us + self._costs.push_host_us
            return self._move(action, needs, work_us, fact=host_enqueued(action, self._actor))
        else:
            size_bytes = self._size_bytes(channel)
            work_us = self._costs.write_time_us(size_bytes)
            if channel.transport is Transport.TCP:
                return self._move(action, needs, work_us + self._costs.tcp_time_us(size_bytes))
        return self._move(action, needs, work_us, fact=f"written {channel.id}")

    def _read(self, action: Action) -> Step:
        channel = self._channel(action)
        is_far = channel.transport is Transport.TCP
        fact = reached(channel, self._hosts.of.get(self._actor, "")) if is_far else f"written {channel.id}"
        needs = (Need(fact, is_hop=True),)
        if is_pushed(self._plan, channel):
            return self._move(action, needs, self._costs.read_us + self._costs.accept_host_us)
        if comes_down(self._plan, self._workload, channel, self._actor):
            work_us = self._costs.read_us + self._costs.accept_host_us
            return self._move(action, needs, work_us, fact=host_enqueued(action, self._actor))
        size_bytes = self._size_bytes(channel)
        far_us = self._costs.tcp_time_us(size_bytes) if is_far else 0.0
        return self._move(action, needs, self._costs.read_time_us(size_bytes) + far_us)

    def _send(self, action: Action) -> Step:
        channel = self._channel(action)
        arrived = [f"arrived {channel.id} at {reader}" for reader in channel.readers]
        needs = self._arrived(channel.value) + tuple(Need(fact, -channel.depth) for fact in arrived)
        if is_pushed(self._plan, channel):  # the push stream does the rest
            work_us, fact = self._costs.push_host_us * len(channel.readers), f"enqueued {channel.id}"
            then = () if channel.is_posted else tuple(map(Need, arrived))
            return self._move(action, needs, work_us, fact, then)
        return self._move(action, needs, self._costs.host_us, then=tuple(map(Need, arrived)))

    def _recv(self, action: Action) -> Step:
        channel = self._channel(action)
        arrived = Need(f"arrived {channel.id} at {self._actor}")
        needs = (self._is_free(channel, self._actor),)
        if is_posted_on_gpus(self._plan, channel):  # the stream on which it arrives does the rest
            return self._move(action, needs, self._costs.accept_host_us, fact=host_enqueued(action, self._actor))
        return self._move(action, needs, self._costs.receive_host_us, then=(arrived,))

    def _coll(self, action: Action) -> Step:
        collective = self._collective(action)
        is_enqueued = is_on_gpus(self._plan, collective)
        return Step(
            label=str(action),
            what=str(collective.kind),
            kind="communicate",
            needs=self._arrived(*collective.inputs_of(self._actor)),
            work_us=self._costs.step_us + (self._costs.collective_host_us if is_enqueued else 0.0),
            collective=collective,
            is_only_started=is_enqueued,
            then=self._met(collective) if action.stream == MAIN else (),
        )

    def _free(self, action: Action) -> Step:
        received = action.target in self._received
        fact = f"freed {action.target} by {self._actor}" if received else ""
        needs = self._arrived(action.target)
        return Step(str(action), ahead=action.ahead, needs=needs, work_us=self._costs.step_us, fact=fact)

    def _move(
        self, action: Action, needs: tuple[Need, ...], work_us: float, fact: str = "", then: tuple[Need, ...] = ()
    ) -> Step:
        channel = self._channel(action)
        return Step(
            label=str(action),
            what=f"{channel.writer} -> {', '.join(channel.readers)}",
            ahead=action.ahead,
            kind="communicate",
            needs=needs,
            work_us=self._costs.step_us + work_us,
            fact=fact,
            transfer=channel if self._starts_transfer(action, channel) else None,
            then=then if action.stream == MAIN else (),
        )

    def _starts_transfer(self, action: Action, channel: ChannelSpec) -> bool:
        if channel.transport is Transport.TCP:  # what a GPU makes leaves when it has come up
            return action.verb is Verb.WRITE and not goes_up(self._plan, self._workload, channel)
        if action.verb is Verb.RECV:
            return not is_posted_on_gpus(self._plan, channel)
        return action.verb is Verb.SEND and not is_pushed(self._plan, channel)
