"""Runs the cases of a module on every rank, in processes that all of its cases share, on a CPU or with a GPU each."""

from __future__ import annotations

import traceback
from importlib import import_module
from typing import Any

import torch.distributed as dist

from tests.helpers import peer_cases, peer_gpu_cases
from tests.helpers.device_pair import run_workers


def _work(peers: dict[int, Any], rank: int, num_ranks: int, device: str, store: str, module: str) -> dict[str, str]:
    """What each case said, as far as they went: after a failure the ranks are out of step."""
    if device == "cpu":
        peer_cases.join_world(rank, num_ranks, store)
    else:
        peer_gpu_cases.start(rank, num_ranks, store)
    said: dict[str, str] = {}
    name = ""
    try:
        for name, case in import_module(module).CASES.items():
            case(device)
            said[name] = "ok"
    except Exception:
        said[name] = traceback.format_exc()
    finally:
        dist.destroy_process_group()
    return said


def run_module(module: str, num_ranks: int, device: str, store: str, timeout_s: float) -> dict[str, list[str]]:
    """For each of the module's ``CASES``, functions of the kind of device, what every rank said."""
    args = [(rank, num_ranks, device, store, module) for rank in range(num_ranks)]
    results = run_workers([_work] * num_ranks, args, timeout_s=timeout_s)
    names = import_module(module).CASES
    return {name: [result.get(name, "did not come to it") for result in results] for name in names}
