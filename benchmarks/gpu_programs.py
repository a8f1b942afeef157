"""The overlap program and the two hops, as crossfade's and Ray's workers run them; one code for both.

The overlap program is that of Ray Compiled Graph's documentation: three senders of a large tensor, one receiver that multiplies
each and reads one element. Every value is compared with a reference of the same run.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Protocol

from benchmarks.gpu_actors import NUM_FACTORS, Receiver, Sender, Sink, Source, factor, host_us, warm_up
from benchmarks.gpu_steps import Request, Result, WrongValue

NUM_SENDERS = 3
MAX_INFLIGHT = 4
WARM_UP_S = 0.3


class Library(Protocol):
    """What differs between the two libraries.

    Attributes:
        device: ``cuda`` or ``cpu``.
        may_share: several graphs may use one actor.
    """

    device: str
    may_share: bool

    def new_actor(self, cls: type, *args: Any) -> Any: ...
    def call(self, method: Any, *args: Any) -> Any: ...
    def kill(self, actor: Any) -> None: ...
    def input_node(self) -> Any: ...
    def hinted(self, node: Any) -> Any: ...
    def outputs(self, nodes: Sequence[Any]) -> Any: ...
    def compile(self, dag: Any, *, overlap: bool) -> Any: ...
    def get(self, result: Any) -> Any: ...


def require(is_right: bool, what: str) -> None:
    if not is_right:
        raise WrongValue(what)


@dataclass
class Overlap:
    """The program's actors, its graphs with and without overlap, and the reference."""

    library: Library
    senders: Sequence[Any]
    receiver: Any
    columns: Sequence[int]
    values: Sequence[float]
    graphs: dict[bool, Any] = field(default_factory=dict)
    first: Sequence[float] = ()
    number: int = 0

    @classmethod
    def start(cls, library: Library, size: int) -> Overlap:
        senders = [library.new_actor(Sender, library.device, number, size) for number in range(NUM_SENDERS)]
        receiver = library.new_actor(Receiver, library.device, size)
        references = [library.call(sender.reference) for sender in senders]
        return cls(library, senders, receiver, *zip(*references, strict=True))  # type: ignore[arg-type]

    def graph(self, *, overlap: bool) -> Any:
        if overlap not in self.graphs:
            with self.library.input_node() as execution:
                made = [self.library.hinted(sender.make.bind(execution)) for sender in self.senders]
                rows = zip(made, self.columns, strict=True)
                results = [self.receiver.multiply.bind(tensor, column) for tensor, column in rows]
                self.graphs[overlap] = self.library.compile(self.library.outputs(results), overlap=overlap)
        return self.graphs[overlap]

    def check(self, execution: int, results: Sequence[float]) -> None:
        """Against float64 (what rounding to half precision allows), and exactly against the first execution."""
        scale = factor(execution) ** 2
        got = [result / scale for result in results]
        self.first = self.first or got
        tolerance = 3e-3 if self.library.device == "cuda" else 1e-3
        require(
            all(math.isclose(mine, value, rel_tol=tolerance) for mine, value in zip(got, self.values, strict=True)),
            f"execution {execution} gave {got}, not {list(self.values)}",
        )
        require(got == list(self.first), f"execution {execution} gave {got}, the first one {list(self.first)}")

    def alone_us(self, graph: Any, num: int) -> list[float]:
        """Each execution by itself."""
        taken = []
        for _ in range(num):
            start_ns = time.perf_counter_ns()
            results = self.library.get(graph.execute(self.number))
            taken.append((time.perf_counter_ns() - start_ns) / 1e3)
            self.check(self.number, results)
            self.number += 1
        return taken

    def inflight_us(self, graph: Any, num: int) -> list[float]:
        """Per execution while `MAX_INFLIGHT` are under way: the time between the first and the last of ``num`` results."""
        refs: deque[tuple[int, Any]] = deque()
        ends_ns, results = [], []

        def collect() -> None:
            number, ref = refs.popleft()
            results.append((number, self.library.get(ref)))
            ends_ns.append(time.perf_counter_ns())

        for _ in range(num + 1 + MAX_INFLIGHT):
            if len(refs) == MAX_INFLIGHT:
                collect()
            refs.append((self.number, graph.execute(self.number)))
            self.number += 1
        full = len(ends_ns)
        while refs:
            collect()
        for number, result in results:
            self.check(number, result)
        return [(ends_ns[full - 1] - ends_ns[0]) / (full - 1) / 1e3]


def program_of(state: dict[str, Any], request: Request) -> Overlap:
    key = f"overlap {request['size']}"
    if key not in state:
        state[key] = Overlap.start(state["library"], request["size"])
    program: Overlap = state[key]
    return program


