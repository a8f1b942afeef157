"""The side that is measured, in a process of its own: reads requests on stdin, answers with JSON.

``python -m benchmarks.hop_worker crossfade|blocking|ray``. Both libraries run the same graphs from the same code; what
differs between them is in `benchmarks.hop_libraries`. Every answer of a graph is compared with what it has to be, outside
the timed stretch.

For each request, one line goes back with the result, and one more when everything that the request started is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import IO, Any

from benchmarks.hop_libraries import LIBRARIES, Library

Request = Mapping[str, Any]
Result = dict[str, Any]

NUM_WARM_UPS = 100
NUM_LARGE_WARM_UPS = 30
WARM_UP_S = 0.5


class Echo:
    """The actor of all measures."""

    def echo(self, value: Any) -> Any:
        return value

    def ends(self, array: Any) -> tuple[tuple[int, ...], int, int]:
        """Looks at an array or a tensor without reading more than its first and its last element."""
        return tuple(array.shape), int(array[0]), int(array[-1])

    def pid(self, _: Any) -> int:
        return os.getpid()

    def tensors(self, request: tuple[int, int, int]) -> Any:
        """So many tensors with so many elements of a value each; made once for each number of elements."""
        import torch

        count, num_elements, value = request
        kept = self.__dict__.setdefault("kept", {})
        if (count, num_elements) not in kept:
            kept[count, num_elements] = tuple(torch.empty(num_elements) for _ in range(count))
        for tensor in kept[count, num_elements]:
            tensor[0] = tensor[-1] = value
        return kept[count, num_elements] if count > 1 else kept[count, num_elements][0]

    def corners(self, *tensors: Any) -> tuple[float, float]:
        return float(tensors[0][0]), float(tensors[-1][-1])


@contextlib.contextmanager
def compiled(library: Library, shape: str, num_actors: int, method: str = "echo") -> Iterator[Any]:
    """A graph of fresh actors: a ``chain`` of them, or a ``fan`` from one input to all."""
    actors = [library.new_actor() for _ in range(num_actors)]
    with library.input_node() as entry:
        if shape == "chain":
            node = entry
            for actor in actors:
                node = getattr(actor, method).bind(node)
        else:
            node = library.outputs([getattr(actor, method).bind(entry) for actor in actors])
    graph = library.compile(node)
    try:
        yield graph
    finally:
        graph.teardown()
        for actor in actors:
            library.kill(actor)


def require(got: Any, wanted: Any) -> None:
    """Ends the block when a graph gave a wrong value."""
    if got != wanted:
        raise ValueError(f"the graph gave {str(got)[:80]}, not {str(wanted)[:80]}")


def warm_up(trip: Callable[[int], float]) -> None:
    """Runs trips until the machine runs them as fast as it will.

    A virtual machine gives cores that were idle their full speed only after about 0.1 s of work: 1 MB out and back took 160 us
    in the first 70 ms of a block and 96 us in all of it that followed. What a pause costs is a measure of its own.
    """
    end = time.monotonic() + WARM_UP_S
    for number in itertools.count():
        trip(number)
        if number >= NUM_WARM_UPS and time.monotonic() > end:
            return


def hops(library: Library, request: Request) -> Iterator[Result]:
    """Round trips of 1 byte, one after the other, ``pause_s`` apart."""
    num_actors, pause_s, get = request["num_actors"], request.get("pause_s", 0), library.get
    with compiled(library, request["shape"], num_actors) as graph:

        def trip(number: int) -> float:
            value = bytes((number & 0xFF,))
            start = time.perf_counter_ns()
            got = get(graph.execute(value))
            taken_us = (time.perf_counter_ns() - start) / 1_000
            require(got, value if request["shape"] == "chain" else [value] * num_actors)
            return taken_us

        warm_up(trip)
        samples = []
        for number in range(request["num"]):
            if pause_s:
                time.sleep(pause_s)
            samples.append(trip(number))
        yield {"samples": samples}


def awaits(library: Library, request: Request) -> Iterator[Result]:
    """Round trips of 1 byte by ``execute_async`` and ``await``, one after the other; crossfade only."""
    with compiled(library, "chain", 1) as graph:

        async def trip(number: int) -> float:
            value = bytes((number & 0xFF,))
            start = time.perf_counter_ns()
            got = await (await graph.execute_async(value))
            taken_us = (time.perf_counter_ns() - start) / 1_000
            require(got, value)
            return taken_us

        async def trips() -> list[float]:
            end = time.monotonic() + WARM_UP_S
            for number in itertools.count():
                await trip(number)
                if number >= NUM_WARM_UPS and time.monotonic() > end:
                    return [await trip(number) for number in range(request["num"])]
            return []

        yield {"samples": asyncio.run(trips())}


def array_round_trips(library: Library, request: Request) -> Iterator[Result]:
    """A numpy array of random bytes out and back. Both ends of each value are compared, and all elements of every
    ``check_every``-th: comparing all of each would time the caches that the comparison has filled.
    """
    import numpy as np

    array: Any = np.random.default_rng(0).integers(0, 256, request["num_bytes"], dtype=np.uint8)
    with compiled(library, "chain", 1) as graph:

        def trip(number: int) -> float:
            array[:8] = array[-8:] = number & 0xFF
            start = time.perf_counter_ns()
            got = library.get(graph.execute(array))
            taken_us = (time.perf_counter_ns() - start) / 1_000
            ends = np.array_equal(got[:8], array[:8]) and np.array_equal(got[-8:], array[-8:])
            require(ends and got.shape == array.shape, True)
            require(number % request["check_every"] > 0 or np.array_equal(got, array), True)
            return taken_us

        warm_up(trip)
        yield {"samples": [trip(number) for number in range(request["num"])]}


def one_way(library: Library, request: Request) -> Iterator[Result]:
    """An array or a tensor to an actor that answers with its shape and ends; one memcpy of the same size beside it.

    The result also holds the first use, and whether a whole array was echoed unharmed once, untimed.
    """
    import numpy as np

    from benchmarks.baselines import copy_us

    num_bytes = request["num_bytes"]
    payload: Any = np.full(num_bytes, 1, dtype=np.uint8)
    if request["kind"] == "torch":
        import torch

        payload = torch.from_numpy(payload)
    with compiled(library, "chain", 1, "ends") as graph:

        def trip(number: int) -> float:
            payload[0], payload[-1] = number & 0x7F, (number + 1) & 0x7F
            start = time.perf_counter_ns()
            got = library.get(graph.execute(payload))
            taken_us = (time.perf_counter_ns() - start) / 1_000
            require((tuple(got[0]), *got[1:]), ((num_bytes,), number & 0x7F, (number + 1) & 0x7F))
            return taken_us

        first_us = trip(0)
        for number in range(NUM_LARGE_WARM_UPS):
            trip(number)
        samples, copies = [], []
        for number in range(request["num"]):  # a copy beside each, so that both see the same machine
            copies += copy_us(num_bytes, num_copies=1)
            samples.append(trip(number))
        yield {"samples": samples, "first_us": first_us, "copy_us": copies}


def throughput(library: Library, request: Request) -> Iterator[Result]:
    """Executions with ``num_inflight`` of them under way; the samples are microseconds per execution."""
    num, num_inflight, get = request["num"], request["num_inflight"], library.get
    with compiled(library, "chain", 1) as graph:

        def trip(number: int) -> float:
            require(get(graph.execute(number)), number)
            return 0.0

        warm_up(trip)
        refs = [graph.execute(i) for i in range(num_inflight)]
        start = time.perf_counter_ns()
        for i in range(num):
            got = get(refs[i % num_inflight])
            refs[i % num_inflight] = graph.execute(i + num_inflight)
            if got != i:
                require(got, i)
        taken_us = (time.perf_counter_ns() - start) / 1_000
        for i in range(num, num + num_inflight):
            require(get(refs[i % num_inflight]), i)
        yield {"samples": [taken_us / num]}


def allreduces(library: Library, request: Request) -> Iterator[Result]:
    """Allreduces of ``count`` CPU tensors of each of ``num_actors``, made and looked at in the actors; crossfade only."""
    from crossfade.collective import allreduce

    num_actors, count, num_elements = request["num_actors"], request["count"], request["num_bytes"] // 4
    actors = [library.new_actor() for _ in range(num_actors)]
    with library.input_node() as entry:
        made: list[Any] = [actor.tensors.options(num_returns=count).bind(entry) for actor in actors]
        sums = allreduce.bind(made if count == 1 else [list(each) for each in made])
        looks = [a.corners.bind(*(each if count > 1 else [each])) for a, each in zip(actors, sums, strict=True)]
    graph = library.compile(library.outputs(looks))

    def trip(number: int) -> float:
        start = time.perf_counter_ns()
        got = library.get(graph.execute((count, num_elements, number & 0x7F)))
        taken_us = (time.perf_counter_ns() - start) / 1_000
        require([tuple(each) for each in got], [(float(num_actors * (number & 0x7F)),) * 2] * num_actors)
        return taken_us

    warm_up(trip)
    yield {"samples": [trip(number) for number in range(request["num"])]}
    graph.teardown()
    for actor in actors:
        library.kill(actor)


def idle(library: Library, request: Request) -> Iterator[Result]:
    """Executes a few times, names the actors' processes, then does nothing for ``hold_s``."""
    with compiled(library, "fan", request["num_actors"], "pid") as graph:
        pids: list[int] = []
        for _ in range(NUM_WARM_UPS):
            pids = library.get(graph.execute(0))
        yield {"pids": pids}
        time.sleep(request["hold_s"])


