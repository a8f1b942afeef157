"""What a transfer costs the matrix product that runs at the same time on the GPU to which it goes, and what that comes from.

Run ``python -m benchmarks.gpu_transfer_cost`` from the root of the repository: ``--report`` to write the Markdown report,
``--quick`` for a trial with small tensors. It needs two GPUs with peer access, or more: transfers come from the others in turn.
Products of 10000 x 10000 fp16 follow each other without a pause; beneath each goes one tensor of that size, in several ways: by the
copy engine of the GPU that sends (as ``copy`` edges do) or of the one that receives, in pieces with pauses, and from memory of the
same GPU. If it were memory or caches that the two compete for, it would matter how fast the bytes come. If it is the power limit,
it would not, and products that take less power would lose nothing: so all of it is measured with products of zeros, too, which do
not reach the limit. Every tensor that was moved is compared. The clock and the power are those that ``nvidia-smi`` tells of the
multiplying GPU meanwhile.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import Table
from benchmarks.gpu_actors import device_us
from benchmarks.gpu_steps import Book, parser_of, publish, spread_of
from crossfade.device.cuda import CudaDriver

NUM_SLOTS = 6
CYCLES_PER_MS = 1_755_000
SAMPLE_MS = 20
NONE, AGAIN = "none", "none, again"
SIDE = "torch"


@dataclass(frozen=True)
class Way:
    """How a tensor goes.

    Attributes:
        engine: ``push`` by the sender's copy engine, ``pull`` by the receiver's, ``local`` within the receiver's memory.
        num_pieces: copies.
        pause_ms: between two of them.
        is_zero: zeros are moved, not random numbers.
    """

    engine: str
    num_pieces: int = 1
    pause_ms: float = 0.0
    is_zero: bool = False


WAYS: dict[str, Way | None] = {
    NONE: None,
    "by the sender's engine": Way("push"),
    "the same, in 16 pieces, 0.1 ms apart": Way("push", 16, 0.1),
    "the same, in 100 pieces, 0.02 ms apart": Way("push", 100, 0.02),
    "the same, zeros": Way("push", is_zero=True),
    "by the receiver's engine": Way("pull"),
    "from its own memory, by its engine": Way("local"),
    AGAIN: None,
}


@dataclass
class Clock:
    """The multiplying GPU's clock and power over time."""

    samples: list[tuple[float, float, float]] = field(default_factory=list)

    @contextmanager
    def sampled(self) -> Iterator[None]:
        """Collects (seconds, MHz, watts) meanwhile, where there is ``nvidia-smi``."""
        query = [
            "--query-gpu=timestamp,clocks.sm,power.draw.instant",
            "--format=csv,noheader,nounits",
            f"--loop-ms={SAMPLE_MS}",
            "--id=0",
        ]
        with tempfile.TemporaryFile("w+") as file:
            try:
                process = subprocess.Popen(["nvidia-smi", *query], stdout=file)
            except OSError:
                yield
                return
            try:
                yield
            finally:
                process.terminate()
                process.wait()
                file.seek(0)
                for line in file:
                    self.add(line)

    def add(self, line: str) -> None:
        """A line of ``nvidia-smi``: the time, MHz, watts."""
        try:
            when, clock, power = (cell.strip() for cell in line.split(","))
            seconds = time.mktime(time.strptime(when[:19], "%Y/%m/%d %H:%M:%S")) + float(when[19:])
            self.samples.append((seconds, float(clock), float(power)))
        except ValueError:  # a line that was cut off, or a GPU that does not tell
            return

    def between(self, spans: Sequence[tuple[float, float]]) -> tuple[float, float] | None:
        """Mean MHz and watts in these spans of time."""
        found = [each[1:] for each in self.samples if any(first <= each[0] <= last for first, last in spans)]
        return (
            (statistics.fmean(each[0] for each in found), statistics.fmean(each[1] for each in found))
            if found
            else None
        )