def overlap(state: dict[str, Any], request: Request) -> Result:
    """A block of the overlap program: ``overlap`` and ``inflight`` say how."""
    program = program_of(state, request)
    graph = program.graph(overlap=request["overlap"])
    run = program.inflight_us if request["inflight"] > 1 else program.alone_us
    program.alone_us(graph, 3)
    if program.library.device == "cuda":
        warm_up(lambda: run(graph, 2 * MAX_INFLIGHT))
    samples = run(graph, request["num"])
    return {"samples": samples, "host_us": [program.library.call(program.receiver.host_us)]}


def bare(state: dict[str, Any], request: Request) -> Result:
    """What the senders do and the links, alone, in the processes and on the GPUs of the program's actors."""
    program, num = program_of(state, request), request["num"]
    library = program.library
    target = library.call(program.receiver.device)
    made, moved = zip(
        *(library.call(sender.bare_us, target, max(3, num // 2)) for sender in program.senders), strict=True
    )
    return {"made": [*chain(*made)], "moved": [*chain(*moved)]}


def products(state: dict[str, Any], request: Request) -> Result:
    """A block of the receiver's products alone: ``in_a_row`` says how."""
    program = program_of(state, request)
    return {"samples": program.library.call(program.receiver.products_us, request["num"], request["in_a_row"])}


def reads(state: dict[str, Any], request: Request) -> Result:
    """The receiver's products with one element read after each, nothing of a library around them: ``beneath`` says whether the
    tensors come from the senders' GPUs meanwhile.
    """
    program = program_of(state, request)
    library = program.library
    others = [library.call(sender.device) for sender in program.senders] if request["beneath"] else []
    samples = [library.call(program.receiver.reads_us, request["num"], others)]
    return {"samples": samples, "host_us": [library.call(program.receiver.host_us)]}


def hops(state: dict[str, Any], request: Request) -> Result:
    """A tensor from the driver's word through two actors: ``what`` is ``shape`` or ``last``."""
    library, size_bytes, num = state["library"], request["size_bytes"], request["num"]
    key = f"hops {size_bytes}"
    if key not in state:
        for other in [name for name in state if name.startswith("hops ")]:
            _end_hops(library, *state.pop(other))  # their GPUs are needed
        actors = [library.new_actor(cls, library.device, size_bytes) for cls in (Source, Sink)]
        state[key] = actors, library.call(actors[0].last_elements), {}
    (source, sink), elements, graphs = state[key]
    what = request["what"]
    if what not in graphs:
        with library.input_node() as execution:
            tensor = library.hinted(source.give.bind(execution))
            node = getattr(sink, what).bind(tensor)
        graphs[what] = library.compile(node, overlap=True)
    graph = graphs[what]
    shape = (size_bytes // 2,)

    def trip(number: int) -> float:
        start_ns = time.perf_counter_ns()
        got = library.get(graph.execute(number))
        taken_us = (time.perf_counter_ns() - start_ns) / 1e3
        wanted = shape if what == "shape" else elements[number % NUM_FACTORS]
        require((tuple(got) if what == "shape" else got) == wanted, f"execution {number} gave {got}, not {wanted}")
        return taken_us

    end, number = time.monotonic() + WARM_UP_S, 0
    while number < 20 or time.monotonic() < end:
        trip(number)
        number += 1
    samples = [trip(number + each) for each in range(num)]
    hosts_us = [host_us(), library.call(source.host_us), library.call(sink.host_us)]
    if library.may_share:
        _check_whole(library, source, sink, graphs)
    return {"samples": samples, "host_us": hosts_us}


def _end_hops(library: Library, actors: Sequence[Any], _: Any, graphs: dict[str, Any]) -> None:
    for graph in graphs.values():
        graph.teardown()
    for actor in actors:
        library.kill(actor)


def _check_whole(library: Library, source: Any, sink: Any, graphs: dict[str, Any]) -> None:
    """Every element of a few values."""
    if "whole" not in graphs:
        with library.input_node() as execution:
            dag = sink.is_whole.bind(library.hinted(source.give.bind(execution)), execution)
        graphs["whole"] = library.compile(dag, overlap=True)
    for number in range(NUM_FACTORS):
        require(library.get(graphs["whole"].execute(number)), f"execution {number} gave other elements")


def bare_hop(state: dict[str, Any], request: Request) -> Result:
    """One bare copy of that size, between the same actors' GPUs. `hops` has to come first."""
    library = state["library"]
    source, sink = state[f"hops {request['size_bytes']}"][0]
    return {"samples": library.call(source.bare_us, library.call(sink.device), request["num"])}


MEASURES = {"overlap": overlap, "bare": bare, "products": products, "reads": reads, "hops": hops, "bare_hop": bare_hop}
