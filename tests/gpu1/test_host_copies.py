"""One GPU: values between it and the host, whole, and with no host that waits on the way."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest

torch: Any = pytest.importorskip("torch")

from crossfade.channels.values.codec import decode, message_of  # noqa: E402
from crossfade.device.cuda import CudaDriver  # noqa: E402
from crossfade.device.tensors import load_kernels  # noqa: E402
from crossfade.errors import DeviceError  # noqa: E402
from crossfade.testing import conformance  # noqa: E402
from tests.helpers import host_copy_cases as cases  # noqa: E402
from tests.helpers.device_pair import run_workers  # noqa: E402
from tests.helpers.host_rings import LONG_US, Ring, open_ring  # noqa: E402
from tests.helpers.waiting import take, until  # noqa: E402

NUM_VALUES = 200


@pytest.fixture
def driver() -> Iterator[CudaDriver]:
    torch.cuda.set_device(0)
    torch.zeros(1, device="cuda")
    with torch.cuda.stream(torch.cuda.Stream(0)):
        load_kernels((torch.float32, torch.int64, torch.uint8, torch.complex64), 0)
        yield CudaDriver(0)


@contextmanager
def ring_on(driver: CudaDriver, **options: Any) -> Iterator[Ring]:
    with open_ring(driver, **options) as ring:
        yield ring
        torch.cuda.synchronize()
        gc.collect()


@contextmanager
def open_pair(depth: int, num_readers: int, **options: Any) -> Iterator[Any]:
    with ring_on(CudaDriver(0), depth=depth, num_readers=num_readers, **options) as ring:
        yield ring.writer, ring.readers


TestFromGpu = conformance.suite(open_pair)
TestToGpu = conformance.suite(partial(open_pair, writes_from_device=False, reads_onto="cuda"))


def sample(dtype: Any, shape: tuple[int, ...]) -> Any:
    return torch.arange(torch.Size(shape).numel()).remainder(50).reshape(shape).to(dtype)


def raw(tensor: Any) -> Any:
    return tensor.cpu().reshape(-1).view(torch.uint8)


def keep_busy(seconds: float = 0.3) -> Callable[[], bool]:
    """A long kernel on torch's current stream; whether it still runs."""
    done = torch.cuda.Event()
    torch.cuda._sleep(int(seconds * 1.5e9))
    done.record()
    return lambda: not done.query()


@pytest.mark.parametrize("dtype", cases.ALL_DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0, 3), (3, 5), (2, 300, 700)])
def test_round_trip_of_all_types_and_shapes(driver: CudaDriver, dtype: Any, shape: tuple[int, ...]) -> None:
    tensor = sample(dtype, shape)
    with (
        ring_on(driver, spin_us=LONG_US) as out,
        ring_on(CudaDriver(0), writes_from_device=False, reads_onto="cuda") as back,
    ):
        for _ in range(3):
            until(lambda: out.writer.try_write(tensor.to("cuda")))
            until(out.writer.try_flush)
            got = take(out.reader)
            assert got.device.type == "cpu"
            assert got.dtype is dtype
            assert tuple(got.shape) == shape
            until(lambda got=got: back.writer.try_write(got))  # type: ignore[misc]
            returned = take(back.reader)
            assert returned.device.type == "cuda"
            assert returned.dtype is dtype
            assert torch.equal(raw(returned), raw(tensor))
            del got, returned


def test_views_of_all_kinds(driver: CudaDriver) -> None:
    base = torch.arange(24.0, device="cuda").reshape(4, 6)
    complex_ = torch.tensor([1 + 2j, 3 - 4j], device="cuda")
    value = {
        "transposed": base.t(),
        "strided": base[:, ::2],
        "expanded": base[0].expand(3, 6),
        "conjugate": complex_.conj(),
        "negative": complex_.conj().imag,
        "grad": torch.ones(2, device="cuda", requires_grad=True) * 2,
        "cpu": torch.arange(3000),
        "array": np.arange(3000),
    }
    with ring_on(driver) as ring:
        until(lambda: ring.writer.try_write(value))
        got = take(ring.reader)
        for name, tensor in value.items():
            if isinstance(tensor, torch.Tensor):
                assert torch.equal(got[name], tensor.cpu()), name
        assert got["grad"].requires_grad
        assert np.array_equal(got["array"], value["array"])


def test_a_write_returns_while_what_computes_the_value_still_runs(driver: CudaDriver) -> None:
    with ring_on(driver, depth=3) as ring:
        until(lambda: ring.writer.try_write(torch.zeros(1_000_000, device="cuda")))
        take(ring.reader)  # slots are pinned
        tensor = torch.zeros(1_000_000, device="cuda")
        tensor.add_(0)  # the kernel is loaded
        torch.cuda.synchronize()
        is_busy = keep_busy()
        tensor.add_(7)
        begin = time.perf_counter()
        assert ring.writer.try_write(tensor)
        taken_s = time.perf_counter() - begin
        assert is_busy()
        assert taken_s < 0.1
        assert not ring.writer.try_flush()
        assert torch.equal(take(ring.reader), torch.full((1_000_000,), 7.0))
        assert not is_busy()


def test_memory_given_back_while_a_copy_is_under_way_is_not_used_again(driver: CudaDriver) -> None:
    """The value dies at once, and the next tensors would lie in its memory."""
    with ring_on(driver, depth=4) as ring:
        for round_ in range(20):
            keep_busy(0.002)
            for number in range(4):
                until(lambda number=number: ring.writer.try_write(torch.full((300_000,), number, device="cuda")))  # type: ignore[misc]
            for number in range(4):
                assert bool((take(ring.reader) == number).all()), (round_, number)


