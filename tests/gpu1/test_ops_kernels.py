"""One GPU: the kernels of tile operators: values, signals that streams wait for, replays, and nothing loaded late."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")
pytest.importorskip("triton")

from crossfade.device.capture import capture  # noqa: E402
from crossfade.device.cuda import CudaDriver  # noqa: E402
from crossfade.device.signals import HostBoard  # noqa: E402
from crossfade.host.memory import Memory  # noqa: E402
from crossfade.ops.signaled.launch import (  # noqa: E402
    Epilogue,
    Loader,
    Product,
    Target,
)
from crossfade.ops.signaled.operands import Operands, find_unit  # noqa: E402
from crossfade.ops.signaled.tiles import TileConfig, even_blocks, plan_tiles, uneven_blocks  # noqa: E402
from tests.helpers.device_cases import wait_idle  # noqa: E402
from tests.helpers.peer_cases import same_bits  # noqa: E402
from tests.helpers.tile_worlds import World, integers, poisoned  # noqa: E402

COUNTED = Epilogue(has_signals=True)
NARROW = TileConfig(128, 128, 32, num_warps=8, num_stages=4)


@pytest.fixture
def driver() -> Iterator[CudaDriver]:
    torch.cuda.set_device(0)
    torch.zeros(1, device="cuda")
    made = CudaDriver(0)
    yield made
    torch.cuda.synchronize()
    made.close()


def normal(rows: int, columns: int, kind: str, seed: int) -> Any:
    generator = torch.Generator(device="cuda").manual_seed(seed)
    return torch.randn(rows, columns, generator=generator, device="cuda").to(getattr(torch, kind))


def prepare(driver: CudaDriver, a: Any, b: Any, config: TileConfig, epilogue: Epilogue, **cut: Any) -> Product:
    plan = plan_tiles(
        b.shape[1], even_blocks(len(a), 1), 0, tile_rows=config.num_rows, tile_columns=config.num_columns, **cut
    )
    operands = Operands.of(a, b)
    product = Product(Loader(0), driver, operands, plan, config, out_unit=find_unit(b.shape[1]))
    product.load(epilogue)
    return product


@pytest.mark.parametrize("kind", ["bfloat16", "float16"])
@pytest.mark.parametrize("is_b_transposed", [False, True])
@pytest.mark.parametrize(
    ("shape", "config"),
    [
        ((512, 1024, 512), TileConfig()),
        ((2048, 1024, 1024), TileConfig(num_stages=4)),
        ((2048, 1024, 1024), TileConfig(num_cuts=2)),
        ((513, 1000, 520), TileConfig(num_cuts=4)),
        ((1, 8, 8), TileConfig()),
        ((1000, 520, 1544), TileConfig(128, 128, 64, num_warps=4, num_stages=4)),
        ((300, 333, 257), NARROW),
        ((300, 334, 258), NARROW),
    ],
)
def test_values(
    driver: CudaDriver, kind: str, is_b_transposed: bool, shape: tuple[int, int, int], config: TileConfig
) -> None:
    m, n, k = shape
    a = normal(m, k, kind, 1)
    b = normal(n, k, kind, 2).T if is_b_transposed else normal(k, n, kind, 2)
    bias = normal(1, n, kind, 3)[0]
    epilogue = Epilogue(has_bias=True)
    product = prepare(driver, a, b, config, epilogue)
    out = poisoned(m + 1, n, kind, 0)
    stream = torch.cuda.current_stream().cuda_stream
    target = Target(out.data_ptr(), n)
    product.launch(stream, product.plan.stretches[1], a, b, target, epilogue, bias=bias.data_ptr())
    wanted = a.double() @ b.double() + bias.double()
    error = (out[:m].double() - wanted).norm() / wanted.norm()
    assert error < (4e-3 if kind == "bfloat16" else 5e-4)
    assert bool(out[m:].isnan().all())


def test_what_was_compiled_is_called_without_tritons_own_launch(driver: CudaDriver) -> None:
    a, b = normal(256, 256, "bfloat16", 1), normal(256, 256, "bfloat16", 2)
    product = prepare(driver, a, b, TileConfig(), COUNTED)
    assert all(each.compiled is not None for each in product._loader._loaded.values())


def test_a_piece_is_whole_when_its_counter_says_so(driver: CudaDriver) -> None:
    """A push stream copies each piece as soon as it may; 200 times, from poisoned memory."""
    m, n, k = 2048, 2048, 512
    a, b = normal(m, k, "bfloat16", 1), normal(k, n, "bfloat16", 2)
    product = prepare(driver, a, b, TileConfig(), COUNTED, piece_rows=256)
    wanted = poisoned(m, n, "bfloat16", 0)
    main, push = driver.create_stream("main"), driver.create_stream("push", is_urgent=True)
    stretch = product.plan.stretches[1]
    assert len(stretch.pieces) == 8
    torch.cuda.synchronize()
    product.launch(main, stretch, a, b, Target(wanted.data_ptr(), n), COUNTED)
    torch.cuda.synchronize()
    for number in range(200):
        out, sent = poisoned(m, n, "bfloat16", 0), poisoned(m, n, "bfloat16", 0)
        torch.cuda.synchronize()
        product.launch(main, stretch, a, b, Target(out.data_ptr(), n), COUNTED)
        for piece in stretch.pieces:
            product.counters.wait(push, piece, is_captured=False)
            at, size_bytes = 2 * n * piece.begin, 2 * n * (piece.end - piece.begin)
            driver.copy(sent.data_ptr() + at, out.data_ptr() + at, size_bytes, push)
        wait_idle(driver, push)
        assert same_bits(sent, wanted), number
    for stream in (main, push):
        driver.destroy_stream(stream)


WORLDS: list[dict[str, Any]] = [
    {"blocks": even_blocks(1024, 4), "n": 1024, "k": 256},
    {"blocks": even_blocks(1026, 4), "n": 1032, "k": 264, "num_rounds": 2, "piece_rows": 128},
    {"blocks": uneven_blocks([300, 0, 129]), "n": 264, "k": 136, "is_b_transposed": True},
    {"blocks": even_blocks(2048, 8), "n": 512, "k": 128, "kind": "float16", "num_rounds": 2},
    {"blocks": even_blocks(700, 2), "n": 333, "k": 130, "config": NARROW},
    {"blocks": even_blocks(1100, 4), "n": 1032, "k": 256, "num_rounds": 2, "lag": 1},
]


@pytest.mark.parametrize("number", range(len(WORLDS)))
@pytest.mark.parametrize("has_bias", [False, True])
def test_ranks_that_share_a_gpu(driver: CudaDriver, number: int, has_bias: bool) -> None:
    """Bit for bit: others' parts rounded, the own accumulator not, added in the order of the ranks; 20 times."""
    options = {"kind": "bfloat16", "config": TileConfig(), **WORLDS[number]}
    if has_bias:
        options["bias"] = integers(1, options["n"], options["kind"], 9, 99)[0]
    world = World(**options, device=0, driver=driver)
    for _ in range(20):
        world.poison()
        torch.cuda.synchronize()
        world.run()
        wait_idle(driver, world.stream)
        world.check()


