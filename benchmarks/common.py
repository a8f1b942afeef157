"""What every benchmark needs: statistics of blocks, the machine in words, tables for people and for Markdown."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

REPORTS = Path(__file__).with_name("reports")


@dataclass(frozen=True)
class Summary:
    """Many timings of one thing.

    Attributes:
        median: the middle one.
        p99: 99 of 100 are at most this.
        num: how many there were.
    """

    median: float
    p99: float
    num: int

    @classmethod
    def of(cls, samples: Sequence[float]) -> Summary:
        """Summarises at least one sample."""
        ordered = sorted(samples)
        return cls(statistics.median(ordered), ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)], len(ordered))


@dataclass
class Series:
    """The blocks of one measure on one side, in the order in which they ran.

    Attributes:
        blocks: the samples of each block; None for a block that gave none, so that blocks of two sides stay paired.
        errors: why blocks gave none.
    """

    blocks: list[list[float] | None] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def add(self, samples: Sequence[float]) -> None:
        """Appends a block."""
        self.blocks.append(list(samples))

    def fail(self, reason: str) -> None:
        """Appends a block that gave nothing."""
        self.blocks.append(None)
        self.errors.append(reason)

    def summary(self) -> Summary | None:
        """All blocks together; None where every block failed."""
        samples = [value for block in self.blocks if block for value in block]
        return Summary.of(samples) if samples else None

    def spread(self) -> tuple[float, float] | None:
        """The lowest and the highest median of a block."""
        medians = [statistics.median(block) for block in self.blocks if block]
        return (min(medians), max(medians)) if medians else None


@dataclass(frozen=True)
class Ratio:
    """Side by side: the median, lowest and highest ratio of the medians of paired blocks."""

    median: float
    low: float
    high: float
    num_pairs: int

    def __str__(self) -> str:
        spread = f" ({self.low:.2f} to {self.high:.2f})" if self.num_pairs > 1 else ""
        return f"{self.median:.2f}{spread}"


def ratio(over: Series, under: Series) -> Ratio | None:
    """The median of ``over`` divided by that of ``under``, block by block; None without a pair that worked."""
    pairs = zip(over.blocks, under.blocks, strict=False)
    ratios = [statistics.median(above) / statistics.median(below) for above, below in pairs if above and below]
    return Ratio(statistics.median(ratios), min(ratios), max(ratios), len(ratios)) if ratios else None


@dataclass(frozen=True)
class Machine:
    """The machine without its name: what a reader needs to judge a figure."""

    hardware: str
    cpu_model: str
    kernel: str
    versions: str

    def __str__(self) -> str:
        return f"{self.hardware}, {self.cpu_model}, Linux {self.kernel}; {self.versions}"


def this_machine(packages: Iterable[str]) -> Machine:
    """Describes where this runs; ``packages`` are those whose versions matter."""
    info = Path("/proc/cpuinfo").read_text()
    models = [line.split(":", 1)[1].strip() for line in info.splitlines() if line.startswith("model name")]
    num_cores = len(os.sched_getaffinity(0))
    kind = "vm" if "hypervisor" in info else "machine"
    kernel = ".".join(platform.release().split("-")[0].split(".")[:2])
    versions = [f"Python {platform.python_version()}", *(f"{name} {_version(name)}" for name in packages)]
    return Machine(f"{num_cores}-core-{kind}", models[0] if models else platform.machine(), kernel, ", ".join(versions))


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"


@dataclass
class Table:
    """Rows of text, printed by rich or as Markdown."""

    title: str
    columns: Sequence[str]
    rows: list[Sequence[str]] = field(default_factory=list)

    def add(self, *cells: str) -> None:
        """Appends a row, as long as ``columns``."""
        if len(cells) != len(self.columns):
            raise ValueError(f"a row of {len(cells)} cells for {len(self.columns)} columns")
        self.rows.append(cells)

    def markdown(self) -> str:
        """A heading and a table."""
        lines = [self.columns, ["---"] * len(self.columns), *self.rows]
        return f"## {self.title}\n" + "\n".join(f"| {' | '.join(cells)} |" for cells in lines)

    def show(self) -> None:
        """Prints it for people."""
        import rich.box
        import rich.table
        from rich.console import Console

        table = rich.table.Table(title=self.title, title_justify="left", box=rich.box.SIMPLE)
        for index, column in enumerate(self.columns):
            table.add_column(column, justify="left" if index == 0 else "right", overflow="fold")
        for cells in self.rows:
            table.add_row(*cells)
        Console(width=None if os.isatty(1) else 160).print(table)


def today() -> str:
    """The date, as reports name it."""
    return datetime.now(UTC).date().isoformat()


def write_report(question: str, machine: Machine, text: str) -> Path:
    """Writes ``reports/<question>_<hardware>_<date>.md`` and returns its path."""
    REPORTS.mkdir(exist_ok=True)
    path = REPORTS / f"{question}_{machine.hardware}_{today()}.md"
    path.write_text(text)
    return path
