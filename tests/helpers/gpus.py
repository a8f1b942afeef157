"""How many GPUs the tests have."""

from __future__ import annotations

from functools import cache

import pytest


@cache
def num_gpus() -> int:
    try:
        import cuda.bindings.driver
        import torch
    except ImportError:
        return 0
    return torch.cuda.device_count() if cuda.bindings.driver else 0


def skip_without_gpus(items: list[pytest.Item]) -> None:
    """Skips the tests of a folder such as ``gpu2``, with the reason, on a machine with fewer GPUs."""
    for item in items:
        folder = item.path.parent.name
        if folder.startswith("gpu") and num_gpus() < int(folder[3:]):
            need = f"needs {folder[3:]} GPU(s), torch and cuda-bindings; there are {num_gpus()} GPU(s) to use"
            item.add_marker(pytest.mark.skip(reason=need))
