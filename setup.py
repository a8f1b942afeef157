"""Builds crossfade: pure Python, or with its hot modules compiled by mypyc where ``CROSSFADE_COMPILE=1`` asks for that.

The source is the same: mypyc makes C of the modules in `HOT`. Everything else about the package stands in pyproject.toml.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import sysconfig
from contextlib import chdir
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from setuptools import setup

ROOT = Path(__file__).resolve().parent

HOT = (
    "api/execution",
    "api/executions",
    "api/watchers",
    "channels/landing",
    "channels/protocol",
    "channels/ring_layout",
    "channels/shm_reader",
    "channels/shm_ring",
    "channels/slots",
    "channels/tcp",
    "channels/values/arrays",
    "channels/values/codec",
    "channels/values/layout",
    "channels/wire",
    "channels/wire_frames",
    "edges/pinned",
    "engines/actor",
    "engines/actor_part",
    "engines/driver",
    "engines/local_plan",
    "host/cores",
    "host/doorbell",
    "host/semaphore",
    "p2p/board",
    "p2p/cells",
    "p2p/copies",
    "p2p/letters",
    "p2p/matching",
    "p2p/pair",
    "p2p/pairs",
    "p2p/pull_streams",
    "p2p/transfer",
    "p2p/under_way",
    "p2p/windows",
    "p2p/work",
    "runtime/bind",
    "runtime/cursor",
    "runtime/intake",
    "runtime/run",
    "schedule/causes",
    "schedule/cores",
    "schedule/gpus",
    "schedule/progress",
    "schedule/simulate",
    "schedule/strands",
)
"""What a value passes, and the simulator (``schedule``), under ``src/crossfade``. Left out, though on a value's way:

- ``interrupted``: it finds out from frames where an interrupt comes, and a compiled function has none.
- ``api/compiled``, ``api/refs``: the doors, whose frames say that an interrupt has to wait; users subclass and refer weakly to
  what is in them.
- ``p2p/communicator``: the door of transfers. ``p2p/carrier``: modules that are not compiled have subclasses of what is in it.
- ``p2p/memory``, ``p2p/waiting``, ``p2p/attendant``: set-up, and what waits.
- ``device/*``, ``host/mailbox``: the edges of devices, which stay pure so far, share them.
"""


MYPYC = "mypy==2.4.1"
"""What compiles; pip fetches it for a build in isolation. Pinned: a compiler's faults are a version's."""


def is_to_compile() -> bool:
    """Whether compiling is asked for and can be done."""
    if os.environ.get("CROSSFADE_COMPILE", "0") in ("", "0"):
        return False
    compiler = (os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc").split()[0]
    if shutil.which(compiler) is None:
        print(
            f"crossfade: there is no C compiler ({compiler}), so the package is built as pure Python", file=sys.stderr
        )
        return False
    return True


def extensions() -> list[Any]:
    """The hot modules as C extensions."""
    from mypyc.build import mypycify

    with chdir(ROOT / "src"):  # what tracebacks call a file is then the same as in an installed package
        paths = [f"crossfade/{name}.py" for name in HOT]
        options = ["--config-file", str(ROOT / "mypyc.ini")]
        made = mypycify([*options, *paths], opt_level="3", target_dir=str(ROOT / "build"), group_name="crossfade")
        num_left_out = sum(leave_out_spares(Path(source)) for source in {each for ext in made for each in ext.sources})
        if not num_left_out:
            raise SystemExit(f"crossfade: mypyc keeps spares in a way that is not known: build with {MYPYC}")
        return made


def leave_out_spares(source: Path) -> int:
    """Takes mypyc's spares out of C that it made: a closure or a generator that is freed is not kept for the next of its kind.

    mypyc 2.4.1 offers a spare before it has let go of what the freed one holds. Where letting go runs other code (a finalizer, or
    another thread, as one is let in), that code can be given the spare, and then loses from it what it has just put there. Gives
    how many kinds have none.
    """
    text = source.read_text(encoding="utf-8")
    kept = re.compile(r"if \((\w+_free_instance) == NULL\) \{(?=\s*\1 = self;)")
    source.write_text(kept.sub("if (0) {", text), encoding="utf-8")
    return len(kept.findall(text))


if not is_to_compile():
    setup()
elif find_spec("mypyc") is None:  # pip asks first what has to be fetched
    setup(setup_requires=[MYPYC])
else:
    setup(ext_modules=extensions())
