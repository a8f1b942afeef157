"""The graphs that ``benchmarks.gpu_predictions`` predicts and measures: ``python -m benchmarks.gpu_cases DEVICE TRANSPORT SIZE``.

All values are square half-precision tensors; products with a permutation matrix are exact, so results are compared bit for bit with
what indexing gives in this process.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

import crossfade
from benchmarks.cost_model import predicted_steady_us
from benchmarks.gpu_actors import device_us, gpus_for, synchronise
from benchmarks.gpu_steps import Request, Result, WrongValue, own_replies, serve

NUM_ARGUMENTS = 4
NUM_ACTORS = 4
NUM_TIMED = 15


def order_of(size: int) -> torch.Tensor:
    return torch.randperm(size, generator=torch.Generator().manual_seed(1))


def picture(size: int, seed: int) -> torch.Tensor:
    """Without negative zeros, whose sign a product with a permutation matrix loses."""
    return torch.randn(size, size, generator=torch.Generator().manual_seed(seed)).half() + 0.0


def checksum(x: torch.Tensor) -> torch.Tensor:
    """Of the bits, each by its place."""
    words = x.contiguous().view(torch.int16).flatten()
    return (words.long() * (torch.arange(words.numel(), device=x.device) % 1021 + 1)).sum()


class Worker:
    """The actor of all graphs.

    Args:
        device: ``cuda`` or ``cpu``.
        size: rows and columns.
    """

    def __init__(self, device: str, size: int) -> None:
        torch.set_num_threads(1)
        self._device = device
        self._turns = torch.eye(size).half()[order_of(size)].to(device)
        self._pictures = [picture(size, seed).to(device) for seed in range(NUM_ARGUMENTS)]
        synchronise(device)

    def make(self, seed: int) -> torch.Tensor:
        return self.turn(self._pictures[seed % NUM_ARGUMENTS])

    def turn(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self._turns

    def join(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.turn(x) - y

    def join_three(self, x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        return self.turn(x) - self.turn(y) + z

    def total(self, x: torch.Tensor) -> int:
        return int(self.enqueue_total(x).item())

    def enqueue_total(self, x: torch.Tensor) -> torch.Tensor:
        return checksum(self.turn(x))

    def alone_us(self, method: str, num_tensors: int) -> tuple[float, float]:
        """A method on an idle device: the host's time, which only enqueues, and that of its kernels, on the device's clock."""
        args: list[Any] = self._pictures[:num_tensors] if num_tensors else [1]
        call = getattr(self, f"enqueue_{method}", None) or getattr(self, method)
        host_us, kernels_us = [], []
        for _ in range(NUM_TIMED):
            kernels_us.append(device_us(self._device, lambda: call(*args)))
            start_ns = time.perf_counter_ns()
            call(*args)
            host_us.append((time.perf_counter_ns() - start_ns) / 1e3)
            synchronise(self._device)
        return statistics.median(host_us[3:]), statistics.median(kernels_us[3:])


class Reference:
    """The same by indexing, on the CPU."""

    def __init__(self, size: int) -> None:
        order = order_of(size)
        self._columns = torch.argsort(order)
        self._size = size

    def make(self, seed: int) -> torch.Tensor:
        return self.turn(picture(self._size, seed % NUM_ARGUMENTS))

    def turn(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, self._columns]

    def join(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.turn(x) - y

    def join_three(self, x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        return self.turn(x) - self.turn(y) + z

    def total(self, x: torch.Tensor) -> int:
        return int(checksum(self.turn(x)).item())


@dataclass(frozen=True)
class Case:
    """A graph.

    Attributes:
        name: for the table.
        build: the graph, from four actors, the input and what puts the transport on an edge.
        expected: what it must give, from the reference and the input.
        methods: used, with the number of tensors that each takes.
        inflight: executions under way; with more than one, what is measured is the time per execution.
    """

    name: str
    build: Callable[[Sequence[Any], Any, Callable[[Any], Any]], Any]
    expected: Callable[[Reference, int], Any]
    methods: Mapping[str, int]
    inflight: int = 1


def _chain(actors: Sequence[Any], inp: Any, on: Callable[[Any], Any]) -> Any:
    made = on(actors[0].make.bind(inp))
    return actors[2].total.bind(on(actors[1].turn.bind(made)))


def _fan_in(actors: Sequence[Any], inp: Any, on: Callable[[Any], Any]) -> Any:
    joined = actors[3].join_three.bind(*(on(actor.make.bind(inp)) for actor in actors[:3]))
    return actors[3].total.bind(joined)


def _diamond(actors: Sequence[Any], inp: Any, on: Callable[[Any], Any]) -> Any:
    top = on(actors[0].make.bind(inp))
    sides = [on(actor.turn.bind(top)) for actor in actors[1:3]]
    return actors[3].total.bind(actors[3].join.bind(*sides))


def _fan_out(actors: Sequence[Any], inp: Any, on: Callable[[Any], Any]) -> Any:
    top = on(actors[0].make.bind(inp))
    return crossfade.MultiOutputNode([actor.total.bind(top) for actor in actors[1:4]])


CASES = (
    Case(
        "chain of three",
        _chain,
        lambda r, k: r.total(r.turn(r.make(k))),
        {"make": 0, "turn": 1, "total": 1},
    ),
    Case(
        "fan-in of three",
        _fan_in,
        lambda r, k: r.total(r.join_three(*[r.make(k)] * 3)),
        {"make": 0, "join_three": 3, "total": 1},
    ),
    Case(
        "diamond",
        _diamond,
        lambda r, k: r.total(r.join(*[r.turn(r.make(k))] * 2)),
        {"make": 0, "turn": 1, "join": 2, "total": 1},
    ),
    Case("fan-out to three", _fan_out, lambda r, k: [r.total(r.make(k))] * 3, {"make": 0, "total": 1}),
    Case(
        "pipeline of three, 4 in flight",
        _chain,
        lambda r, k: r.total(r.turn(r.make(k))),
        {"make": 0, "turn": 1, "total": 1},
        inflight=4,
    ),
)


class State:
    """The costs, which are measured before there is an actor, the actors, and graphs, compiled when they are first used."""

    def __init__(self, device: str, transport: str, size: int) -> None:
        self.device, self.transport, self.size = device, transport, size
        self.reference = Reference(size)
        self.actors: list[Any] = []
        self.costs = crossfade.CostModel()
        self.graphs: dict[int, Any] = {}
        self.expected: dict[int, list[Any]] = {}

    def start(self) -> None:
        """Starts the actors."""
        remote = crossfade.remote(num_gpus=gpus_for(self.device, NUM_ACTORS))(Worker)
        self.actors = [remote.remote(self.device, self.size) for _ in range(NUM_ACTORS)]

    def on(self, node: Any) -> Any:
        return node.with_tensor_transport(self.transport, static_shape=True, direct_return=True)

    def graph(self, index: int) -> Any:
        if index not in self.graphs:
            case = CASES[index]
            with crossfade.InputNode() as inp:
                dag = case.build(self.actors, inp, self.on)
            self.graphs[index] = dag.compile(max_inflight=max(2, case.inflight))
            self.expected[index] = [case.expected(self.reference, number) for number in range(NUM_ARGUMENTS)]
        return self.graphs[index]

    def check(self, index: int, number: int, got: Any) -> None:
        if got != (wanted := self.expected[index][number % NUM_ARGUMENTS]):
            raise WrongValue(f"{CASES[index].name}: execution {number} gave {got}, not {wanted}")


def calibrate(state: State, request: Request) -> Result:
    """Costs of the host, measured now, and the GPUs' from the file, if there is one."""
    from crossfade.topology import load_topology

    costs = crossfade.calibrate()
    if request["topology"]:
        found = load_topology(Path(request["topology"]))
        if found is None:
            raise ValueError("the file has no topology")
        costs = replace(costs, topology=found)
    state.costs = costs
    state.start()
    return {"costs": costs.to_json()}


