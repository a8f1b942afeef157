"""The kernels of tile operators beside cuBLAS on one GPU: what signals, two launches, tiles and pipelines cost; and a launch.

``python -m benchmarks.tile_kernels run OUT.json [--quick]`` measures, prints tables, and writes after each section; ``--quick``
takes under a minute. ``python -m benchmarks.tile_kernels report OUT.json`` makes a report of it, anywhere.

Ways to compute one product take turns, so that clocks and heat are alike; a figure is the median of the rounds. Every result is
compared with float64 on some rows, from poisoned memory. bfloat16; b is the transpose of a contiguous (N, K), as nn.Linear has it.
*Two launches* are what a reduce-scatter of 4 ranks does: the other ranks' three blocks in counted pieces, then the own block, to
which three parts that lie in slots are added. *One launch* does both, and looks
for every tile of the own block whether the parts have arrived, as they have.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.common import Machine, Table, this_machine, today, write_report
from benchmarks.device_copies import _gpus

MB = 1 << 20
SHAPES = [
    (8192, 8192, 7168), (8192, 8192, 2048), (2048, 8192, 7168), (512, 8192, 7168), (8192, 16384, 4096), (16384, 8192, 7168),
    (16384, 16384, 4096), (8192, 7168, 2048),
]  # fmt: skip
"""The core rows of the operators' matrix: M, N, K of each GPU."""
QUICK_SHAPES = [SHAPES[0], SHAPES[1], SHAPES[3]]
NUM_RANKS = 4
PIECE_ROWS = 1024
CUBLAS = "cuBLAS"


