"""What ``benchmarks.gpu_correctness`` runs in its workers: ``python -m benchmarks.gpu_proofs DEVICE``."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch

import crossfade
from benchmarks.gpu_actors import gpus_for
from benchmarks.gpu_steps import Request, Result, WrongValue, own_replies, serve
from tests.helpers.graphs import (
    NUM_ACTORS,
    TENSOR_KINDS,
    TENSOR_METHODS,
    Bench,
    check_engines_agree,
    graph_draws,
)
from tests.helpers.tensor_workers import TensorWorker

POISON = -77
KEPT_EVERY = 97
NUM_INFLIGHT = 4
ERROR_LIMIT_S, END_LIMIT_S = 10.0, 10.0
SLACK_BYTES = 64 << 20
"""Free memory of a GPU is not exact to the byte."""


# random graphs


def random_graphs(state: dict[str, Any], request: Request) -> Result:
    """Graphs that follow from the seed, on processes and in one thread: every result the same, bit for bit."""
    from hypothesis import HealthCheck, Phase, given, seed, settings

    device = state["device"]
    if "benches" not in state:
        books = {"num_gpus": gpus_for(device, NUM_ACTORS)} if device == "cuda" else None
        inline = Bench("inline", TensorWorker, transport="auto")
        state["benches"] = inline, Bench("local", TensorWorker, (device,), books)
    benches = state["benches"]
    counts = {"graphs": 0, "executions": 0, "nodes": 0}
    draws = graph_draws(
        transports=[crossfade.Transport.NCCL if each == "nccl" else each for each in request["transports"]],
        kinds=TENSOR_KINDS,
        methods=TENSOR_METHODS,
        most_depth=4,
        with_large=request["with_large"],
    )

    @seed(request["seed"])
    @settings(
        max_examples=request["num"],
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(draw=draws)
    def agree(draw: Any) -> None:
        try:
            check_engines_agree(benches, [draw])
        except AssertionError as error:
            raise WrongValue(str(error)) from None
        counts["graphs"] += 1
        counts["executions"] += draw.num_executions
        counts["nodes"] += len(draw.nodes)

    agree()
    return dict(counts)


# poisoned slots


class Filler:
    """Gives other numbers in each execution."""

    def __init__(self, device: str, num_words: int) -> None:
        torch.set_num_threads(1)
        self._base = torch.arange(num_words, device=device) * 3

    def fill(self, execution: int) -> torch.Tensor:
        return self._base + execution


class Checker:
    """Counts wrong words on the device, without waiting for it, and poisons each slot before it goes back.

    Some values are kept for a while instead, and looked at again.
    """

    def __init__(self, device: str, num_words: int) -> None:
        torch.set_num_threads(1)
        self._base = torch.arange(num_words, device=device) * 3
        self._num_wrong = torch.zeros((), dtype=torch.int64, device=device)
        self._kept: tuple[torch.Tensor, int] | None = None

    def check(self, tensor: torch.Tensor, execution: int) -> int:
        self._num_wrong += (tensor != self._base + execution).sum()
        if execution % KEPT_EVERY == 0:
            if self._kept is not None:
                kept, number = self._kept
                self._num_wrong += (kept != self._base + number).sum()
            self._kept = tensor, execution
        else:
            tensor.fill_(POISON)
        return execution

    def num_wrong(self) -> int:
        return int(self._num_wrong.item())


def poisoned(state: dict[str, Any], request: Request) -> Result:
    """Executions of one graph, a few in flight, which goes on from request to request."""
    device = state["device"]
    if "poisoned" not in state:
        crossfade.init(ignore_reinit_error=True)
        num_gpus = gpus_for(device, 2)
        args = (device, request["num_words"])
        filler, checker = (crossfade.remote(num_gpus=num_gpus)(cls).remote(*args) for cls in (Filler, Checker))
        with crossfade.InputNode() as execution:
            tensor = filler.fill.bind(execution).with_tensor_transport(request["transport"])
            graph = checker.check.bind(tensor, execution).compile(max_inflight=NUM_INFLIGHT)
        state["poisoned"] = graph, checker, 0
    graph, checker, first = state["poisoned"]
    refs: deque[Any] = deque()
    begin = time.monotonic()
    for number in range(first, first + request["num"]):
        if len(refs) == NUM_INFLIGHT:
            _take(refs)
        refs.append((number, graph.execute(number)))
    while refs:
        _take(refs)
    taken_s = time.monotonic() - begin
    state["poisoned"] = graph, checker, first + request["num"]
    num_wrong = crossfade.get(checker.num_wrong.remote())
    if num_wrong:
        raise WrongValue(f"{num_wrong} words were wrong by execution {first + request['num']}")
    return {"executions": request["num"], "each_us": taken_s / request["num"] * 1e6}


def _take(refs: deque[Any]) -> None:
    number, ref = refs.popleft()
    if (got := crossfade.get(ref)) != number:
        raise WrongValue(f"execution {number} gave {got}")


# kills


class Link:
    """A piece of a chain of large values."""

    def __init__(self, device: str, num_words: int) -> None:
        torch.set_num_threads(1)
        self._base = torch.arange(num_words, device=device)

    def pid(self) -> int:
        return os.getpid()

    def give(self, execution: int) -> torch.Tensor:
        return self._base + execution

    def add(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor + 1

    def num_wrong(self, tensor: torch.Tensor, execution: int, num_added: int) -> int:
        return int((tensor != self._base + execution + num_added).sum().item())


def free_bytes(device: str) -> list[int]:
    return [torch.cuda.mem_get_info(index)[0] for index in range(torch.cuda.device_count())] if device == "cuda" else []


def kill(state: dict[str, Any], request: Request) -> Result:
    """One of three actors in a row is killed while large values go through them."""
    device, chooser = state["device"], random.Random(request["seed"])
    before = free_bytes(device)
    with _session(device):
        link = crossfade.remote(num_gpus=gpus_for(device, 3))(Link)
        names = [f"link{number}" for number in range(3)]
        links = {name: link.options(name=name).remote(device, request["num_words"]) for name in names}
        pids = dict(zip(names, crossfade.get([each.pid.remote() for each in links.values()]), strict=True))
        dead = chooser.choice(names)
        graph = _chain(list(links.values()), request["transport"])
        if wrong := _wrong_of(graph, range(3)):
            raise WrongValue(wrong)
        reported_s, message = _until_reported(graph, pids[dead], chooser.random() * request["most_wait_s"])
        if dead not in message:
            raise WrongValue(f"{dead} was killed, and the error says: {message}")
        graph.teardown(timeout=END_LIMIT_S)
        with _chain([links[name] for name in names if name != dead], request["transport"]) as other:
            if wrong := _wrong_of(other, range(5)):
                raise WrongValue(f"after the death of {dead}: {wrong}")
    lost = _lost_bytes(device, before)
    return {"dead": names.index(dead), "reported_s": reported_s, "lost_bytes": lost}


@contextlib.contextmanager
def _session(device: str) -> Iterator[None]:
    crossfade.init()
    try:
        yield
    finally:
        crossfade.shutdown()


def _chain(links: list[Any], transport: str) -> crossfade.CompiledGraph:
    first, *between, last = links
    with crossfade.InputNode() as execution:
        value: Any = first.give.bind(execution).with_tensor_transport(transport)
        for link in between:
            value = link.add.bind(value).with_tensor_transport(transport)
        graph: crossfade.CompiledGraph = last.num_wrong.bind(value, execution, len(between)).compile(
            max_inflight=NUM_INFLIGHT
        )
    return graph


def _wrong_of(graph: crossfade.CompiledGraph, numbers: range) -> str:
    found = [(number, crossfade.get(graph.execute(number))) for number in numbers]
    return next((f"{num_wrong} words of execution {number} were wrong" for number, num_wrong in found if num_wrong), "")


def _until_reported(graph: crossfade.CompiledGraph, pid: int, wait_s: float) -> tuple[float, str]:
    """Executes on, kills after a while, and waits for the error: seconds from the kill to it, and what it says."""
    refs: deque[Any] = deque()
    begin, killed_at, number = time.monotonic(), 0.0, 0
    try:
        while True:
            if len(refs) == NUM_INFLIGHT:
                if num_wrong := refs.popleft().get(timeout=ERROR_LIMIT_S):
                    raise WrongValue(
                        f"{num_wrong} words were wrong, {time.monotonic() - killed_at:.3f} s after the kill"
                    )
                if killed_at and time.monotonic() - killed_at > ERROR_LIMIT_S:
                    raise TimeoutError(f"nothing was reported within {ERROR_LIMIT_S} s")
            refs.append(graph.execute(number))
            number += 1
            if not killed_at and len(refs) == NUM_INFLIGHT and time.monotonic() - begin >= wait_s:
                killed_at = time.monotonic()
                os.kill(pid, signal.SIGKILL)
    except crossfade.ActorDiedError as error:
        return time.monotonic() - killed_at, str(error)


def _lost_bytes(device: str, before: list[int]) -> int:
    """What is not free again of what was, on the GPU that lost most, when it has come to rest."""
    end = time.monotonic() + END_LIMIT_S
    while True:
        lost = max([0, *(old - new for old, new in zip(before, free_bytes(device), strict=True))])
        if lost <= SLACK_BYTES or time.monotonic() > end:
            return lost
        time.sleep(0.05)  # the driver tells nobody when it has done


MEASURES = {"random_graphs": random_graphs, "poisoned": poisoned, "kill": kill}


def main() -> None:
    replies = own_replies()
    serve({"device": sys.argv[1]}, MEASURES, replies)
    os._exit(0)  # actors end with their driver


if __name__ == "__main__":
    main()
