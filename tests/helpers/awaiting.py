"""What tests of event loops start and wait for, and the sessions that they do it in."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import crossfade

SESSIONS: dict[str, dict[str, Any]] = {
    "spin": {"spin_us": 150.0},
    "sleep": {"spin_us": 0.0},
    "inline": {"engine": "inline"},
}
"""Processes that look for work before they sleep, or sleep at once; and none."""


def write(path: Path, text: str = "") -> None:
    with open(path, "w") as file:
        file.write(text)


async def call(graph: crossfade.CompiledGraph, value: Any) -> Any:
    return await (await graph.execute_async(value))


async def result_of(future: Any) -> Any:
    return await future


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(work)
