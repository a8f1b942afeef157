"""What an event loop adds to a hop: awaited executions beside blocking ones, in alternating blocks within one run.

Run ``python -m benchmarks.asyncio_hops`` from the root of the repository: ``--quick`` for a smoke run, ``--report`` to write the
Markdown report. One actor, a small integer out and back, every value checked.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Sequence
from typing import Any

import crossfade
from benchmarks.common import Series, Table, ratio, this_machine, today, write_report

WANTED_RATIO = 2.0
NUM_AT_ONCE = 1_000
WARM_UP_S = 0.5


class Echo:
    """Gives back what it gets."""

    def echo(self, value: int) -> int:
        return value


def _checked(got: object, sent: object) -> None:
    if got != sent:
        raise AssertionError(f"{sent} came back as {got}")


def warm_up(graph: Any) -> None:
    """The cores of a virtual machine take a while to reach their speed."""
    end = time.monotonic() + WARM_UP_S
    while time.monotonic() < end:
        graph.execute(0).get()


def blocking(graph: Any, num: int) -> list[float]:
    """Round trips by ``execute`` and ``get``, in seconds."""
    samples = []
    for number in range(num):
        start = time.perf_counter()
        got = graph.execute(number).get()
        samples.append(time.perf_counter() - start)
        _checked(got, number)
    return samples


async def awaited(graph: Any, num: int) -> list[float]:
    """Round trips by ``execute_async`` and ``await``, one after another."""
    samples = []
    for number in range(num):
        start = time.perf_counter()
        got = await (await graph.execute_async(number))
        samples.append(time.perf_counter() - start)
        _checked(got, number)
    return samples


async def at_once(graph: Any) -> list[float]:
    """The time of one of many executions that are awaited at once."""

    async def one(number: int) -> Any:
        return await (await graph.execute_async(number))

    start = time.perf_counter()
    got = await asyncio.gather(*[one(number) for number in range(NUM_AT_ONCE)])
    took_s = time.perf_counter() - start
    _checked(list(got), list(range(NUM_AT_ONCE)))
    return [took_s / NUM_AT_ONCE]


async def idle_cpu_s() -> float:
    """CPU time of this process while its loop waits for a second."""
    before = time.process_time()
    await asyncio.sleep(1.0)
    return time.process_time() - before


def measure(num_rounds: int, num: int) -> tuple[dict[str, Series], float]:
    """All blocks of all sides, and the CPU time of an idle loop in seconds of one second."""
    sides = {name: Series() for name in ("blocking", "awaited", "at once")}
    actor = crossfade.remote(Echo).remote()
    with crossfade.InputNode() as inp:
        graph = actor.echo.bind(inp).compile()
    idle_s = 0.0
    for number in range(num_rounds):
        print(f"round {number + 1} of {num_rounds}")
        warm_up(graph)
        sides["blocking"].add(blocking(graph, num))
        sides["awaited"].add(asyncio.run(awaited(graph, num)))
        sides["at once"].add([sample for _ in range(5) for sample in asyncio.run(at_once(graph))])
        idle_s = max(idle_s, asyncio.run(idle_cpu_s()))
    crossfade.shutdown()
    return sides, idle_s


def table(sides: dict[str, Series]) -> Table:
    """What was measured."""
    shown = Table("An event loop beside blocking calls", ("what", "median", "p99", "of the blocking hop"))
    for name, title in (
        ("blocking", "execute, get"),
        ("awaited", "execute_async, await, one after another"),
        ("at once", f"{NUM_AT_ONCE} awaited at once, for each"),
    ):
        summary, beside = sides[name].summary(), ratio(sides[name], sides["blocking"])
        if summary is None or beside is None:
            continue
        of = "-" if name == "blocking" else f"{beside.median:.2f} ({beside.low:.2f} to {beside.high:.2f})"
        p99 = "-" if name == "at once" else f"{summary.p99 * 1e6:.1f} us"
        shown.add(title, f"{summary.median * 1e6:.2f} us", p99, of)
    return shown


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, prints, writes the report; 1 when the target was missed."""
    parser = argparse.ArgumentParser(prog="benchmarks.asyncio_hops", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one short round")
    parser.add_argument("--report", action="store_true", help="write the report into benchmarks/reports/")
    options = parser.parse_args(arguments)
    sides, idle_s = measure(1 if options.quick else 7, 500 if options.quick else 10_000)
    beside = ratio(sides["awaited"], sides["blocking"])
    is_met = beside is not None and beside.median <= WANTED_RATIO
    shown = table(sides)
    shown.show()
    verdict = (
        f"Awaited hop at most {WANTED_RATIO:g} x of a blocking one: {'met' if is_met else 'MISSED'}. "
        f"CPU time of a loop that waits for a second: {idle_s * 1e3:.2f} ms."
    )
    print(verdict)
    if options.report:
        machine = this_machine(("crossfade",))
        command = f"python -m benchmarks.asyncio_hops {' '.join(sys.argv[1:])}"
        where = f"{machine.hardware}, {machine.cpu_model}, Linux {machine.kernel}; {machine.versions}"
        how = (
            "Alternating blocks in one run, after half a second of work each round; the ratio is of medians of paired "
            "blocks, with the lowest and the highest. Every value was checked."
        )
        lines = [
            "# An event loop beside blocking calls",
            f"`{command}`, {today()}; {where}.",
            how,
            shown.markdown(),
            verdict,
        ]
        text = "\n\n".join(lines) + "\n"
        print(f"wrote {write_report('asyncio', machine, text).name}")
    return 0 if is_met else 1


if __name__ == "__main__":
    sys.exit(main())
