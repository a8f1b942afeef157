"""A worker of `benchmarks.gpu_steps` that can hang, fail, and leave a process behind."""

from __future__ import annotations

import subprocess
import sys
import threading
from typing import Any

from benchmarks.gpu_steps import Request, Result, WrongValue, own_replies, serve


def echo(state: Any, request: Request) -> Result:
    print("not an answer")
    return {"samples": request["samples"]}


def fail(state: Any, request: Request) -> Result:
    raise WrongValue("2 is not 3")


def leave(state: Any, request: Request) -> Result:
    """Starts a process whose parent then ends, so that only the group still leads to it."""
    code = "import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', 'input()'], stdin=sys.stdin).pid)"
    done = subprocess.run([sys.executable, "-c", code], stdin=subprocess.PIPE, capture_output=True, check=True)
    return {"pid": int(done.stdout)}


def hang(state: Any, request: Request) -> Result:
    threading.Event().wait()
    return {}


if __name__ == "__main__":
    serve(None, {"echo": echo, "fail": fail, "leave": leave, "hang": hang}, own_replies())
