"""torch's own tests of transfers and pipelines over the backend ``crossfade``, on CPU tensors.

``python -m tests.soak.torch_tests transfers [-v] [-k NAME ...]`` runs those of torch.distributed that come with torch: send, recv,
isend, irecv, batches and receives from any rank unless other names are given, on as many ranks as ``WORLD_SIZE`` says, or three.
``python -m tests.soak.torch_tests FILE [-v] [-k NAME ...]`` runs a file of ``test/distributed/pipelining`` in a checkout of torch.

They need the package expecttest. What they would skip without GPUs or NCCL, or with another backend than gloo, is run.
"""

from __future__ import annotations

import importlib
import os
import sys
import tempfile
import unittest
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from crossfade.p2p.backend import NAME

TRANSFERS = ("send_recv", "test_isend", "test_irecv", "batch_isend_irecv")
LIMIT_S = 60


def _as_it_is(*_: Any, **__: Any) -> Callable[[Any], Any]:
    return lambda test: test


def transfers() -> Any:
    """The class of torch's tests of its calls. Their decorators see gloo, and they themselves crossfade."""
    for name, value in {"BACKEND": "gloo", "WORLD_SIZE": "3", "TEMP_DIR": tempfile.gettempdir()}.items():
        os.environ.setdefault(name, value)
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    common: Any = importlib.import_module("torch.testing._internal.common_distributed")
    common.TIMEOUT_DEFAULT = LIMIT_S
    tests: Any = importlib.import_module("torch.testing._internal.distributed.distributed_test")
    tests.BACKEND = NAME

    class TestTransfers(tests.TestDistBackend, tests.DistributedTest._DistTestBase):  # type: ignore[misc]
        def setUp(self) -> None:
            super().setUp()
            self._spawn_processes()

    TestTransfers.__qualname__ = "TestTransfers"  # where other processes find it
    return TestTransfers


def pipelines(path: Path) -> dict[str, Any]:
    """The classes of a file of pipelining tests, with this backend in the place of the device's."""
    common: Any = importlib.import_module("torch.testing._internal.common_distributed")
    utils: Any = importlib.import_module("torch.testing._internal.common_utils")
    for module, name in (
        (common, "requires_accelerator_dist_backend"),
        (common, "skip_if_lt_x_gpu"),
        (utils, "skip_but_pass_in_sandcastle_if"),
    ):
        setattr(module, name, _as_it_is)
    distributed: Any = dist
    distributed.get_default_backend_for_device = lambda device: NAME
    sys.path.insert(0, str(path.parent))
    tests = importlib.import_module(path.stem)
    return {
        name: each for name, each in vars(tests).items() if isinstance(each, type) and each.__name__.endswith("Test")
    }


# The processes that the tests start import this module again, as their main one, and have to find the same there.
if __name__ in ("__main__", "__mp_main__"):
    if sys.argv[1] == "transfers":
        TestTransfers = transfers()
    else:
        globals().update(pipelines(Path(sys.argv[1]).resolve()))

if __name__ == "__main__":
    chosen = sys.argv[2:]
    if sys.argv[1] == "transfers" and "-k" not in chosen:
        chosen += [word for name in TRANSFERS for word in ("-k", name)]
    unittest.main(argv=[sys.argv[0], *chosen])
