"""Arbitrary plans, sound or not, that only have to print."""

from __future__ import annotations

import json
from random import Random

from crossfade.plan.actions import MAIN, RECV_STREAM, SEND_STREAM, Action, Verb
from crossfade.plan.plan import ChannelSpec, CollectiveSpec, InputSpec, NodeSpec, Plan
from crossfade.types import DRIVER, CollectiveKind, ReduceOp, TargetDevice, Transport


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
