"""``python -m tests.helpers.torchrun PROGRAM``: two ranks, as of torchrun, but forked off this process, which has torch."""

from __future__ import annotations

import runpy
import sys

from torch.distributed.launcher.api import LaunchConfig, elastic_launch


def run(program: str) -> None:
    sys.argv[:] = [program]
    runpy.run_path(program, run_name="__main__")


if __name__ == "__main__":
    config = LaunchConfig(1, 1, 2, run_id="test", rdzv_backend="c10d", rdzv_endpoint="localhost:0", start_method="fork")
    elastic_launch(config, run)(sys.argv[1])
