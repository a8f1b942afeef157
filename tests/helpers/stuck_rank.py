"""A rank for tests of `benchmarks.tile_crew`, started like ``benchmarks.tile_worker``: it answers, fails or hangs as it is told."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

from benchmarks.gpu_steps import own_replies, serve
from benchmarks.tile_worker import PROGRESS


def join(own: int, request: Any) -> dict[str, Any]:
    return {"machine": f"a machine, {request['store']}"}


def row(own: int, request: Any) -> dict[str, Any]:
    Path(sys.argv[4], PROGRESS).write_text("rounds|captured")
    if own == request.get("failing"):
        raise RuntimeError("no memory")
    if own in request.get("hanging", ()):
        threading.Event().wait()
    return {"rank": own}


if __name__ == "__main__":
    serve(int(sys.argv[1]), {"join": join, "row": row}, own_replies())
