"""A schedule's order as a plan: a node for each pass, channels where values go from rank to rank.

``F1.3`` is the forward pass of microbatch 3 in stage 1, and the activations that come out of it; ``B1.3`` its backward pass and the
gradients; ``I1.3`` and ``W1.3`` where it comes in two parts. Over shared memory and TCP, a rank reads a value right before the pass
that needs it, and writes what a pass made right behind it. Over all else values are sent and received where torch does it, into
memory that the receiving rank gives.

``go`` starts the first stage, and each rank's last pass is an output of the plan, so that a step is over when all ranks have done
theirs.
"""

from __future__ import annotations

from collections.abc import Mapping

from crossfade.errors import PlanError
from crossfade.pipelines.orders import Kind, Order, Pass, Receive, Send, passes_of
from crossfade.plan.actions import MAIN, RECV_STREAM, SEND_STREAM, Action, Verb
from crossfade.plan.plan import ChannelSpec, InputSpec, NodeSpec, Plan
from crossfade.types import DRIVER, Transport

GO = "go"
"""The id of the plan's input."""


def id_of(each: Pass) -> str:
    """A pass as plans write it."""
    return f"{each.kind}{each.stage}.{each.microbatch}"


def method_of(kind: Kind, stage: int) -> str:
    """The method that a pass is in the plan, such as ``forward_0``: one for all microbatches."""
    return f"{kind.name.lower()}_{stage}"


def rank_name(rank: int) -> str:
    """The name of a rank's actor."""
    return f"rank{rank}"


def plan_of(
    order: Order, transport: Transport, gpus: Mapping[int, int] | None = None, hosts: Mapping[str, str] | None = None
) -> Plan:
    """Returns the plan of one training step, with the index of each rank's GPU, where they have some, and the host of each party,
    where there are several: between them values go by NCCL where ranks have GPUs, else by TCP. Raises a `PlanError`, if the
    order cannot be carried out: each rank waits for another.
    """
    return _Lowering(order, transport, gpus or {}, hosts or {}).plan()


