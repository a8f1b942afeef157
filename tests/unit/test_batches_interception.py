"""What interleaving replaces in torch is there only meanwhile; what it needs is named."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

pytest.importorskip("torch", reason="batches are torch's")
pytest.importorskip("greenlet", reason="parts are greenlets: pip install crossfade[batches]")

import torch
import torch.distributed as dist

from crossfade.batches.carriers import ProcessGroups
from crossfade.batches.interception import METHODS, PACKETS, installed
from crossfade.batches.parts import Run


def test_what_was_replaced_is_put_back() -> None:
    def now() -> list[Any]:
        methods = [vars(dist.ProcessGroup).get(name) for name in METHODS]
        return [*methods, *(getattr(getattr(torch.ops, space), PACKETS[space].split()[0]) for space in PACKETS)]

    before = now()
    during = Run(ProcessGroups()).go([now, lambda: None])[0]
    assert all(ours is not theirs for ours, theirs in zip(before, during, strict=True) if theirs is not None)
    assert all(ours is theirs for ours, theirs in zip(before, now(), strict=True))
    with pytest.raises(ZeroDivisionError):
        Run(ProcessGroups()).go([lambda: 1 / 0, lambda: None])
    assert all(ours is theirs for ours, theirs in zip(before, now(), strict=True))
    assert installed._num_users == 0


def test_without_greenlet_the_error_names_the_extra() -> None:
    code = (
        "import sys\n"
        "sys.modules['greenlet'] = None\n"
        "import crossfade, torch\n"
        "try: crossfade.interleave(torch.nn.Linear(1, 1))\n"
        "except crossfade.MissingDependency as error: print(error.hint)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.strip() == "pip install 'crossfade[batches]'", done.stderr
