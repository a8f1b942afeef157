"""What a split says about itself: a row for each stage, and why it was cut there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from crossfade.pipelines.measure_stages import StageTimes


@dataclass(frozen=True, slots=True)
class StageReport:
    """One stage of a split: what it holds, and what one microbatch takes in it."""

    first: str
    """The qualified name of the module of its first operation, and the operation."""
    last: str
    """That of its last one."""
    times: StageTimes
    """What was measured of the stage as it runs."""
    parameter_bytes: int
    """Of its parameters, copies of shared ones included."""
    gradient_bytes: int
    """Of the gradients of those that need one."""
    buffer_bytes: int
    """Of its buffers."""

    @property
    def held_bytes(self) -> int:
        """Parameters, gradients and buffers: what it holds whatever runs."""
        return self.parameter_bytes + self.gradient_bytes + self.buffer_bytes


def format_stages(stages: Sequence[StageReport]) -> list[str]:
    """The lines of a table, with times in milliseconds."""
    rows = [["stage", "from", "to", "forward", "backward", "parameters", "activations", "sends"]]
    for index, stage in enumerate(stages):
        times = stage.times
        sizes = (stage.parameter_bytes, times.activation_bytes, times.sent_bytes)
        rows.append(
            [
                str(index),
                stage.first,
                stage.last,
                *(f"{us / 1e3:.2f} ms" for us in times.busier_us),
                *map(format_bytes, sizes),
            ]
        )
    return format_table(rows, num_left=3)


def format_table(rows: Sequence[Sequence[str]], num_left: int) -> list[str]:
    """Rows as lines in columns; the first ``num_left`` columns stand at the left, the others at the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if place < num_left else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def format_bytes(size: float) -> str:
    """A size for people: ``1.5 MB`` are 1.5e6 bytes."""
    for unit in ("B", "KB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.2f} GB"
