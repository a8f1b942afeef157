"""The results of `benchmarks.hop_latency`: which targets they meet, as tables and as a report."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from benchmarks.common import Machine, Ratio, Series, Summary, Table, ratio, today
from benchmarks.hop_measures import (
    BLOCKING,
    BLOCKING_FUTEX_FACTOR,
    IDLE_LIMIT_PERCENT,
    IMPORT_LIMIT_US,
    MEASURES,
    START_UP_LIMIT_US,
)

NONE = "-"


@dataclass(frozen=True)
class Target:
    """One thing that has to hold, and whether it does."""

    what: str
    wanted: str
    measured: str
    is_met: bool


@dataclass
class Results:
    """Everything that was measured. Times are in microseconds.

    Attributes:
        import_us: ``import crossfade`` in fresh interpreters.
        init_us: from the first import to the end of ``init``, by library.
        idle: per cent of one core and number of processes, by library.
        incidents: blocks that failed, hung or could not be torn down.
    """

    import_us: list[float] = field(default_factory=list)
    init_us: dict[str, list[float]] = field(default_factory=dict)
    idle: dict[str, tuple[float, int]] = field(default_factory=dict)
    incidents: list[str] = field(default_factory=list)
    _series: dict[tuple[str, str], Series] = field(default_factory=dict)

    def series(self, side: str, key: str) -> Series:
        """The blocks of one measure on one side; empty where there are none."""
        return self._series.setdefault((side, key), Series())

    def summary(self, side: str, key: str) -> Summary | None:
        """All blocks of one measure on one side together."""
        return self.series(side, key).summary()

    def ray_ratio(self, key: str) -> Ratio | None:
        """How many times as long as crossfade Ray takes."""
        return ratio(self.series("ray", key), self.series("crossfade", key))

    def copy_ratio(self, side: str, key: str) -> Ratio | None:
        """How many memcpys of the same size, in the same block, it takes."""
        return ratio(self.series(side, key), self.series(side, f"{key} copy"))

    def verdicts(self) -> list[bool]:
        """Whether each target is met."""
        return [target.is_met for target in targets(self)]


def microseconds(value: float) -> str:
    """Three digits, in the unit that suits: ``4.31 us``, ``1.72 ms``, ``0.851 s``."""
    for unit, size in (("us", 1.0), ("ms", 1e3)):
        if value < 999.5 * size:
            return f"{value / size:.3g} {unit}"
    return f"{value / 1e6:.3g} s"


def _median(summary: Summary | None) -> str:
    return microseconds(summary.median) if summary else NONE


def _p99(summary: Summary | None) -> str:
    return microseconds(summary.p99) if summary and summary.num >= 100 else NONE


def _text(factor: Ratio | None) -> str:
    return str(factor) if factor else NONE


def _at_most(what: str, measured: float | None, limit: float) -> Target:
    shown = microseconds(measured) if measured is not None else NONE
    return Target(what, f"at most {microseconds(limit)}", shown, measured is not None and measured <= limit)


def targets(results: Results) -> Iterator[Target]:
    """All targets of what was measured; a failed block misses its target."""
    for measure in MEASURES:
        if not results.series("crossfade", measure.key).blocks:
            continue
        mine = results.summary("crossfade", measure.key)
        if measure.limit_us is not None:
            yield _at_most(f"{measure.title}, median", mine.median if mine else None, measure.limit_us)
        if measure.p99_limit_us is not None:
            yield _at_most(f"{measure.title}, p99", mine.p99 if mine else None, measure.p99_limit_us)
        against = results.ray_ratio(measure.key)
        if measure.ray_factor is not None and results.series("ray", measure.key).blocks:
            is_met = against is not None and against.median >= measure.ray_factor
            yield Target(
                f"{measure.title}, Ray / crossfade", f"at least {measure.ray_factor:g}", _text(against), is_met
            )
        if measure.copy_factor is not None:
            copies = results.copy_ratio("crossfade", measure.key)
            is_met = copies is not None and copies.median <= measure.copy_factor
            yield Target(f"{measure.title}, of one memcpy", f"at most {measure.copy_factor:g}", _text(copies), is_met)
    yield from _other_targets(results)


def _other_targets(results: Results) -> Iterator[Target]:
    futex = ratio(results.series("blocking", BLOCKING.key), results.series("futex apart", "futex apart"))
    if results.series("futex apart", "futex apart").blocks:
        is_met = futex is not None and futex.median <= BLOCKING_FUTEX_FACTOR
        yield Target(
            f"{BLOCKING.title}, of a C futex ping-pong on two cores",
            f"at most {BLOCKING_FUTEX_FACTOR}",
            _text(futex),
            is_met,
        )
    percent = results.idle["crossfade"][0] if "crossfade" in results.idle else None
    shown = NONE if percent is None else f"{percent:.3f} %"
    is_met = percent is not None and percent < IDLE_LIMIT_PERCENT
    yield Target("idle graph, all processes", f"under {IDLE_LIMIT_PERCENT} % of a core", shown, is_met)
    yield _at_most("import crossfade", statistics.median(results.import_us), IMPORT_LIMIT_US)
    started = results.summary("crossfade", "start first")
    init = statistics.median(results.init_us["crossfade"]) if results.init_us.get("crossfade") else 0.0
    total = started.median + init if started else None
    yield _at_most("4 actors started and a graph compiled, init and first result included", total, START_UP_LIMIT_US)


def tables(results: Results) -> list[Table]:
    """Everything, in the order of the report."""
    return [hop_table(results), limit_table(results), start_table(results), target_table(results)]


def hop_table(results: Results) -> Table:
    """crossfade beside Ray."""
    columns = ("what", "crossfade", "p99", "medians of blocks", "Ray", "p99", "Ray / crossfade")
    table = Table("crossfade beside Ray Compiled Graph", columns)
    for measure in MEASURES:
        mine, rays = results.summary("crossfade", measure.key), results.summary("ray", measure.key)
        if mine or rays:
            spread = results.series("crossfade", measure.key).spread()
            blocks = f"{microseconds(spread[0])} to {microseconds(spread[1])}" if spread else NONE
            factor = results.ray_ratio(measure.key)
            row = (measure.title, _median(mine), _p99(mine), blocks, _median(rays), _p99(rays))
            table.add(*row, _text(factor))
    for measure in MEASURES:
        if measure.request["measure"] == "throughput" and results.summary("crossfade", measure.key):
            _add_rates(table, results, measure.key)
    return table


def _add_rates(table: Table, results: Results, key: str) -> None:
    mine, rays = results.summary("crossfade", key), results.summary("ray", key)
    rates = [f"{1e6 / side.median:,.0f} /s" if side else NONE for side in (mine, rays)]
    table.add("the same as a rate", rates[0], NONE, NONE, rates[1], NONE, NONE)


def limit_table(results: Results) -> Table:
    """crossfade and Ray beside what the machine can do."""
    table = Table("Beside the limits of the machine", ("what", "measured", "limit", "of the limit", "first use"))
    rows = [
        (MEASURES[0].title, "crossfade", MEASURES[0].key, "spin", "spin", "Python shared-memory spin"),
        (BLOCKING.title, "blocking", BLOCKING.key, "futex apart", "futex apart", "C futex, a core each"),
        (BLOCKING.title, "blocking", BLOCKING.key, "futex", "futex", "C futex, one core"),
    ]
    for measure in MEASURES:
        if measure.copy_factor is not None:
            rows += [
                (f"{measure.title}, {side}", side, measure.key, side, f"{measure.key} copy", "one memcpy")
                for side in ("crossfade", "ray")
            ]
    for title, side, key, limit_side, limit_key, limit_name in rows:
        measured, limit = results.summary(side, key), results.summary(limit_side, limit_key)
        if measured and limit:
            factor = ratio(results.series(side, key), results.series(limit_side, limit_key))
            first = results.summary(side, f"{key} first")
            table.add(title, _median(measured), f"{_median(limit)} ({limit_name})", _text(factor), _median(first))
    return table


def start_table(results: Results) -> Table:
    """What it costs to be there: start-up, import, an idle graph."""
    table = Table("Start and idle", ("what", "crossfade", "Ray"))
    imports = microseconds(statistics.median(results.import_us)) if results.import_us else NONE
    table.add("import of the package, without torch", imports, NONE)
    inits = [results.init_us.get(side) for side in ("crossfade", "ray")]
    table.add("imports and init", *(microseconds(statistics.median(init)) if init else NONE for init in inits))
    for title, key in (
        ("4 actors started and a graph compiled", "compile"),
        ("the same and the first result", "first"),
    ):
        table.add(title, *(_median(results.summary(side, f"start {key}")) for side in ("crossfade", "ray")))
    idle = [results.idle.get(side) for side in ("crossfade", "ray")]
    cells = (f"{found[0]:.3f} % of a core, {found[1]} processes" if found else NONE for found in idle)
    table.add("an idle graph of 4 actors, one second after the last execution", *cells)
    return table


def target_table(results: Results) -> Table:
    """What has to hold."""
    table = Table("Targets", ("what", "wanted", "measured", "met"))
    for target in targets(results):
        table.add(target.what, target.wanted, target.measured, "yes" if target.is_met else "NO")
    return table


def losses(results: Results) -> list[str]:
    """Where Ray is faster, in words."""
    lines = []
    for measure in MEASURES:
        factor = results.ray_ratio(measure.key)
        if factor is not None and factor.median < 1:
            lines.append(f"- {measure.title}: crossfade takes {1 / factor.median:.2f} times as long as Ray.")
    return lines


METHOD = """\
Both libraries run the same graphs from the same code, each in a worker process of its own, in alternating blocks on
fresh actors. While one library's block runs, the other has no graph and no actors (Ray's own daemons stay). Every
value that came back was compared with what it had to be, outside the timed stretch. Medians and 99th percentiles are
of all samples of all blocks; ratios are the median of the blocks' ratios of medians, with the lowest and the highest.
A memcpy is `np.copyto` between two arrays that were touched before, in the same process, before and after the block.
The first use is the first execution of a new graph; for a tensor it includes the import of torch on the actor."""


def markdown(results: Results, shown: Sequence[Table], machine: Machine, arguments: Sequence[str], load: float) -> str:
    """The report."""
    command = " ".join(["python -m benchmarks.hop_latency", *arguments])
    lost = losses(results) or ["Nowhere in this run."]
    incidents = [f"- {incident}" for incident in results.incidents] or ["None."]
    parts = [
        "# Latency of a hop",
        f"{machine}. {today()}. Load average at the start: {load:.2f}.\n\n`{command}`",
        METHOD,
        *(table.markdown() for table in shown),
        "## Where crossfade is slower\n" + "\n".join(lost),
        "## Blocks that failed\n" + "\n".join(incidents),
    ]
    return "\n\n".join(parts) + "\n"
