"""Builds crossfade: pure Python, or with its hot modules compiled by mypyc where ``CROSSFADE_COMPILE=1`` asks for that.

The source is the same: mypyc makes C of the modules in `HOT`. Everything else about the package stands in pyproject.toml.
"""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from contextlib import chdir
from pathlib import Path
from typing import Any

from setuptools import setup

ROOT = Path(__file__).resolve().parent

HOT = (
    "api/execution",
    "api/executions",
    "api/watchers",
    "channels/protocol",
    "channels/ring_layout",
    "channels/shm_reader",
    "channels/shm_ring",
    "channels/slots",
    "channels/values/codec",
    "channels/values/layout",
    "edges/pinned",
    "engines/actor",
    "engines/actor_part",
    "engines/driver",
    "engines/local_plan",
    "host/doorbell",
    "host/semaphore",
    "runtime/bind",
    "runtime/cursor",
    "runtime/intake",
    "runtime/run",
)
"""What a value passes, under ``src/crossfade``. Left out, though on a value's way:

- ``interrupted``: it finds out from frames where an interrupt comes, and a compiled function has none.
- ``api/compiled``, ``api/refs``: the doors, whose frames say that an interrupt has to wait; users subclass and refer weakly to
  what is in them.
"""


def extensions() -> list[Any]:
    """The hot modules as C extensions, if that is asked for and can be done."""
    if os.environ.get("CROSSFADE_COMPILE", "0") in ("", "0"):
        return []
    compiler = (os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc").split()[0]
    if shutil.which(compiler) is None:
        print(
            f"crossfade: there is no C compiler ({compiler}), so the package is built as pure Python", file=sys.stderr
        )
        return []
    from mypyc.build import mypycify

    with chdir(ROOT / "src"):  # what tracebacks call a file is then the same as in an installed package
        paths = [f"crossfade/{name}.py" for name in HOT]
        options = ["--config-file", str(ROOT / "mypyc.ini")]
        return mypycify([*options, *paths], opt_level="3", target_dir=str(ROOT / "build"), group_name="crossfade")


setup(ext_modules=extensions())
