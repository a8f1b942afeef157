"""Values between a device and the host, over CPU tensors that stand for a device's: conformance, and values of all kinds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest

torch: Any = pytest.importorskip("torch")

from crossfade.channels.protocol import Reader, Writer  # noqa: E402
from crossfade.channels.values import device_codec  # noqa: E402
from crossfade.channels.values.device_codec import split_for_host  # noqa: E402
from crossfade.channels.values.layout import Encoded  # noqa: E402
from crossfade.channels.values.tensors import bring_to_host  # noqa: E402
from crossfade.device.host_driver import HostDriver  # noqa: E402
from crossfade.testing import conformance  # noqa: E402
from tests.helpers import host_copy_cases as cases  # noqa: E402
from tests.helpers.host_rings import open_ring, write  # noqa: E402
from tests.helpers.waiting import take  # noqa: E402


@contextmanager
def open_pair(depth: int, num_readers: int, **options: Any) -> Iterator[tuple[Writer, Sequence[Reader]]]:
    with open_ring(HostDriver(1.0), depth=depth, num_readers=num_readers, **options) as ring:
        yield ring.writer, ring.readers


@contextmanager
def open_pending(depth: int, num_readers: int) -> Iterator[tuple[Writer, Sequence[Reader]]]:
    """Every value goes the way of one that has to be copied."""
    with open_ring(HostDriver(1.0), depth=depth, num_readers=num_readers) as ring:
        telling = ring.writer.carrier._telling
        (_, *rest), published = ring.writer.ring.posts[0], telling._published

        def published_later() -> None:
            telling.job = telling.job or ((), lambda error: None, None)
            published()

        ring.writer.ring.posts = [(published_later, *rest)]
        yield ring.writer, ring.readers


TestPending = conformance.suite(open_pending)
TestFromDevice = conformance.suite(open_pair)
TestToDevice = conformance.suite(partial(open_pair, writes_from_device=False, reads_onto="cuda"))
TestBoth = conformance.suite(partial(open_pair, reads_onto="default"))

DTYPES = [*cases.ALL_DTYPES, torch.uint16]


def raw(tensor: Any) -> Any:
    return tensor.contiguous().view(-1).view(torch.uint8)


def sample(dtype: Any, shape: tuple[int, ...]) -> Any:
    return torch.arange(torch.Size(shape).numel()).remainder(50).reshape(shape).to(dtype)


# Values


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (0, 3), (3, 5), (2, 300, 7)])
@pytest.mark.parametrize("reads_onto", ["", "default", "cuda"])
def test_tensors_of_all_types_and_shapes(dtype: Any, shape: tuple[int, ...], reads_onto: str) -> None:
    tensor = sample(dtype, shape)
    with open_ring(HostDriver(1.0), reads_onto=reads_onto) as ring:
        for _ in range(3):
            write(ring, tensor)
            got = take(ring.reader)
            assert got.dtype is dtype
            assert tuple(got.shape) == shape
            assert torch.equal(raw(got), raw(tensor))
            del got


@pytest.mark.parametrize("writes_from_device", [True, False])
@pytest.mark.parametrize("reads_onto", ["", "default", "cuda", "cpu"])
def test_values_with_tensors_among_other_things(writes_from_device: bool, reads_onto: str) -> None:
    base = torch.arange(24.0).reshape(4, 6)
    value: dict[str, Any] = {
        "transposed": base.t(),
        "strided": base[:, ::2],
        "expanded": base[0].expand(3, 6),
        "conjugate": torch.tensor([1 + 2j, 3 - 4j]).conj(),
        "negative": torch.tensor([1 + 2j, 3 - 4j]).conj().imag,
        "negated": torch._neg_view(torch.arange(4.0)),
        "grad": torch.ones(2, requires_grad=True) * 2,
        "twice": [base, (base,)],
        "call": lambda x: x + 1,
        "array": np.arange(1000),
        "more": [None, "text", 3],
    }
    with open_ring(HostDriver(1.0), writes_from_device=writes_from_device, reads_onto=reads_onto) as ring:
        write(ring, value)
        got = take(ring.reader)
        for name in ("transposed", "strided", "expanded", "conjugate", "negative", "negated", "grad"):
            assert torch.equal(got[name], value[name]), name
        assert not got["conjugate"].is_conj()
        assert not got["negated"].is_neg()
        assert got["grad"].requires_grad
        assert got["grad"].grad_fn is None
        assert got["twice"][0] is got["twice"][1][0]
        assert got["call"](1) == 2
        assert np.array_equal(got["array"], value["array"])
        assert not got["array"].flags.writeable
        assert got["more"] == value["more"]


def test_modules_and_parameters() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU())
    with open_ring(HostDriver(1.0), reads_onto="cuda") as ring:
        write(ring, module)
        got = take(ring.reader)
    x = torch.rand(5, 3)
    assert torch.equal(got(x), module(x))
    assert all(type(each) is torch.nn.Parameter for each in got.parameters())


def test_no_byte_of_a_device_tensor_is_copied_by_the_host() -> None:
    tensor, cpu = torch.full((1000,), 7, dtype=torch.uint8), torch.full((500,), 3, dtype=torch.uint8)
    split = split_for_host({"a": tensor, "b": cpu, "none": torch.empty(0)}, lambda each: each is not cpu)
    assert isinstance(split.message, Encoded)
    assert [data.nbytes for _, data in split.message.buffers] == [500, 0]
    ((_, offset, placed),) = split.tensors
    assert placed.data_ptr() == tensor.data_ptr()
    assert offset % 64 == 0
    assert offset + 1000 <= split.message.size_bytes


@pytest.mark.parametrize("requires_grad", [True, False])
@pytest.mark.parametrize("shape", [(), (1,), (3, 5)])
def test_a_tensor_by_itself_is_laid_out_as_any_value(shape: tuple[int, ...], requires_grad: bool) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.complex64):
        tensor = sample(dtype, shape).requires_grad_(requires_grad)
        short, general = (make(tensor, lambda each: True) for make in (split_for_host, device_codec._split_any))
        assert short.message == general.message
        assert short.tensors[0].offset == general.tensors[0].offset


def test_without_tensors_a_value_is_a_pickle() -> None:
    assert isinstance(split_for_host({"n": 3}, lambda each: True).message, bytes)


def test_what_a_gpu_of_nobody_holds_is_brought_to_the_host() -> None:
    tensor = torch.arange(24).reshape(4, 6).t()
    got = bring_to_host(tensor)
    assert got.is_contiguous()
    assert torch.equal(got, tensor)
    assert got.data_ptr() != tensor.data_ptr()


def test_several_readers_have_memory_of_their_own() -> None:
    with open_ring(HostDriver(1.0), num_readers=3) as ring:
        for number in range(5):
            write(ring, torch.full((5000,), number))
            got = [take(reader) for reader in ring.readers]
            got[0].zero_()
            assert [int(each[0]) for each in got] == [0, number, number]


# Recording


class Counted(HostDriver):
    """Counts what is enqueued beside the copies."""

    def __init__(self) -> None:
        super().__init__(1.0)
        self.num_events = 0

    def record_event(self, event: int, stream: int) -> None:
        self.num_events += 1
        super().record_event(event, stream)


@pytest.mark.parametrize("is_recorded", [False, True])
def test_copies_are_recorded_where_somebody_asks_and_else_nothing_is_enqueued_for_it(is_recorded: bool) -> None:
    driver = Counted()
    spans: list[tuple[str, int]] = []
    value = {"one": torch.arange(5), "other": torch.ones(3), "text": "x"}

    def record(name: str) -> Any:
        def begin(stream: int, execution: int | None = None) -> Any:
            driver.record_event(timer, stream)

            def end(size_bytes: int) -> None:
                driver.record_event(timer, stream)
                spans.append((name, size_bytes))

            return end

        return begin

    timer = driver.create_timer()
    with open_ring(driver, reads_onto="default") as ring:
        if is_recorded:
            ring.writer.carrier.recorded[0].around = record("up")
            ring.reader.carrier.brought.around = record("down")
        write(ring, value)
        assert take(ring.reader)["one"].tolist() == [0, 1, 2, 3, 4]
        assert driver.num_events == (7 if is_recorded else 3)
        write(ring, "nothing on a device")
        take(ring.reader)
        driver.destroy_event(timer)
    assert spans == ([("up", 52), ("down", 52)] if is_recorded else [])
