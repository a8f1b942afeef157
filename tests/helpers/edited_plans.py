"""Plans that nobody compiled: as text, to be edited, with the verdict of a machine that tries all orders; written by hand; and
arbitrary ones that only have to print.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from random import Random

from crossfade.plan.actions import MAIN, RECV_STREAM, SEND_STREAM, Action, Verb
from crossfade.plan.parse import parse_plan
from crossfade.plan.plan import ChannelSpec, CollectiveSpec, InputSpec, NodeSpec, Plan
from crossfade.plan.validate import find_fault
from crossfade.types import DRIVER, CollectiveKind, ReduceOp, TargetDevice, Transport
from tests.helpers.explore import explore

CHAIN = """
plan max_inflight=2 returns=value
input i0 = *
node n0 = A.make(i0) -> n0
node n1 = B.take(n0) -> n1
channel i0: driver -> A | shm depth=2 buffer_bytes=0
channel n0: A -> B | gloo depth=2 buffer_bytes=0
channel n1: B -> driver | shm depth=2 buffer_bytes=0
output n1
driver | write i0 | read n1 | free n1
A | read i0 | run n0 | send n0 @send | free i0
B | recv n0 @recv | run n1 | write n1 | free n0
"""
PAIR = """
plan max_inflight=2 returns=list
node n0 = A.make() -> n0
node n1 = B.make() -> n1
node n2 = A.take(n1) -> n2
node n3 = B.take(n0) -> n3
channel n0: A -> B | shm depth=2 buffer_bytes=0
channel n1: B -> A | shm depth=2 buffer_bytes=0
channel n2: A -> driver | shm depth=1 buffer_bytes=0
channel n3: B -> driver | shm depth=1 buffer_bytes=0
output n2
output n3
driver | read n2 | free n2 | read n3 | free n3
A | run n0 | write n0 | read n1 | run n2 | free n1 | write n2
B | run n1 | write n1 | read n0 | run n3 | free n0 | write n3
"""
QUEUE = """
plan max_inflight=2 returns=value
node n0 = A.make() -> n0
node n1 = A.make() -> n1
node n2 = B.take(n0, n1) -> n2
channel n0: A -> B | gloo depth=2 buffer_bytes=0
channel n1: A -> B | gloo depth=2 buffer_bytes=0
channel n2: B -> driver | shm depth=1 buffer_bytes=0
output n2
driver | read n2 | free n2
A | run n0 | send n0 @send | run n1 | send n1 @send
B | recv n0 @recv | recv n1 @recv | run n2 | free n0 | free n1 | write n2
"""
TOGETHER = """
plan max_inflight=2 returns=list
input i0 = *
node n0 = A.make(i0) -> n0
node n1 = B.make(i0) -> n1
node n2 = A.work(i0) -> n2
collective c0 = allreduce(sum) over gloo: A(n0) -> c0.0; B(n1) -> c0.1
collective c1 = allgather() over gloo: B(n1) -> c1.0; A(n0) -> c1.1
channel i0: driver -> A, B | shm depth=2 buffer_bytes=0
channel c0.0: A -> driver | shm depth=2 buffer_bytes=0
channel c1.0: B -> driver | shm depth=2 buffer_bytes=0
output c0.0
output c1.0
driver | write i0 | read c0.0 | free c0.0 | read c1.0 | free c1.0
A | read i0 | run n0 | coll c0 @coll | run n2 | free i0 | write c0.0 | coll c1
B | read i0 | run n1 | free i0 | coll c0 | coll c1 @coll | free n1 | write c1.0
"""


def edited(text: str, *edits: tuple[str, str]) -> Plan:
    for old, new in edits:
        assert text.count(old) == 1, f"{old!r} is there {text.count(old)} times"
        text = text.replace(old, new)
    return parse_plan(text)


def verdict(plan: Plan) -> tuple[str, str] | None:
    """(invariant, 'actor: step') of the fault, or None; what the machine does must agree."""
    fault = find_fault(plan)
    explored = explore(plan)
    assert (fault is None) == (explored.verdict == "ok"), f"{fault} but {explored}"
    if fault is None:
        return None
    assert fault.index is not None
    return fault.invariant, f"{fault.actor}: {plan.programs[fault.actor][fault.index]}"


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


def any_plan(rng: Random) -> Plan:
    """Any values in all fields, sound or not, as far as the notation goes."""
    names = [DRIVER, "node", "plan", "Actor_1", "a-b", "output", "_", "Größe0", "कक्षा0"]
    ids = ["n0", "n1", "n2.0", "n10~gloo", "i0", "input", "run", "größe.0", "ア~é"]
    few = [rng.sample(ids, rng.randint(0, 3)) for _ in range(4)]
    actors = rng.sample(names, rng.randint(0, 5))
    return Plan(
        inputs=tuple(InputSpec(rng.choice(ids), _any_key(rng)) for _ in few[0]),
        nodes=tuple(
            NodeSpec(
                node,
                rng.choice(names),
                rng.choice(["größe", "विधि_1"]),
                tuple(few[2]),
                tuple(rng.sample(ids, rng.randint(0, 2))),
            )
            for node in few[1]
        ),
        channels=tuple(
            ChannelSpec(
                id=channel,
                value=rng.choice([channel, "n7"]),
                writer=rng.choice(names),
                readers=tuple(rng.sample(names, rng.randint(0, 3))),
                transport=rng.choice(list(Transport)),
                depth=rng.randint(-1, 9),
                buffer_bytes=rng.choice([0, 1, 10**6, 10**17]),
                device=rng.choice(list(TargetDevice)),
                slots=rng.choice([0, 2, 10**6, -1]),
                turn=rng.choice([0, 0, 1, 700]),
            )
            for channel in few[3]
        ),
        programs={actor: tuple(_any_action(rng, ids) for _ in range(rng.randint(0, 6))) for actor in actors},
        outputs=tuple(few[0]),
        returns_list=rng.random() < 0.5,
        max_inflight=rng.randint(-1, 1000),
        collectives=tuple(_any_collective(rng, names, ids) for _ in range(rng.randint(0, 2))),
        devices={name: rng.choice([(0,), (3, 1), (), (0, 1, 2, 77)]) for name in rng.sample(names, rng.randint(0, 2))},
    )


def _any_collective(rng: Random, names: list[str], ids: list[str]) -> CollectiveSpec:
    kind = rng.choice(list(CollectiveKind))
    parties = rng.sample(names, rng.randint(0, 3))
    return CollectiveSpec(
        id=rng.choice(ids),
        kind=kind,
        op=rng.choice(list(ReduceOp)) if kind.reduces else None,
        root=rng.randint(-1, 3) if kind is CollectiveKind.BROADCAST else 0,
        transport=rng.choice(list(Transport)),
        parties=tuple(parties),
        inputs=tuple(tuple(rng.sample(ids, rng.randint(0, 2))) for _ in parties),
        outputs=tuple(tuple(rng.sample(ids, rng.randint(0, 2))) for _ in parties),
    )


def _any_action(rng: Random, ids: list[str]) -> Action:
    stream = rng.choice([MAIN, MAIN, SEND_STREAM, RECV_STREAM, "other-1"])
    return Action(rng.choice(list(Verb)), rng.choice(ids), stream, rng.choice([0, 0, 1, 12, -1]))


def _any_key(rng: Random) -> str:
    words = ["x", 'a "quoted" | key', "] = * #\n\\", "\x85\u2028\ud800", "", "x" * 100]
    quoted = json.dumps(rng.choice(words), ensure_ascii=rng.random() < 0.5)
    return rng.choice(["*", "go", "[0]", "[-1]", ".name", ".ä", f"[{quoted}]"])