def predict(state: State, request: Request) -> Result:
    """One case: its methods alone, then what the simulator says."""
    case, graph = CASES[request["case"]], state.graph(request["case"])
    times_us = {
        name: crossfade.get(state.actors[0].alone_us.remote(name, num_tensors))
        for name, num_tensors in case.methods.items()
    }
    host_us = {name: host for name, (host, _) in times_us.items()}
    kernels_us = {name: kernels for name, (_, kernels) in times_us.items()}
    sizes = {
        output: 2 * state.size**2 for node in graph.plan.nodes for output in node.outputs if node.method != "total"
    }
    more: dict[str, Any] = {"device_us": kernels_us, "synchronous": ("total",)} if state.device == "cuda" else {}
    workload = crossfade.Workload(host_us, sizes, **more)
    num = NUM_TIMED + case.inflight if case.inflight > 1 else 1
    predicted = graph.predicted_timeline(workload, state.costs, num_executions=num)
    predicted_us = predicted.makespan_us if num == 1 else predicted_steady_us(predicted, case.inflight)
    return {"predicted_us": predicted_us, "methods_us": kernels_us}


def measure(state: State, request: Request) -> Result:
    """A block of one case."""
    index = request["case"]
    case, graph = CASES[index], state.graph(index)
    run = _in_flight_us if case.inflight > 1 else _alone_us
    run(state, index, graph)
    return {"samples": run(state, index, graph)}


def _alone_us(state: State, index: int, graph: Any) -> list[float]:
    taken = []
    for number in range(NUM_TIMED):
        start_ns = time.perf_counter_ns()
        got = crossfade.get(graph.execute(number))
        taken.append((time.perf_counter_ns() - start_ns) / 1e3)
        state.check(index, number, got)
    return taken


def _in_flight_us(state: State, index: int, graph: Any) -> list[float]:
    """As `predicted_steady_us` counts it."""
    inflight = CASES[index].inflight
    refs: deque[Any] = deque()
    results, ends_ns = [], []
    for number in range(NUM_TIMED + 2 * inflight):
        if len(refs) == inflight:
            results.append(crossfade.get(refs.popleft()))
            ends_ns.append(time.perf_counter_ns())
        if number < NUM_TIMED + inflight:
            refs.append(graph.execute(number))
    while refs:
        results.append(crossfade.get(refs.popleft()))
        ends_ns.append(time.perf_counter_ns())
    for number, got in enumerate(results):
        state.check(index, number, got)
    return [(ends_ns[-1] - ends_ns[inflight - 1]) / (len(ends_ns) - inflight) / 1e3]


MEASURES = {"calibrate": calibrate, "predict": predict, "measure": measure}


def main() -> None:
    replies = own_replies()
    serve(State(sys.argv[1], sys.argv[2], int(sys.argv[3])), MEASURES, replies)
    crossfade.shutdown()


if __name__ == "__main__":
    main()
