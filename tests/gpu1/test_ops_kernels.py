"""One GPU: the kernel of `matmul_signaled`: values, signals that streams wait for, and nothing loaded late."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")
pytest.importorskip("triton")

from crossfade.device.cuda import CudaDriver  # noqa: E402
from crossfade.device.signals import HostBoard  # noqa: E402
from crossfade.host.memory import Memory  # noqa: E402
from crossfade.ops.signaled.launch import Loader, Product  # noqa: E402
from crossfade.ops.signaled.operands import Operands  # noqa: E402
from crossfade.ops.signaled.tiles import TileConfig, plan_tiles  # noqa: E402
from tests.helpers.device_cases import wait_idle  # noqa: E402
from tests.helpers.peer_cases import same_bits  # noqa: E402
from tests.helpers.tile_worlds import poisoned  # noqa: E402


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


def prepare(
    driver: CudaDriver, a: Any, b: Any, config: TileConfig, *, has_bias: bool = False, piece_rows: int = 512
) -> Product:
    plan = plan_tiles(
        len(a), b.shape[1], tile_rows=config.num_rows, tile_columns=config.num_columns, piece_rows=piece_rows
    )
    return Product(Loader(0), driver, Operands.of(a, b), plan, config, has_bias=has_bias)


@pytest.mark.parametrize("kind", ["bfloat16", "float16"])
@pytest.mark.parametrize("is_b_transposed", [False, True])
@pytest.mark.parametrize(
    ("shape", "config"),
    [
        ((512, 1024, 512), TileConfig()),
        ((2048, 1024, 1024), TileConfig(num_stages=4)),
        ((513, 1000, 520), TileConfig()),
        ((1, 8, 8), TileConfig()),
        ((1000, 520, 1544), TileConfig(128, 128, 64, num_warps=4, num_stages=4)),
        ((300, 333, 264), TileConfig()),
        ((300, 334, 264), TileConfig()),
    ],
)
def test_values(
    driver: CudaDriver, kind: str, is_b_transposed: bool, shape: tuple[int, int, int], config: TileConfig
) -> None:
    m, n, k = shape
    a = normal(m, k, kind, 1)
    b = normal(n, k, kind, 2).T if is_b_transposed or n % 8 else normal(k, n, kind, 2)
    bias = normal(1, n, kind, 3)[0]
    product = prepare(driver, a, b, config, has_bias=True)
    out = poisoned(m + 1, n, kind, 0)
    product.launch(torch.cuda.current_stream().cuda_stream, a, b, out.data_ptr(), bias.data_ptr())
    wanted = a.double() @ b.double() + bias.double()
    error = (out[:m].double() - wanted).norm() / wanted.norm()
    assert error < (4e-3 if kind == "bfloat16" else 5e-4)
    assert bool(out[m:].isnan().all())


def test_what_was_compiled_is_called_without_tritons_own_launch(driver: CudaDriver) -> None:
    a, b = normal(256, 256, "bfloat16", 1), normal(256, 256, "bfloat16", 2)
    loader = Loader(0)
    plan = plan_tiles(256, 256, piece_rows=256)
    Product(loader, driver, Operands.of(a, b), plan, TileConfig())
    (compiled,) = loader._compiled.values()
    assert compiled is not None


def test_a_piece_is_whole_when_its_counter_says_so(driver: CudaDriver) -> None:
    """A push stream copies each piece as soon as it may; 200 times, from poisoned memory."""
    m, n, k = 2048, 2048, 512
    a, b = normal(m, k, "bfloat16", 1), normal(k, n, "bfloat16", 2)
    product = prepare(driver, a, b, TileConfig(), piece_rows=256)
    wanted = poisoned(m, n, "bfloat16", 0)
    main, push = driver.create_stream("main"), driver.create_stream("push", is_urgent=True)
    assert len(product.plan.pieces) == 8
    torch.cuda.synchronize()
    product.launch(main, a, b, wanted.data_ptr())
    torch.cuda.synchronize()
    for number in range(200):
        out, sent = poisoned(m, n, "bfloat16", 0), poisoned(m, n, "bfloat16", 0)
        torch.cuda.synchronize()
        product.launch(main, a, b, out.data_ptr())
        for piece in product.plan.pieces:
            product.counters.wait(push, piece, is_captured=False)
            at, size_bytes = 2 * n * piece.begin, 2 * n * (piece.end - piece.begin)
            driver.copy(sent.data_ptr() + at, out.data_ptr() + at, size_bytes, push)
        wait_idle(driver, push)
        assert same_bits(sent, wanted), number
    for stream in (main, push):
        driver.destroy_stream(stream)


def test_nothing_is_loaded_while_a_stream_waits(driver: CudaDriver) -> None:
    """Other operands and another output: all was loaded when the product was made."""
    a, b = normal(1024, 256, "bfloat16", 1), normal(256, 1024, "bfloat16", 2)
    product = prepare(driver, a, b, TileConfig())
    memory = Memory.create("signals", 4096)
    board = HostBoard(driver, memory, 1, "test")
    signal, held = board.signal(0, "a signal"), driver.create_stream("held")
    main, out = driver.create_stream("main"), poisoned(1024, 1024, "bfloat16", 0)
    fresh = normal(1024, 256, "bfloat16", 3)
    torch.cuda.synchronize()
    signal.wait(held)
    product.launch(main, fresh, b, out.data_ptr())
    wait_idle(driver, main)
    assert not driver.is_idle(held)
    signal.release()
    wait_idle(driver, held)
    board.close()
    memory.close()
    for stream in (main, held):
        driver.destroy_stream(stream)
    wanted = fresh.double() @ b.double()
    assert (out.double() - wanted).norm() / wanted.norm() < 4e-3
