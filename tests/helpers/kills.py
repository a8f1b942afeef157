"""Kills a random process of a running program at a random moment, and looks at what becomes of the rest."""

from __future__ import annotations

import json
import os
import queue
import random
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

import crossfade
from tests.helpers.calm import calm_s
from tests.helpers.footprint import names_left, shared_names

_lock = threading.Lock()


def say(kind: str, **what: Any) -> None:
    """One line to the test."""
    with _lock:
        print(json.dumps({"kind": kind, "at": calm_s(), **what}), flush=True)


class Worker:
    def pid(self) -> int:
        import os

        return os.getpid()

    def work(self, *values: Any) -> Any:
        return values[0] if len(values) == 1 else [np.asarray(value) for value in values]

    def tensor(self, value: Any) -> Any:
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
    apart = d.work.bind(crossfade.InputNode()).compile()
    graphs = {"chain": chain, "fan_in": fan_in, "apart": apart}
    return graphs, {"chain": ["a", "b"], "fan_in": ["a", "b", "c"], "apart": ["d"]}, pids


def main() -> None:
    transport, *preload = sys.argv[2:]
    seed = int(sys.argv[1])
    is_over = threading.Event()
    if transport == "gloo":
        import torch  # noqa: F401  (reading the first tensor would, and take longer than an error may)
    crossfade.init(preload=preload)
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


ROOT = Path(__file__).parents[2]
LIMIT_S = 1.0
"""How long an error, or the end of a process, may take."""

_MARK = "CROSSFADE_TEST_RUN"
_START_S = 60.0


class _Program:
    def __init__(self, seed: int, transport: str, preload: Sequence[str]) -> None:
        self.mark = uuid.uuid4().hex
        command = [sys.executable, "-m", "tests.helpers.kills", str(seed), transport, *preload]
        env = {**os.environ, _MARK: self.mark, "OMP_NUM_THREADS": "1"}
        self.popen = subprocess.Popen(
            command, cwd=ROOT, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self._said: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self.stderr = ""
        self._threads = [threading.Thread(target=self._listen), threading.Thread(target=self._listen_to_errors)]
        for thread in self._threads:
            thread.start()

    def _listen(self) -> None:
        assert self.popen.stdout is not None
        for line in self.popen.stdout:
            with suppress(json.JSONDecodeError):  # half a line, of a program that was killed
                self._said.put(json.loads(line))
        self._said.put(None)

    def _listen_to_errors(self) -> None:
        assert self.popen.stderr is not None
        self.stderr = self.popen.stderr.read()

    def hear(self, timeout_s: float) -> dict[str, Any] | None:
        """The next thing that it says; None when it has ended; queue.Empty if it said nothing."""
        return self._said.get(timeout=timeout_s)

    def processes(self) -> dict[int, str]:
        """Every process of it, with its state."""
        found = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with suppress(OSError):
                    if f"{_MARK}={self.mark}".encode() in (entry / "environ").read_bytes():
                        found[int(entry.name)] = (entry / "stat").read_text().rpartition(")")[2].split()[0]
        return found

    def end(self) -> None:
        assert self.popen.stdin is not None
        with suppress(OSError):
            self.popen.stdin.close()

    def close(self) -> None:
        """Leaves nothing, whatever has happened."""
        self.popen.kill()
        for pid in self.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.popen.wait()
        for thread in self._threads:
            thread.join()
        for stream in (self.popen.stdin, self.popen.stdout, self.popen.stderr):
            if stream is not None:
                with suppress(OSError):
                    stream.close()


@contextmanager
def _started(seed: int, transport: str, preload: Sequence[str]) -> Iterator[_Program]:
    program = _Program(seed, transport, preload)
    try:
        yield program
    except BaseException:
        program.close()
        print(f"seed {seed}, {transport}:\n{program.stderr}")
        raise
    finally:
        program.close()


def kill_once(seed: int, *, transport: str = "auto", preload: Sequence[str] = ()) -> str:
    """One run: starts the program, kills one of its processes, checks what the design promises (CH-3).

    Every blocked and later get raises within a second an error that names the dead actor; graphs without it go on; nothing is
    left of a killed driver's actors, or of the whole program once it has ended. Gives what was killed.
    """
    chooser = random.Random(seed)
    before = shared_names()
    with _started(seed, transport, preload) as program:
        victim, pid = _choose_victim(program, chooser)
        killed_at = calm_s()
        os.kill(pid, signal.SIGKILL)
        if victim == "driver":
            _check_all_gone(program, killed_at)
        else:
            _check_errors(program, victim, killed_at)
            ended_at = calm_s()
            program.end()
            assert program.popen.wait(timeout=20) == 0, program.stderr
            _check_all_gone(program, max(ended_at, calm_s()))
    assert not names_left(before)
    return victim


def _choose_victim(program: _Program, chooser: random.Random) -> tuple[str, int]:
    """Waits for a random moment: any from the first actor's start on."""
    early = chooser.random() < 0.2
    pids: dict[str, int] = {}
    while not pids or not early:
        said = program.hear(_START_S)
        assert said is not None, program.stderr
        pids = said.get("pids", pids)
        if said["kind"] == "running":
            break
    time.sleep(chooser.random() * (0.02 if early else 0.3))  # the moment is what is random here
    victim = chooser.choice(("driver", *pids))
    return victim, program.popen.pid if victim == "driver" else pids[victim]


def _check_all_gone(program: _Program, since: float) -> None:
    program.popen.wait(timeout=20)
    while alive := [pid for pid, state in program.processes().items() if state not in "ZX"]:
        assert calm_s() - since < LIMIT_S, f"processes {alive} are still there"
        time.sleep(0.01)


def _check_errors(program: _Program, victim: str, killed_at: float) -> None:
    """Every graph with the dead actor reports it in time and refuses everything later; the others go on."""
    expected = {"chain": "ab", "fan_in": "abc", "apart": "d"}
    missing = {name for name, actors in expected.items() if victim in actors}
    refused: set[str] = set()
    while missing or refused:
        try:
            said = program.hear(LIMIT_S + 5)
        except queue.Empty:
            raise AssertionError(f"{missing or refused} said nothing after {victim} had died") from None
        assert said is not None, program.stderr
        if said["kind"] == "error":
            assert said["actor"] == victim, said
            assert victim in said["message"], said
            assert "SIGKILL" in said["message"], said
            if said["graph"] == "start" and victim in "cd":
                return  # the driver was opening a graph that does not need it
            assert said["at"] - killed_at < LIMIT_S, said
            if said["graph"] == "start":
                return
            missing.discard(said["graph"])
            refused.add(said["graph"])
        elif said["kind"] == "later":
            assert said["num_refused"] >= 1, said
            refused.discard(said["graph"])
        else:
            assert said["kind"] in ("running", "stopped"), said


if __name__ == "__main__":
    main()