def test_a_replay_finds_its_counters_as_it_left_them(driver: CudaDriver) -> None:
    options = {"kind": "bfloat16", "config": TileConfig(), **WORLDS[1]}
    world = World(**options, is_captured=True, device=0, driver=driver)
    replay = capture(driver, world.stream, world.run, [world.push])
    for _ in range(50):
        world.poison()
        torch.cuda.synchronize()
        for _ in range(2):
            replay.launch(world.stream)
        wait_idle(driver, world.stream)
        world.check()
        assert not any(bool(product.counters._words.any()) for product in world.products)
    replay.close()
    # Eager calls beside it have counters of their own.
    world.is_captured = False
    world.poison()
    torch.cuda.synchronize()
    world.run()
    wait_idle(driver, world.stream)
    world.check()


def test_nothing_is_loaded_while_a_stream_waits(driver: CudaDriver) -> None:
    """Other addresses, other stretches, other numbers of programs: all were loaded with the variant."""
    world = World(even_blocks(1024, 4), 1024, 256, kind="bfloat16", config=TileConfig(), device=0, driver=driver)
    memory = Memory.create("signals", 4096)
    board = HostBoard(driver, memory, 1, "test")
    signal, held = board.signal(0, "a signal"), driver.create_stream("held")
    torch.cuda.synchronize()
    signal.wait(held)
    world.run()
    wait_idle(driver, world.stream)
    assert not driver.is_idle(held)
    signal.release()
    wait_idle(driver, held)
    board.close()
    memory.close()
    driver.destroy_stream(held)
    world.check()
