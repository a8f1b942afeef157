"""One GPU: callbacks of `matmul_signaled` enqueue behind their groups, eager and captured, with the kernel and without it."""

from __future__ import annotations

from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")
pytest.importorskip("triton")

from crossfade.errors import DeviceError  # noqa: E402
from crossfade.ops.signaled import product as module  # noqa: E402
from crossfade.ops.signaled.product import matmul_signaled, prepare_signaled  # noqa: E402
from crossfade.ops.signaled.sides import RowGroup  # noqa: E402

M, N, K = 2048, 2048, 512


def normal(*shape: int, kind: str = "bfloat16", seed: int = 0) -> Any:
    generator = torch.Generator(device="cuda").manual_seed(seed)
    return torch.randn(*shape, generator=generator, device="cuda").to(getattr(torch, kind))


class Copier:
    """Copies each group on the stream that the callback finds, as communication would."""

    def __init__(self, like: Any) -> None:
        self.copy, self.streams, self.ends = torch.full_like(like, torch.nan), set[int](), list[int]()

    def __call__(self, group: RowGroup) -> None:
        assert group.stream is not None
        assert torch.cuda.current_stream() == group.stream
        self.streams.add(group.stream.cuda_stream)
        self.ends.append(group.rows.stop)
        self.copy.view(-1, self.copy.shape[-1])[group.rows].copy_(group.tensor)


@pytest.fixture(params=["kernel", "products"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    torch.cuda.set_device(0)
    if request.param == "products":
        monkeypatch.setattr(module, "_has_kernel", lambda given: False)
    return str(request.param)


@pytest.mark.parametrize("kind", ["bfloat16", "float16"])
@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("shape", [(M, N, K), (1000, 520, 1544), (1, 8, 8), (300, 333, 257)])
def test_each_group_is_done_when_its_callback_says_so(
    way: str, shape: tuple[int, int, int], is_transposed: bool, kind: str
) -> None:
    m, n, k = shape
    a, bias = normal(m, k, kind=kind, seed=1), normal(n, kind=kind, seed=3)
    b = normal(n, k, kind=kind, seed=2).T if is_transposed else normal(k, n, kind=kind, seed=2)
    wanted = a.double() @ b.double() + bias.double()
    for _ in range(20):
        out = torch.full((m, n), torch.nan, dtype=a.dtype, device="cuda")
        copier = Copier(out)
        assert matmul_signaled(a, b, on_group=copier, bias=bias, out=out, group_rows=256) is out
        assert torch.cuda.current_stream() == torch.cuda.default_stream()
        assert copier.ends[-1] == m
        assert len(copier.streams) == 1
        assert torch.equal(copier.copy, out)
        error = (out.double() - wanted).norm() / wanted.norm()
        assert error < (4e-3 if kind == "bfloat16" else 5e-4)


def test_streams_of_one_lane_and_of_several(way: str) -> None:
    a, b = normal(M, K, seed=1), normal(K, N, seed=2)
    wanted = matmul_signaled(a, b, on_group=lambda group: None).clone()
    for lane in (0, 1):
        prepare_signaled(a, b, lane=lane)
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    made = []
    for number in range(100):
        with torch.cuda.stream(streams[number % 2]):
            out = torch.full_like(wanted, torch.nan)
            copier = Copier(out)
            matmul_signaled(a, b, on_group=copier, out=out, lane=number % 2 if number < 50 else 0)
            made.append((out, copier))
    torch.cuda.synchronize()
    for out, copier in made:
        assert torch.equal(out, copier.copy)
        assert torch.equal(out, wanted)


def test_captured_at_once_and_replayed(way: str) -> None:
    m = M + 8 if way == "kernel" else M  # a shape that nobody has loaded
    a, b, out = normal(m, K, seed=1), normal(K, N, seed=2), torch.empty(m, N, dtype=torch.bfloat16, device="cuda")
    if way == "kernel":
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            out.zero_()  # torch warns of a capture that is empty
            with pytest.raises(DeviceError, match="not prepared"):
                matmul_signaled(a, b, on_group=lambda group: None, out=out)
    prepare_signaled(a, b, out=out)
    copier, graph = Copier(out), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(2):
            matmul_signaled(a, b, on_group=copier, out=out)
    for seed in range(20):
        a.copy_(normal(m, K, seed=10 + seed))
        wanted = matmul_signaled(a, b, on_group=lambda group: None).clone()  # eager calls between replays
        for each in (out, copier.copy):
            each.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, wanted)
        assert torch.equal(copier.copy, wanted)


@pytest.mark.timeout(60)
def test_a_callback_that_raises_leaves_everything_usable(way: str) -> None:
    a, b = normal(M, K, seed=1), normal(K, N, seed=2)

    def fail(group: RowGroup) -> None:
        raise RuntimeError("no more")

    for _ in range(3):
        with pytest.raises(RuntimeError, match="no more"):
            matmul_signaled(a, b, on_group=fail)
        out = torch.empty(M, N, dtype=torch.bfloat16, device="cuda")
        copier = Copier(out)
        matmul_signaled(a, b, on_group=copier, out=out)
        assert torch.equal(out, copier.copy)
    torch.cuda.synchronize()
