"""A program for the tests that kill: ``python -m tests.helpers.kill_driver SEED [gloo]``.

It runs three graphs on four actors in three threads until an actor dies, and says on its standard output, a JSON object a
line, what it sees: the processes, then each error with the time at which it came. It ends when its standard input does.
"""

from __future__ import annotations

import json
import random
import sys
import threading
from typing import Any

import numpy as np

import crossfade
from tests.helpers.calm import calm_s

_lock = threading.Lock()


def say(kind: str, **what: Any) -> None:
    """One line to the test."""
    with _lock:
        print(json.dumps({"kind": kind, "at": calm_s(), **what}), flush=True)


class Worker:
    """Works a little."""

    def pid(self) -> int:
        """The process."""
        import os

        return os.getpid()

    def work(self, *values: Any) -> Any:
        """The values, in one."""
        return values[0] if len(values) == 1 else [np.asarray(value) for value in values]

    def tensor(self, value: Any) -> Any:
        """A tensor."""
        import torch

        return torch.zeros(1000)


def payload(chooser: random.Random) -> Any:
    """Something small, or something that needs a slot."""
    return chooser.choice((1, b"x" * 100, np.zeros(chooser.choice((10, 5_000, 300_000)))))


def run(name: str, graph: Any, actors: list[str], seed: int, is_over: threading.Event) -> None:
    """Executes until an error comes; then everything later has to fail too."""
    chooser = random.Random(seed)
    refs: list[Any] = []
    num_done = 0
    try:
        while not is_over.is_set():
            refs.append(graph.execute(payload(chooser)))
            if len(refs) > chooser.randrange(5):
                refs.pop(0).get()
                num_done += 1
    except crossfade.ActorError as error:
        say("error", graph=name, actor=error.actor, message=str(error), actors=actors)
        later = 0
        for attempt in (*(ref.get for ref in refs), lambda: graph.execute(0).get()):
            try:
                attempt()
            except crossfade.ActorError:
                later += 1
            else:
                later = later if attempt in [ref.get for ref in refs] else -1  # what had arrived may still be got
        say("later", graph=name, num_refused=later)
    say("stopped", graph=name, num_done=num_done)


def build(cls: Any, transport: str) -> tuple[dict[str, Any], dict[str, list[str]], dict[str, int]]:
    """Three graphs on four actors: a chain, a fan-in, and one apart from them."""
    a, b, c, d = (cls.options(name=name).remote() for name in "abcd")
    pids = dict(zip("abcd", crossfade.get([actor.pid.remote() for actor in (a, b, c, d)]), strict=True))
    say("actors", pids=pids)
    with crossfade.InputNode() as inp:
        first = a.tensor.bind(inp) if transport == "gloo" else a.work.bind(inp)
        chain = b.work.bind(first.with_tensor_transport(transport)).compile()
    with crossfade.InputNode() as inp:
        fan_in = c.work.bind(a.work.bind(inp), b.work.bind(inp)).compile(max_inflight=5)
    with crossfade.InputNode() as inp:
        apart = d.work.bind(inp).compile()
    graphs = {"chain": chain, "fan_in": fan_in, "apart": apart}
    return graphs, {"chain": ["a", "b"], "fan_in": ["a", "b", "c"], "apart": ["d"]}, pids


def main() -> None:
    """Runs until told to stop."""
    seed, transport = int(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "auto"
    is_over = threading.Event()
    if transport == "gloo":
        import torch  # noqa: F401  (reading the first tensor would, and take longer than an error may)
    try:
        graphs, actors_of, _ = build(crossfade.remote(Worker), transport)
    except crossfade.ActorError as error:
        say("error", graph="start", actor=error.actor, message=str(error), actors=list("abcd"))
        sys.stdin.read()
        return
    threads = [
        threading.Thread(target=run, args=(name, graph, actors_of[name], seed, is_over))
        for name, graph in graphs.items()
    ]
    for thread in threads:
        thread.start()
    say("running")
    sys.stdin.read()
    is_over.set()
    for thread in threads:
        thread.join()
    say("over")


if __name__ == "__main__":
    main()
