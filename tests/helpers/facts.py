"""An actor that tells what it finds in its process. It imports little, so that its process has little that others have not."""

from __future__ import annotations

import os
import signal
import sys
import threading
from typing import Any


class Facts:
    def modules(self) -> set[str]:
        return set(sys.modules)

    def surroundings(self) -> dict[str, Any]:
        """What differs between processes that were started in different ways."""
        import gc
        import re
        import resource
        from contextlib import suppress

        files = []
        for fd in os.listdir("/proc/self/fd"):
            with suppress(OSError):
                files.append(re.sub(r"\d+", "N", os.readlink(f"/proc/self/fd/{fd}")))
        with open("/proc/self/status") as status:
            names = ("Umask", "SigBlk", "SigIgn", "SigCgt", "Threads", "NoNewPrivs", "Cpus_allowed")
            lines = [line for line in status if line.startswith(names)]
        return {
            "argv": sys.argv,
            "path": sys.path,
            "folder": os.getcwd(),
            "environment": dict(os.environ),
            "flags": str(sys.flags),
            "streams": [(s.fileno(), s.encoding, vars(s), str(s), s.isatty()) for s in (sys.stdout, sys.stderr)],
            "stdin": os.readlink("/proc/self/fd/0"),
            "files": sorted(files),
            "inheritable": [fd for fd in range(3, 64) if _is_inheritable(fd)],
            "signals": {number: str(signal.getsignal(number)) for number in signal.valid_signals()},
            "status": lines,
            "limits": [resource.getrlimit(limit) for limit in range(16)],
            "group": (os.getpgrp(), os.getsid(0)),
            "threads": sorted(thread.name for thread in threading.enumerate()),
            "gc": (gc.isenabled(), gc.get_threshold()),
        }

    def parent(self) -> int:
        return os.getppid()

    def pid(self) -> int:
        return os.getpid()

    def numbers(self, *others: str) -> set[float]:
        """Drawn from Python's, numpy's and others' generators."""
        import importlib
        import random

        import numpy as np

        numbers = {random.random(), float(np.random.rand())}
        return numbers | {float(importlib.import_module(name).rand(1)) for name in others}

    def product(self) -> float:
        import numpy as np

        return float((np.ones((100, 300)) @ np.ones((300, 100)))[:, 0].sum())

    def variable(self, name: str) -> str | None:
        return os.environ.get(name)

    def say(self, text: str) -> None:
        print(text)

    def leave(self, code: int) -> None:
        os._exit(code)

    def signal(self, number: int) -> None:
        os.kill(os.getpid(), number)


def _is_inheritable(fd: int) -> bool:
    try:
        return os.get_inheritable(fd)
    except OSError:
        return False
