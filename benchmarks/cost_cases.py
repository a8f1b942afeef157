"""The graphs that `benchmarks.cost_model` predicts and measures, and what they must give."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import crossfade

Array = np.ndarray[Any, np.dtype[np.float64]]

ROWS = 256
SMALL_BYTES = ROWS * ROWS * 8
WIDE_BYTES = 8_000_000
NUM_ARGUMENTS = 4
"""After so many executions the arguments repeat."""


def permutation(seed: int) -> Array:
    """A permutation matrix: products with it are exact, however they are summed."""
    order = np.random.default_rng(seed).permutation(ROWS)
    return np.eye(ROWS)[order]


def picture(seed: int) -> Array:
    return np.random.default_rng(seed).standard_normal((ROWS, ROWS))


class Worker:
    """The actor of all graphs; the same methods, called here, say what must come out.

    A product takes about 0.9 ms on a core of 2025; ``num_repeats`` says how many a method does.
    """

    def __init__(self, num_repeats: int) -> None:
        self._num_repeats = num_repeats
        self._turns = permutation(1)
        self._wide = np.arange(WIDE_BYTES // 8, dtype=np.float64)
        self._pictures = {seed: picture(seed) for seed in range(NUM_ARGUMENTS)}

    def make(self, seed: int) -> Array:
        return self.turn(self._pictures[seed])

    def turn(self, x: Array) -> Array:
        for _ in range(self._num_repeats):
            x = x @ self._turns
        return x

    def join(self, x: Array, y: Array) -> Array:
        return self.turn(x) - y

    def join_three(self, x: Array, y: Array, z: Array) -> Array:
        return self.turn(x) - self.turn(y) + z

    def widen(self, factor: float) -> Array:
        return self._wide * factor

    def total(self, x: Array) -> float:
        return float(sum(np.sqrt(x).sum() for _ in range(self._num_repeats // 2)))


@dataclass(frozen=True)
class Case:
    """A graph to predict.

    Attributes:
        name: for the table.
        build: the graph, from three or four actors.
        expected: what it must give for an input, from a worker in this process.
        argument: makes the input of execution k.
        alone: arguments of each method, for its own measure.
        sizes: bytes of values, by id; others are small.
        inflight: executions in flight for the steady measure; 1 to leave it out.
        needs_torch: whether it uses gloo.
    """

    name: str
    build: Callable[[Sequence[Any], Any], Any]
    expected: Callable[[Worker, Any], Any]
    argument: Callable[[int], Any]
    alone: Mapping[str, tuple[Any, ...]]
    sizes: Mapping[str, int]
    inflight: int = 1
    needs_torch: bool = False


def chain(actors: Sequence[Any], inp: Any) -> Any:
    for actor in actors[:3]:
        inp = actor.turn.bind(inp)
    return inp


def fan_in(actors: Sequence[Any], inp: Any, transport: str = "shm") -> Any:
    made = [actor.make.bind(inp).with_tensor_transport(transport=transport) for actor in actors[:3]]
    return actors[3].join_three.bind(*made)


def diamond(actors: Sequence[Any], inp: Any) -> Any:
    top = actors[0].make.bind(inp)
    return actors[3].join.bind(actors[1].turn.bind(top), actors[2].turn.bind(top))


def fan_out(actors: Sequence[Any], inp: Any) -> Any:
    wide = actors[0].widen.bind(inp)
    return crossfade.MultiOutputNode([actor.total.bind(wide) for actor in actors[1:4]])


def gloo_fan_in(actors: Sequence[Any], inp: Any) -> Any:
    return fan_in(actors, inp, "gloo")


def small_values(num: int) -> dict[str, int]:
    return {f"n{index}": SMALL_BYTES for index in range(num)}


def cases() -> list[Case]:
    p = [picture(seed) for seed in range(NUM_ARGUMENTS)]

    def joined(worker: Worker, seed: int) -> Array:
        return worker.join_three(*[worker.make(seed)] * 3)

    def crossed(worker: Worker, seed: int) -> Array:
        made = worker.turn(worker.make(seed))
        return worker.join(made, made)

    three = {"make": (1,), "join_three": (p[0], p[1], p[2])}
    turned: Callable[[Worker, Array], Array] = lambda w, x: w.turn(w.turn(w.turn(x)))  # noqa: E731 - shared by two
    arrays = {"i0": SMALL_BYTES, **small_values(3)}
    return [
        Case("chain of three", chain, turned, lambda k: p[k % NUM_ARGUMENTS], {"turn": (p[0],)}, arrays),
        Case("fan-in of three", fan_in, joined, lambda k: k % NUM_ARGUMENTS, three, small_values(4)),
        Case(
            "diamond",
            diamond,
            crossed,
            lambda k: k % NUM_ARGUMENTS,
            {"make": (1,), "turn": (p[0],), "join": (p[0], p[1])},
            small_values(4),
        ),
        Case(
            "fan-out of 8 MB",
            fan_out,
            lambda w, x: [w.total(w.widen(x))] * 3,
            lambda k: 1.0 + k % NUM_ARGUMENTS,
            {"widen": (2.0,), "total": (np.arange(WIDE_BYTES // 8, dtype=np.float64),)},
            {"n0": WIDE_BYTES},
        ),
        Case("pipeline of three", chain, turned, lambda k: p[k % NUM_ARGUMENTS], {"turn": (p[0],)}, arrays, inflight=4),
        Case(
            "fan-in over gloo, overlap",
            gloo_fan_in,
            joined,
            lambda k: k % NUM_ARGUMENTS,
            three,
            small_values(4),
            2,
            needs_torch=True,
        ),
    ]