class _Lowering:
    def __init__(self, order: Order, transport: Transport, gpus: Mapping[int, int], hosts: Mapping[str, str]) -> None:
        self._order, self._passes = order, passes_of(order)
        self._transport, self._gpus, self._hosts = transport, gpus, hosts
        self._rank = {each: rank for rank, passes in self._passes.items() for each in passes}
        self._reader = self._readers()
        self._programs: dict[str, list[Action]] = {rank_name(rank): [] for rank in sorted(order)}
        self._first_stage = {rank for rank, passes in self._passes.items() if any(each.stage == 0 for each in passes)}

    def plan(self) -> Plan:
        nodes = tuple(map(self._node, self._in_turn()))
        for rank in self._first_stage:
            self._do(rank, Verb.READ, GO)
        for rank, steps in self._order.items():
            for step in steps:
                self._take(rank, step)
        for rank in self._first_stage:
            self._do(rank, Verb.FREE, GO)
        last = [id_of(passes[-1]) for _, passes in sorted(self._passes.items()) if passes]
        ranks = [rank for rank, passes in sorted(self._passes.items()) if passes]
        outputs = [self._output_channel(value, rank_name(rank)) for value, rank in zip(last, ranks, strict=True)]
        for channel in outputs:
            self._programs[channel.writer].append(Action(Verb.WRITE, channel.id))
        driver = [Action(Verb.WRITE, GO)]
        for channel in outputs:
            driver += [Action(Verb.READ, channel.id), Action(Verb.FREE, channel.value)]
        readers = tuple(rank_name(rank) for rank in sorted(self._first_stage))
        start = ChannelSpec(GO, GO, DRIVER, readers, Transport.SHM, 1)
        return Plan(
            inputs=(InputSpec(GO, "go"),),
            nodes=nodes,
            channels=(start, *(self._channel(each) for each in self._reader), *outputs),
            programs={DRIVER: tuple(driver), **{name: tuple(actions) for name, actions in self._programs.items()}},
            outputs=tuple(last),
            returns_list=len(last) > 1,
            max_inflight=1,
            devices={rank_name(rank): (gpu,) for rank, gpu in sorted(self._gpus.items())},
            hosts=dict(self._hosts),
        )

    def _in_turn(self) -> list[Pass]:
        """All passes, as they are done when every rank does its next one in turn, if what it needs has been made."""
        places, done = dict.fromkeys(sorted(self._passes), 0), dict[Pass, None]()
        waiting: dict[Pass, list[int]] = {}
        moving = set(places)  # ranks that may be able to do their next pass
        while moving:
            doable: list[int] = []
            for rank in sorted(moving):
                needs = self._needs(self._passes[rank][places[rank]]) if places[rank] < len(self._passes[rank]) else []
                missing = next((need for need in needs if need not in done), None)
                if missing is not None:
                    waiting.setdefault(missing, []).append(rank)
                elif places[rank] < len(self._passes[rank]):
                    doable.append(rank)
            moving = set(doable)
            for rank in doable:
                each = self._passes[rank][places[rank]]
                done[each] = None
                places[rank] += 1
                moving.update(waiting.pop(each, ()))
        stuck = [id_of(self._passes[rank][place]) for rank, place in places.items() if place < len(self._passes[rank])]
        if stuck:
            raise PlanError(
                f"PL-2: the schedule stops before {', '.join(stuck)}, each of which waits for another",
                hint="this is a bug of the schedule; take another one",
            )
        return list(done)

    def _needs(self, each: Pass) -> list[Pass]:
        """The passes whose results it takes, its own stage's first."""
        if each.kind is Kind.FORWARD:
            before = Pass(Kind.FORWARD, each.stage - 1, each.microbatch)
            return [before] if each.stage else []
        if each.kind is Kind.BACKWARD_WEIGHT:
            return [Pass(Kind.BACKWARD_INPUT, each.stage, each.microbatch)]
        own = Pass(Kind.FORWARD, each.stage, each.microbatch)
        later = [Pass(kind, each.stage + 1, each.microbatch) for kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT)]
        return [own, *(later_pass for later_pass in later if later_pass in self._rank)]

    def _readers(self) -> dict[Pass, int]:
        """The rank that reads what a pass makes, where it is another one."""
        return {
            need: rank
            for rank, passes in sorted(self._passes.items())
            for each in passes
            for need in self._needs(each)
            if self._rank[need] != rank
        }

    def _node(self, each: Pass) -> NodeSpec:
        inputs = tuple(map(id_of, self._needs(each))) or (GO,)
        value = id_of(each)
        return NodeSpec(value, rank_name(self._rank[each]), method_of(each.kind, each.stage), inputs, (value,))

    def _take(self, rank: int, step: Pass | Send | Receive) -> None:
        if isinstance(step, Pass):
            self._run(rank, step)
        elif not self._channel(step.made_by).is_ordered:
            return  # it is written and read beside the passes
        elif isinstance(step, Receive):
            self._do(rank, Verb.RECV, id_of(step.made_by), RECV_STREAM)
        else:
            self._do(rank, Verb.SEND, id_of(step.made_by), MAIN if step.is_awaited else SEND_STREAM)

    def _run(self, rank: int, each: Pass) -> None:
        received = [need for need in self._needs(each) if self._rank[need] != rank]
        for need in received:
            if not self._channel(need).is_ordered:
                self._do(rank, Verb.READ, id_of(need))
        self._do(rank, Verb.RUN, id_of(each))
        if each in self._reader and not self._channel(each).is_ordered:
            self._do(rank, Verb.WRITE, id_of(each))
        for need in received:
            self._do(rank, Verb.FREE, id_of(need))

    def _do(self, rank: int, verb: Verb, target: str, stream: str = MAIN) -> None:
        self._programs[rank_name(rank)].append(Action(verb, target, stream))

    def _channel(self, each: Pass) -> ChannelSpec:
        value, writer, reader = id_of(each), rank_name(self._rank[each]), rank_name(self._reader[each])
        transport = self._transport
        if self._hosts.get(writer) != self._hosts.get(reader):
            transport = Transport.NCCL if self._gpus else Transport.TCP
        is_posted = transport not in (Transport.SHM, Transport.TCP)
        return ChannelSpec(value, value, writer, (reader,), transport, 1, is_posted=is_posted)

    def _output_channel(self, value: str, writer: str) -> ChannelSpec:
        """What tells the driver that a rank is done; it stands for nothing that moves in a training step."""
        return ChannelSpec(f"{value}~shm", value, writer, (DRIVER,), Transport.SHM, 1)
