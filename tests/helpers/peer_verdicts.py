"""Runs `tests.helpers.peer_kills` in a process of its own, and judges what it says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

NOTICE_S = 2.0
ROOT = Path(__file__).parents[2]


def judge(row: dict[str, Any]) -> None:
    """Every other rank has heard who died, in time, and has what it had before."""
    for rank, answer in row["answers"].items():
        what = f"seed {row['seed']}, {row['moment']}, rank {rank}: {answer}"
        assert "failed" not in answer, f"{what}\n{answer.get('failed')}"
        assert f"{row['victim']} died" in answer["text"], what
        assert answer["noticed"] - row["killed"] < NOTICE_S, what
        grown = answer["grown"]
        assert not {"num_descriptors", "num_threads", "num_ring_mappings"} & set(grown), what
        assert grown.get("private_bytes", 0) < 16 << 20, what


def kill_many(first_seed: int, num_kills: int, timeout_s: float) -> Counter[str]:
    """So many kills; how many there were at each kind of moment."""
    ran = subprocess.run(
        [sys.executable, "-m", "tests.helpers.peer_kills", str(first_seed), str(num_kills)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    rows = [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("{")]
    assert ran.returncode == 0, ran.stderr
    for row in rows:
        judge(row)
    assert len(rows) == num_kills
    return Counter(row["moment"] for row in rows)
