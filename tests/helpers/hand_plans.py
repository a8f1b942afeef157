"""Plans that are written by hand, action by action."""

from __future__ import annotations

from collections.abc import Mapping

from crossfade.plan.actions import MAIN, Action, Verb
from crossfade.plan.plan import ChannelSpec, InputSpec, NodeSpec, Plan
from crossfade.types import Transport


def actions(text: str) -> tuple[Action, ...]:
    """``run n0; send n0 @send; recv n1 @recv +1`` as actions."""
    found = []
    for part in text.split(";"):
        verb, target, *more = part.split()
        stream = next((word[1:] for word in more if word[0] == "@"), MAIN)
        ahead = next((int(word) for word in more if word[0] == "+"), 0)
        found.append(Action(Verb(verb), target, stream, ahead))
    return tuple(found)


def node(name: str, where: str, inputs: str) -> NodeSpec:
    actor, method = where.split(".")
    return NodeSpec(name, actor, method, tuple(inputs.split()), (name,))


def plan(
    nodes: Mapping[str, tuple[str, str]],
    channels: Mapping[str, tuple[str, str, str, int]],
    programs: Mapping[str, str],
    outputs: tuple[str, ...],
    max_inflight: int = 4,
) -> Plan:
    """A plan from ``node: (actor.method, inputs)``, ``channel: (writer, readers, transport, depth)`` and programs."""
    return Plan(
        inputs=(InputSpec("i0", "*"),),
        nodes=tuple(node(name, where, inputs) for name, (where, inputs) in nodes.items()),
        channels=tuple(
            ChannelSpec(name, name, writer, tuple(readers.split()), Transport(transport), depth)
            for name, (writer, readers, transport, depth) in channels.items()
        ),
        programs={actor: actions(text) for actor, text in programs.items()},
        outputs=outputs,
        returns_list=len(outputs) > 1,
        max_inflight=max_inflight,
    )


def chain(depth: int = 4) -> Plan:
    """driver -> A.f -> B.g -> driver."""
    return plan(
        {"n0": ("A.f", "i0"), "n1": ("B.g", "n0")},
        {"i0": ("driver", "A", "shm", depth), "n0": ("A", "B", "shm", depth), "n1": ("B", "driver", "shm", depth)},
        {
            "driver": "write i0; read n1; free n1",
            "A": "read i0; run n0; free i0; write n0",
            "B": "read n0; run n1; free n0; write n1",
        },
        ("n1",),
    )


def fan_in(receiver: str, depth: int = 2) -> Plan:
    """Three senders that make a value each, by gloo to one receiver, which works on each of them."""
    senders = ("S0", "S1", "S2")
    nodes = {f"n{number}": (f"{sender}.make", "i0") for number, sender in enumerate(senders)}
    nodes |= {f"n{number + 3}": ("R.work", f"n{number}") for number in range(3)}
    channels = {f"n{number}": (sender, "R", "gloo", depth) for number, sender in enumerate(senders)}
    programs = {"driver": "write i0; read n5; free n5"}
    for number, sender in enumerate(senders):
        programs[sender] = f"read i0; run n{number}; free i0; send n{number} @send"
    return plan(
        nodes,
        {"i0": ("driver", "S0 S1 S2", "shm", depth), **channels, "n5": ("R", "driver", "shm", depth)},
        {**programs, "R": receiver},
        ("n5",),
        max_inflight=2,
    )


def two_sends(stream: str) -> Plan:
    """A sends two values to B, which receives both before it works on them."""
    return plan(
        {"n0": ("A.f", "i0"), "n1": ("A.f", "i0"), "n2": ("B.g", "n0 n1")},
        {
            "i0": ("driver", "A", "shm", 2),
            "n0": ("A", "B", "gloo", 2),
            "n1": ("A", "B", "gloo", 2),
            "n2": ("B", "driver", "shm", 2),
        },
        {
            "driver": "write i0; read n2; free n2",
            "A": f"read i0; run n0; send n0 {stream}; run n1; send n1 {stream}; free i0",
            "B": "recv n0 @recv; recv n1 @recv; run n2; free n0; free n1; write n2",
        },
        ("n2",),
    )


def side_by_side(num_actors: int) -> Plan:
    """One input to several actors, which give an output each."""
    actors = [f"A{number}" for number in range(num_actors)]
    outputs = tuple(f"n{number}" for number in range(num_actors))
    return plan(
        {name: (f"{actor}.f", "i0") for name, actor in zip(outputs, actors, strict=True)},
        {
            "i0": ("driver", " ".join(actors), "shm", 1),
            **{name: (actor, "driver", "shm", 1) for name, actor in zip(outputs, actors, strict=True)},
        },
        {
            "driver": "write i0;" + ";".join(f"read {name}; free {name}" for name in outputs),
            **{
                actor: f"read i0; run {name}; free i0; write {name}"
                for name, actor in zip(outputs, actors, strict=True)
            },
        },
        outputs,
    )
