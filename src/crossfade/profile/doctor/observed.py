"""What a record tells of the machine that no fix of the program changes, and that bears on what is said of fixes."""

from __future__ import annotations

from collections.abc import Sequence

from crossfade.profile.traces.events import RankTrace


def observed(traces: Sequence[RankTrace]) -> tuple[str, ...]:
    """Sentences, one for each thing and rank; none for traces without a record."""
    found = []
    for trace in traces:
        record = trace.record
        if record is None:
            continue
        if record.untraced_us:
            found.append(
                f"{trace.label}: a step without the profiler takes {record.untraced_us / 1e3:.3f} ms, as measured before"
            )
        if record.load is not None and record.load.is_at_power_limit:
            found.append(
                f"{trace.label}: the GPU is at its power limit ({record.load}): communication that is hidden lowers the clock"
                " further, so less is won than predicted"
            )
        if record.num_retried:
            found.append(
                f"{trace.label}: GPU memory was full: torch freed its cache {record.num_retried} times before it could allocate"
            )
        if record.environment.get("CUDA_LAUNCH_BLOCKING", "0") not in ("", "0"):
            found.append(f"{trace.label}: CUDA_LAUNCH_BLOCKING is set: each launch waits for its kernel")
    return tuple(found)
