"""How many GPUs the tests have."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

FOLDERS = Path(__file__).resolve().parents[1]


@cache
def num_gpus() -> int:
    try:
        import cuda.bindings.driver
        import torch
    except ImportError:
        return 0
    return torch.cuda.device_count() if cuda.bindings.driver else 0


def skip_without(num: int, folder: str, items: list[pytest.Item]) -> None:
    """Skips a folder's tests, with the reason, on a machine with fewer GPUs."""
    if num_gpus() >= num:
        return
    mark = pytest.mark.skip(reason=f"needs {num} GPU(s), torch and cuda-bindings; there are {num_gpus()} GPU(s) to use")
    for item in items:
        if item.path.is_relative_to(FOLDERS / folder):
            item.add_marker(mark)