def test_a_copy_from_a_view_on_a_slot_is_asynchronous(driver: CudaDriver) -> None:
    with ring_on(driver, depth=2, writes_from_device=False, reads_onto="default", spin_us=LONG_US) as ring:
        for number in range(6):
            until(lambda number=number: ring.writer.try_write(torch.full((4_000_000,), float(number))))  # type: ignore[misc]
            view = take(ring.reader)
            assert view.is_pinned()
            is_busy = keep_busy(0.05)
            near = view.to("cuda", non_blocking=True)
            assert is_busy()
            del view  # the slot is not free before the copy is done
            assert ring.reader.statistics().num_kept >= 1
            assert bool((near == number).all())
        torch.cuda.synchronize()
        assert ring.reader.statistics().num_kept == 0
        assert ring.reader.statistics().num_copied_out == 0


def test_tensors_are_brought_beside_what_runs_before(driver: CudaDriver) -> None:
    """Their copy does not wait for earlier kernels, and later kernels wait for it."""
    with ring_on(driver, depth=2, writes_from_device=False, reads_onto="cuda", spin_us=LONG_US) as ring:
        for _ in range(4):  # slots are pinned, memory is there
            until(lambda: ring.writer.try_write(torch.zeros(4_000_000)))
            take(ring.reader)
            torch.cuda.synchronize()
        for number in range(5):
            is_busy = keep_busy()
            until(lambda number=number: ring.writer.try_write(torch.full((4_000_000,), float(number))))  # type: ignore[misc]
            got = take(ring.reader)
            until(lambda: ring.reader.statistics().num_kept == 0, "the copy")
            assert is_busy()
            assert bool((got == number).all())
            del got


@pytest.mark.parametrize("num", [4, 3000])
def test_memory_of_tensors_that_were_brought_is_not_used_again_too_early(driver: CudaDriver, num: int) -> None:
    with ring_on(driver, depth=4, writes_from_device=False, reads_onto="cuda", spin_us=LONG_US) as ring:
        sums = []
        for number in range(100):
            until(lambda number=number: ring.writer.try_write(torch.full((num,), float(number))))  # type: ignore[misc]
            got = take(ring.reader)
            keep_busy(0.0005)
            sums.append(got.sum())
            del got
        assert [each.item() for each in sums] == [float(number * num) for number in range(100)]


def test_views_that_die_within_a_capture(driver: CudaDriver) -> None:
    with ring_on(driver, depth=1, writes_from_device=False, reads_onto="default", spin_us=LONG_US) as ring:
        assert ring.writer.try_write(torch.zeros(100_000))
        view, target = take(ring.reader), torch.zeros(1000, device="cuda")
        target.add_(1)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
            target.add_(1)
            del view
        graph.replay()
        graph.replay()
        torch.cuda.synchronize()
        assert ring.reader.statistics().num_kept == 0
        assert target[0].item() == 3


def test_no_pinned_memory_is_an_error_and_the_ring_goes_on(driver: CudaDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    with ring_on(driver, depth=1) as ring:
        with monkeypatch.context() as patch:

            def refuse(*args: Any) -> Any:
                raise DeviceError("pinning failed: CUDA_ERROR_OUT_OF_MEMORY")

            patch.setattr(driver, "map_host", refuse)
            with pytest.raises(DeviceError, match="channel c has no memory"):
                ring.writer.try_write(torch.zeros(1000, device="cuda"))
        until(lambda: ring.writer.try_write(torch.ones(1000, device="cuda")))
        assert torch.equal(take(ring.reader), torch.ones(1000))


def test_what_the_driver_passes_is_a_cpu_tensor_where_there_is_no_gpu(driver: CudaDriver) -> None:
    tensor = torch.arange(5000, device="cuda", dtype=torch.bfloat16).reshape(50, 100).t()
    message = memoryview(bytearray(message_of({"t": tensor}).to_bytes()))
    got = decode(message, shared=memoryview.toreadonly)["t"]
    assert got.device.type == "cpu"
    assert torch.equal(got, tensor.cpu())


def test_the_end_with_copies_under_way_leaves_nothing(driver: CudaDriver) -> None:
    with ring_on(driver, depth=4) as ring:
        tensor = torch.zeros(8_000_000, device="cuda")
        keep_busy(0.2)
        for _ in range(4):
            assert ring.writer.try_write(tensor)
        begin = time.perf_counter()
        ring.close_ends()
        assert time.perf_counter() - begin < 0.1  # closing waits for nothing


@pytest.mark.parametrize("polls", [True, False])
def test_from_a_gpu_to_a_host(polls: bool) -> None:
    cases.check(NUM_VALUES, 3, (0, polls), (cases.NO_DEVICE, "", "cpu", 2))


@pytest.mark.parametrize("depth", [1, 3])
def test_from_a_host_to_a_gpu(depth: int) -> None:
    cases.check(NUM_VALUES, depth, (cases.NO_DEVICE, False), (0, "cuda", "cuda", 2))


def test_through_the_host_to_the_gpu_of_another_process() -> None:
    """By default a tensor that lay on a GPU is brought to the reader's."""
    cases.check(NUM_VALUES, 3, (0, True), (0, "default", "cuda", 2))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("is_writer", [True, False])
def test_a_killed_peer_leaves_nothing(seed: int, is_writer: bool) -> None:
    dies = cases.dies_reading if is_writer else cases.dies_writing
    _, survivor = run_workers([dies, cases.survives], [(1, 0, seed), (0, 0, is_writer)], dying={0})
    assert "worker 0 died" in survivor.pop("error")
    survivor.pop("grown")  # CUDA makes threads and descriptors of its own when it likes
    assert survivor == {"num_wrong": 0, "held": []}
