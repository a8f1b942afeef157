"""SMs that cuBLAS leaves to others, with a cuBLAS and a torch that only note what they are told."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from crossfade.errors import DeviceError
from crossfade.ops import reserved
from crossfade.ops.reserved import leaving_sms


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    cuda = SimpleNamespace(
        current_blas_handle=lambda: 77,
        get_device_properties=lambda device: SimpleNamespace(multi_processor_count=132),
    )
    monkeypatch.setattr(reserved, "torch_or_raise", lambda: SimpleNamespace(cuda=cuda))

    def note(handle: int, num_sms: int) -> int:
        found.append((handle, num_sms))
        return 0

    monkeypatch.setattr(reserved, "_setter", lambda: note)
    return found


def group(device_type: str = "cuda") -> Any:
    return SimpleNamespace(device_type=device_type, home=SimpleNamespace(driver=SimpleNamespace(device=0)))


def test_products_inside_leave_some_and_those_behind_none(log: list[tuple[int, int]]) -> None:
    with leaving_sms(group(), 4):
        assert log == [(77, 128)]
    assert log == [(77, 128), (77, 0)]
    with pytest.raises(RuntimeError, match="a product"), leaving_sms(group(), 500):
        raise RuntimeError("a product")
    assert log[2:] == [(77, 1), (77, 0)]


def test_nothing_is_asked_for_without_a_number_or_a_gpu_or_cublas(
    log: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with leaving_sms(group(), 0), leaving_sms(group("cpu"), 4):
        pass
    monkeypatch.setattr(reserved, "_setter", lambda: None)
    with leaving_sms(group(), 4):
        pass
    assert log == []


def test_a_number_that_cublas_does_not_take(log: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reserved, "_setter", lambda: lambda *told: 7)
    with (
        pytest.raises(DeviceError, match=r"leave 4 of 132 SMs alone \(error 7\)\nhint: reserve none"),
        leaving_sms(group(), 4),
    ):
        pass