def start_up(library: Library, request: Request) -> Iterator[Result]:
    """Starts actors and compiles a graph in a process in which the library is already initialised."""
    start = time.perf_counter_ns()
    with compiled(library, "chain", request["num_actors"]) as graph:
        compiled_us = (time.perf_counter_ns() - start) / 1_000
        require(library.get(graph.execute(b"x")), b"x")
        first_us = (time.perf_counter_ns() - start) / 1_000
        yield {"samples": [first_us], "compiled_us": compiled_us}


MEASURES: Mapping[str, Callable[[Library, Request], Iterator[Result]]] = {
    "hops": hops,
    "awaits": awaits,
    "array_round_trips": array_round_trips,
    "one_way": one_way,
    "throughput": throughput,
    "allreduces": allreduces,
    "idle": idle,
    "start_up": start_up,
}


def answer(library: Library, line: str, replies: IO[str]) -> None:
    """Carries out one request; an error is an answer too."""

    def reply(**message: Any) -> None:
        print(json.dumps(message), file=replies, flush=True)

    try:
        request = json.loads(line)
        for result in MEASURES[request["measure"]](library, request):
            reply(result=result)
        reply(done=True)
    except Exception as error:
        reply(error=f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:300])


def main() -> None:
    """Serves until stdin ends."""
    # Libraries print: only answers may reach the pipe that stdout was.
    with os.fdopen(os.dup(1), "w") as replies:
        os.dup2(2, 1)
        start = time.perf_counter_ns()
        library = LIBRARIES[sys.argv[1]]()
        library.start(Echo)
        print(json.dumps({"result": {"init_us": (time.perf_counter_ns() - start) / 1_000}}), file=replies, flush=True)
        for line in sys.stdin:
            answer(library, line, replies)
        library.stop()


if __name__ == "__main__":
    main()