class Config(NamedTuple):
    """A way to build the kernel; see `crossfade.ops.signaled.tiles.TileConfig`."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    cuts: int

    def __str__(self) -> str:
        more = f", {self.cuts} cuts" * bool(self.cuts)
        return f"{self.rows}x{self.columns}x{self.depth}, {self.warps} warps, {self.stages} stages{more}"


DEFAULT = Config(128, 256, 64, 8, 3, 0)
QUICK_CONFIGS = [DEFAULT, Config(128, 256, 64, 8, 4, 0), Config(128, 256, 64, 8, 3, 2)]
CONFIGS = [
    *QUICK_CONFIGS,
    Config(128, 256, 64, 8, 4, 4),
    Config(128, 256, 32, 8, 6, 0),
    Config(128, 256, 128, 8, 2, 0),
    Config(256, 128, 64, 8, 3, 0),
    Config(128, 128, 64, 8, 4, 0),
    Config(64, 256, 64, 4, 4, 0),
]


class Way(NamedTuple):
    """One way to compute a product: ``call`` enqueues it, ``error`` compares it with float64."""

    name: str
    call: Callable[[], None]
    error: Callable[[], float]


class Bench:
    """One shape's operands, and the ways to multiply them."""

    def __init__(self, loader: Any, driver: Any, m: int, n: int, k: int) -> None:
        import torch

        self.torch, self.loader, self.driver = torch, loader, driver
        self.m, self.n, self.k = m, n, k
        make = torch.Generator(device="cuda").manual_seed(m + n + k)

        def normal(*shape: int) -> Any:
            return torch.randn(*shape, generator=make, device="cuda", dtype=torch.float32).bfloat16()

        self.a, self.b = normal(m, k), normal(n, k).T
        self.rows = torch.randint(0, m // NUM_RANKS, (64,), generator=make, device="cuda")
        self.slots = normal(NUM_RANKS, m // NUM_RANKS, n)
        self.out = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
        self.exact = self.a[self.rows].double() @ self.b.double()
        self.stream = torch.cuda.current_stream().cuda_stream

    def _error(self, call: Callable[[], None], more: Any = 0) -> float:
        self.out.fill_(float("nan"))
        call()
        wanted = self.exact + more
        if not bool(self.out.isfinite().all()):
            return float("nan")
        return float((self.out[self.rows].double() - wanted).norm() / wanted.norm())

    def cublas(self) -> Way:
        def call() -> None:
            self.torch.mm(self.a, self.b, out=self.out)

        return Way(CUBLAS, call, lambda: self._error(call))

    def _product(self, config: Config, num_ranks: int, reserve_sms: int = 0) -> Any:
        from crossfade.ops.signaled.launch import Product
        from crossfade.ops.signaled.operands import Operands
        from crossfade.ops.signaled.tiles import TileConfig, even_blocks, plan_tiles

        plan = plan_tiles(
            self.n,
            even_blocks(self.m, num_ranks),
            0,
            tile_rows=config.rows,
            tile_columns=config.columns,
            piece_rows=PIECE_ROWS,
        )
        built, operands = TileConfig(*config), Operands.of(self.a, self.b)
        return Product(self.loader, self.driver, operands, plan, built, reserve_sms=reserve_sms)

    def kernel(self, config: Config, *, has_signals: bool, reserve_sms: int = 0) -> Way:
        from crossfade.ops.signaled.launch import Epilogue, Target

        product, epilogue = self._product(config, 1, reserve_sms), Epilogue(has_signals=has_signals)
        product.load(epilogue)
        target, stretch = Target(self.out.data_ptr(), self.n), product.plan.stretches[1]

        def call() -> None:
            product.launch(self.stream, stretch, self.a, self.b, target, epilogue)

        name = f"{config}{'' if has_signals else ', no signals'}" + f", {reserve_sms} SMs left" * bool(reserve_sms)
        return Way(name, call, lambda: self._error(call))

    def two_launches(self, config: Config) -> Way:
        from crossfade.ops.signaled.launch import Epilogue, Parts, Target

        product = self._product(config, NUM_RANKS)
        counted, final = Epilogue(has_signals=True), Epilogue(num_parts=NUM_RANKS)
        product.load(counted, final)
        target, (others, own) = Target(self.out.data_ptr(), self.n), product.plan.stretches
        parts = Parts(self.slots.data_ptr(), self.slots.stride(0) * 2)

        def call() -> None:
            product.launch(self.stream, others, self.a, self.b, target, counted)
            product.launch(self.stream, own, self.a, self.b, target, final, parts)

        return Way(f"{config}, two launches", call, lambda: self._error(call, self._more()))

    def _more(self) -> Any:
        """What the parts add to the rows that are compared."""
        return self.slots[1:, self.rows].double().sum(0)


def take_turns(ways: list[Way], num_rounds: int) -> dict[str, list[float]]:
    """Milliseconds of each way in each round."""
    import torch

    def event() -> Any:
        return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]

    for way in ways:
        way.call()
    rows: dict[str, list[Any]] = {way.name: [] for way in ways}
    for _ in range(num_rounds):
        for way in ways:
            pair = event(), event()
            pair[0].record()
            way.call()
            pair[1].record()
            rows[way.name].append(pair)
        torch.cuda.synchronize()
    return {name: [first.elapsed_time(last) for first, last in pairs] for name, pairs in rows.items()}


def products(loader: Any, driver: Any, is_quick: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each shape, with the times and errors of its ways."""
    import torch

    for m, n, k in QUICK_SHAPES if is_quick else SHAPES:
        bench = Bench(loader, driver, m, n, k)
        ways = [
            bench.cublas(),
            *(bench.kernel(each, has_signals=True) for each in (QUICK_CONFIGS if is_quick else CONFIGS)),
        ]
        ways += [bench.kernel(DEFAULT, has_signals=False), bench.two_launches(DEFAULT)]
        ways += [bench.kernel(DEFAULT, has_signals=True, reserve_sms=left) for left in (() if is_quick else (4, 16))]
        errors = {way.name: way.error() for way in ways}
        times = take_turns(ways, 10 if is_quick else 20)
        yield f"{m}, {n}, {k}", {"times": times, "errors": errors}
        del bench, ways
        torch.cuda.empty_cache()


def host_times(loader: Any, driver: Any) -> dict[str, list[float]]:
    """Microseconds of this host for one call, as long as the GPU keeps up."""
    import torch

    from crossfade.ops.signaled.kernels import product_kernel

    bench = Bench(loader, driver, 256, 256, 64)
    way, piece = bench.kernel(DEFAULT, has_signals=True), None
    product = bench._product(DEFAULT, 1)
    variant = product.variant(_counted())
    product.load(_counted())
    stretch = product.plan.stretches[1]
    (piece,) = stretch.pieces
    arguments = variant.arguments(bench.a, bench.b, bench.k, bench.k)
    row = product.counters.row(is_captured=False)
    rest = (0, 1, row, bench.out.data_ptr(), bench.n, *[0] * 7)
    product.launch(bench.stream, stretch, bench.a, bench.b, _target(bench), _counted())

    def own_launch() -> None:
        product_kernel[(1,)](*arguments, *product._head, *rest, **variant.constants(), **variant.options())

    push = driver.create_stream("push")
    calls: dict[str, Callable[[], None]] = {
        "torch.mm(out=)": bench.cublas().call,
        "this launch": way.call,
        "Triton's own launch": own_launch,
        "wait for a counter": lambda: product.counters.wait(push, piece, is_captured=False),
    }
    found = {}
    for name, call in calls.items():
        samples = []
        for _ in range(5):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            for _ in range(100):
                call()
            samples.append((time.perf_counter() - begin) * 1e4)
        found[name] = samples
    torch.cuda.synchronize()
    driver.destroy_stream(push)
    return found


def _counted() -> Any:
    from crossfade.ops.signaled.launch import Epilogue

    return Epilogue(has_signals=True)


def _target(bench: Bench) -> Any:
    from crossfade.ops.signaled.launch import Target

    return Target(bench.out.data_ptr(), bench.n)


def run(path: Path, is_quick: bool) -> None:
    """Measures, writes after each section, and prints."""
    import torch

    from crossfade.device.cuda import CudaDriver
    from crossfade.ops.signaled.launch import Loader

    torch.cuda.set_device(0)
    torch.zeros(1, device="cuda")
    driver, loader, begin = CudaDriver(0), Loader(0), time.monotonic()
    machine = {"text": str(this_machine(("torch", "cuda-bindings", "triton"))), **_gpus()}
    results: dict[str, Any] = {"machine": machine, "products": {}, "host": {}}

    def write() -> None:
        results["seconds"] = time.monotonic() - begin
        path.write_text(json.dumps(results))

    for name, found in products(loader, driver, is_quick):
        results["products"][name] = found
        write()
    results["host"] = host_times(loader, driver)
    write()
    driver.close()
    for table in tables(results):
        table.show()
    print(f"{results['seconds']:.0f} s")


def tables(results: dict[str, Any]) -> list[Table]:
    """Every section."""
    made = [_products_table(results["products"])]
    table = Table("Host time of one call", ("call", "us"))
    for name, samples in results["host"].items():
        table.add(name, f"{statistics.median(samples):.1f}")
    return [*made, table]


def _products_table(shapes: dict[str, Any]) -> Table:
    """One row for each way: milliseconds, and how much of cuBLAS's speed."""
    table = Table("Products: ms, and cuBLAS's time over it", ("M, N, K", *shapes, "largest error"))
    names = list(dict.fromkeys(name for case in shapes.values() for name in case["times"]))
    for name in names:
        cells = []
        for case in shapes.values():
            own, base = statistics.median(case["times"][name]), statistics.median(case["times"][CUBLAS])
            cells.append(f"{own:.3f} ({base / own:.2f})")
        errors = [case["errors"][name] for case in shapes.values()]
        table.add(name, *cells, f"{max(errors, key=lambda error: (error != error, error)):.1e}")
    return table


def report(path: Path) -> None:
    """Writes the report of a file that `run` wrote."""
    results = json.loads(path.read_text())
    machine = results["machine"]
    gpu = f"1 x {machine['gpus'][0]}"
    text = "\n\n".join(table.markdown() for table in tables(results))
    head = f"# Kernels of tile operators\n\n{gpu}; {machine['text']}; {machine['driver']}. {today()}.\n\n{__doc__}"
    slug = gpu.lower().replace(" x ", "-").replace(" ", "-")
    print(write_report("tile_kernels", Machine(slug, "", "", ""), f"{head}\n{text}\n"))


if __name__ == "__main__":
    if sys.argv[1] == "run":
        run(Path(sys.argv[2]), "--quick" in sys.argv)
    else:
        report(Path(sys.argv[2]))
