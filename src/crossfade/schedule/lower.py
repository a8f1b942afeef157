"""Pass 1: nodes become actions. Values and nodes get their ids, arguments their holes.

The order of the nodes is the order in which the user bound them. It is topological, and all actors keep to it, which is why no plan
can deadlock: execution and position in this order, compared first by execution, grow along every wait of the plan (PL-2).
"""

from __future__ import annotations

from typing import Any

from crossfade.errors import GraphError
from crossfade.graph.arguments import snapshot
from crossfade.graph.check import CheckedGraph
from crossfade.graph.collectives import CollectiveNode
from crossfade.graph.communicators import Communicator
from crossfade.graph.members import check_collective
from crossfade.graph.nodes import InputNode, InputPart, MethodNode, Node
from crossfade.plan.actions import Action, Verb
from crossfade.plan.call import Call, Hole
from crossfade.plan.plan import CollectiveSpec, InputSpec, NodeSpec
from crossfade.schedule.draft import Draft
from crossfade.schedule.transports import Gpus, Wish, transport_of_collective
from crossfade.types import DRIVER, TargetDevice, Transport


def lower(graph: CheckedGraph, gpus: Gpus, *, max_inflight: int) -> Draft:
    """One ``run`` for each node, in order, on its actor, and one ``coll`` for each collective on each of its actors."""
    draft = Draft(
        max_inflight=max_inflight, returns_list=graph.returns_list, devices=dict(graph.devices), hosts=dict(gpus.hosts)
    )
    draft.programs[DRIVER] = []
    value_of: dict[Node, str] = {}
    for index, part in enumerate(graph.input_parts):
        _add_input(draft, value_of, f"i{index}", part)
    for node in graph.steps:
        if isinstance(node, CollectiveNode):
            _add_collective(draft, value_of, f"c{len(draft.collectives)}", node, gpus)
        else:
            _add_node(draft, value_of, f"n{len(draft.nodes)}", node)
    draft.outputs = tuple(value_of[node] for node in graph.outputs)
    return draft


def _add_input(draft: Draft, value_of: dict[Node, str], value: str, part: InputNode | InputPart) -> None:
    value_of[part] = value
    draft.inputs.append(InputSpec(value, part._key))
    draft.maker[value] = DRIVER
    _add_wishes(draft, value, *([part.parent, part] if isinstance(part, InputPart) else [part]))


def _add_node(draft: Draft, value_of: dict[Node, str], node_id: str, node: MethodNode) -> None:
    actor = node.actor.id
    outputs = tuple([f"{node_id}.{output.index}" for output in node.outputs]) or (node_id,)
    for value, output in zip(outputs, node.outputs or (node,), strict=True):
        value_of[output] = value
        draft.maker[value] = actor
        _add_wishes(draft, value, node, output)
    inputs = tuple([value_of[source] for source in node.inputs])
    holes = {source: Hole(index) for index, source in enumerate(node.inputs)}

    def of_leaf(leaf: Any) -> Any:
        return holes[leaf] if isinstance(leaf, Node) else leaf

    draft.nodes.append(NodeSpec(node_id, actor, node.method, inputs, outputs))
    draft.calls[node_id] = Call(snapshot(node.args, of_leaf), snapshot(node.kwargs, of_leaf))
    draft.programs.setdefault(actor, []).append(Action(Verb.RUN, node_id))


def _add_collective(
    draft: Draft, value_of: dict[Node, str], collective_id: str, node: CollectiveNode, gpus: Gpus
) -> None:
    parties = tuple(actor.id for actor in node.parties)
    outputs: list[tuple[str, ...]] = []
    for rank, party in enumerate(parties):
        mine = node.outputs_at(rank)
        for output in mine:
            value = f"{collective_id}.{rank}" if len(mine) == 1 else f"{collective_id}.{rank}.{output.index}"
            value_of[output] = value
            draft.maker[value] = party
            _add_wishes(draft, value, output)
        outputs.append(tuple(value_of[output] for output in mine))
        draft.programs.setdefault(party, []).append(Action(Verb.COLL, collective_id))
    inputs = tuple(tuple(value_of[source] for source in members) for members in node.members)
    communicator = ""
    if isinstance(node._transport, Communicator):
        check_collective(node._transport, node.kind, parties)
        if gpus.are_apart(parties) and not gpus.is_described:
            raise GraphError(
                f"a collective asks for a communicator, and its actors are on several hosts: {', '.join(parties)}",
                hint="leave the transport out, or place them on one node",
            )
        communicator, transport = draft.enter(node._transport).id, Transport.COMMUNICATOR
    else:
        transport = transport_of_collective(node._transport, parties, gpus)
    what = node.kind, node.op, node.root
    draft.collectives.append(
        CollectiveSpec(collective_id, *what, transport, parties, inputs, tuple(outputs), communicator)
    )


def _add_wishes(draft: Draft, value: str, *nodes: Node) -> None:
    """How the value should move: what the last of the nodes asks for, else what the one before does."""
    transport: str | Communicator = Transport.AUTO
    device = default = TargetDevice.DEFAULT
    for node in nodes:
        transport = transport if node._transport == "auto" else node._transport
        device = device if node._target_device is default else node._target_device
    draft.wishes[value] = _wish(draft, nodes[-1], transport, device)
    if any([node._static_shape for node in nodes]):
        draft.static.append(value)
    for node in nodes:
        for reader, asked in node._transport_to.items():
            device = node._target_device_to.get(reader, TargetDevice.DEFAULT)
            draft.wishes_to[value, reader] = _wish(draft, node, asked, device)


def _wish(draft: Draft, node: Node, asked: str | Communicator, device: TargetDevice) -> Wish:
    if isinstance(asked, str):
        return Wish(node, asked, device)
    if isinstance(node, InputNode | InputPart):
        return Wish(node, Transport.AUTO, device)  # the driver is in no group; its values go by shm
    return Wish(node, Transport.COMMUNICATOR, device, draft.enter(asked))