class Scene:
    """Products on the first GPU, and the tensors that go there from the others.

    Args:
        size: rows and columns.
        num: products in a row.
    """

    def __init__(self, size: int, num: int) -> None:
        self.num = num
        self._bytes = 2 * size * size
        self._others = range(1, torch.cuda.device_count())
        self._drivers = [CudaDriver(device) for device in range(torch.cuda.device_count())]
        torch.manual_seed(0)

        def random(device: int) -> torch.Tensor:
            return torch.randn(size, size, device=f"cuda:{device}").half()

        self._inputs = {"random": random(0), "zeros": torch.zeros(size, size, device="cuda:0").half()}
        self._out = torch.empty_like(self._inputs["random"])
        self._slots = [torch.empty_like(self._out) for _ in range(NUM_SLOTS)]
        self._sources = {device: random(device) for device in (0, *self._others)}
        self._zeros = {device: torch.zeros_like(source) for device, source in self._sources.items()}
        self._streams: dict[int, Any] = {device: torch.cuda.Stream(device) for device in self._sources}  # type: ignore[no-untyped-call]
        for device in self._others:
            self._slots[0].copy_(self._sources[device])  # opens the way
        self._last: dict[int, torch.Tensor] = {}

    def product_us(self, kind: str, way: Way | None) -> float:
        """Per product, on the first GPU's clock."""
        begins = [torch.cuda.Event() for _ in range(self.num)]  # type: ignore[no-untyped-call]
        torch.cuda.set_device(0)

        def enqueue() -> None:
            for number, begin in enumerate(begins):
                begin.record()
                torch.matmul(self._inputs[kind], self._inputs[kind], out=self._out)
                if way is not None:
                    self._move(number, begin, way)

        taken_us = device_us("cuda", enqueue) / self.num
        for device in self._sources:
            torch.cuda.synchronize(device)
        return taken_us

    def _move(self, number: int, begin: Any, way: Way) -> None:
        """One tensor, from when that product may begin."""
        other = 0 if way.engine == "local" else self._others[number % len(self._others)]
        acting = other if way.engine == "push" else 0
        stream, driver = self._streams[acting], self._drivers[acting]
        source, target = (self._zeros if way.is_zero else self._sources)[other], self._slots[number % NUM_SLOTS]
        self._last[number % NUM_SLOTS] = source
        stream.wait_event(begin)
        step = self._bytes // way.num_pieces // 512 * 512
        for piece in range(way.num_pieces):
            first = piece * step
            num_bytes = step if piece < way.num_pieces - 1 else self._bytes - first
            driver.copy(target.data_ptr() + first, source.data_ptr() + first, num_bytes, stream.cuda_stream)
            if way.pause_ms and piece < way.num_pieces - 1:
                with torch.cuda.device(acting), torch.cuda.stream(stream):
                    torch.cuda._sleep(int(way.pause_ms * CYCLES_PER_MS))  # type: ignore[no-untyped-call]

    def is_right(self) -> bool:
        """Whether the tensors that were moved last are there."""
        return all(torch.equal(self._slots[slot], source.to("cuda:0")) for slot, source in self._last.items())


def measure(book: Book, options: argparse.Namespace) -> Clock:
    """All rounds, forth and back, each step behind one of the same."""
    scene, clock = Scene(options.size, options.num), Clock()
    with clock.sampled():
        for number in range(options.rounds):
            for name in list(WAYS)[:: 1 if number % 2 == 0 else -1]:
                for kind in ("random", "zeros"):
                    _step(book, scene, kind, name)
    return clock


def _step(book: Book, scene: Scene, kind: str, name: str) -> None:
    def run() -> float:
        return scene.product_us(kind, WAYS[name])

    _for_a_while(run)
    begin = time.time()
    samples = [run() for _ in range(3)]
    span = (begin, time.time())
    result: dict[str, Any] = {"samples": samples, "span": span, "taken_s": span[1] - span[0]}
    book.add(f"{kind}: {name}", SIDE, result if scene.is_right() else {"failed": "WrongValue: a tensor came wrong"})


def _for_a_while(run: Callable[[], object], seconds: float = 0.4) -> None:
    """The load that is going to be measured."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        run()


def table_of(book: Book, clock: Clock) -> Table:
    """Products of random numbers and of zeros, over those with nothing beneath."""
    columns = ["beneath", "random: us", "more", "MHz", "W", "zeros: us", "more", "MHz", "W"]
    table = Table("A product, by what goes beneath it: median (lowest and highest block)", columns)
    base = {
        kind: statistics.median(
            value for name in (NONE, AGAIN) for block in book.blocks(f"{kind}: {name}", SIDE) for value in block
        )
        for kind in ("random", "zeros")
    }
    for name in WAYS:
        cells = [name]
        for kind, under_us in base.items():
            rows = book.of(f"{kind}: {name}", SIDE)
            blocks = [list(row["samples"]) for row in rows]
            values = [value for block in blocks for value in block]
            more = f"{100 * (statistics.median(values) / under_us - 1):+.1f} %" if values else "-"
            told = clock.between([tuple(row["span"]) for row in rows])
            cells += [
                spread_of(blocks, digits=0),
                more,
                *(["-", "-"] if told is None else [f"{each:.0f}" for each in told]),
            ]
        table.add(*cells)
    return table


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures and prints: 2 when a tensor came wrong, 1 where there are not two GPUs."""
    parser = parser_of("gpu_transfer_cost", __doc__ or "")
    parser.add_argument("--rounds", type=int, default=5, help="blocks of each measure")
    parser.add_argument("--num", type=int, default=30, help="products in a row")
    parser.add_argument("--size", type=int, default=10_000, help="rows and columns of a tensor")
    options = parser.parse_args(arguments)
    if torch.cuda.device_count() < 2:
        print("gpu_transfer_cost needs two GPUs", file=sys.stderr)
        return 1
    if options.quick:
        options.rounds, options.size = 2, min(options.size, 2048)
    book = Book(Path(options.out) / "gpu_transfer_cost.jsonl")
    clock = measure(book, options)
    text = f"{__doc__}\n{options.size} x {options.size}, {options.num} products in a row."
    publish("gpu_transfer_cost", "What a transfer costs a product", book, options, [table_of(book, clock)], text)
    return 2 if book.has_wrong_value else 0


if __name__ == "__main__":
    sys.exit(main())
