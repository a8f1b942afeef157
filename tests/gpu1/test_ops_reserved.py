"""One GPU: cuBLAS leaves SMs alone, so that another kernel runs beside a product."""

from __future__ import annotations

import ctypes
import os
from types import SimpleNamespace
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")

from crossfade.ops import reserved  # noqa: E402
from crossfade.ops.reserved import leaving_sms  # noqa: E402


def target() -> int:
    """What cuBLAS has been told."""
    for name in reserved._LIBRARIES:
        try:
            library = ctypes.CDLL(name, mode=os.RTLD_NOLOAD | os.RTLD_LOCAL)
        except OSError:
            continue
        found = ctypes.c_int(-1)
        handle = ctypes.c_void_p(torch.cuda.current_blas_handle())
        assert library.cublasGetSmCountTarget(handle, ctypes.byref(found)) == 0
        return found.value
    raise AssertionError("torch has loaded no cuBLAS")


@pytest.mark.timeout(120)
def test_cublas_is_told_and_multiplies_as_ever() -> None:
    torch.cuda.set_device(0)
    a, b = (torch.randint(-1, 2, (1024, 1024), device="cuda").to(torch.bfloat16) for _ in range(2))
    wanted = a.double() @ b.double()
    num_all = torch.cuda.get_device_properties(0).multi_processor_count
    group: Any = SimpleNamespace(device_type="cuda", home=SimpleNamespace(driver=SimpleNamespace(device=0)))
    assert torch.equal((a @ b).double(), wanted.to(torch.bfloat16).double())
    with leaving_sms(group, 16):
        assert target() == num_all - 16
        few = a @ b
        batched = torch.bmm(a.view(4, 256, 1024), b.expand(4, 1024, 1024))
    assert target() == 0
    for each in (few, batched.view(1024, 1024)):
        assert torch.equal(each.double(), wanted.to(torch.bfloat16).double())
