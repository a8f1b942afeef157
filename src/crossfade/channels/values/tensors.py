"""torch tensors in pickles, without a copy of those on the CPU. Imported only where torch already is.

A tensor's bytes are an out-of-band buffer of the pickle. When the pickle is read, what is given in the buffer's place is its
memory, or a `Place`: a call that makes a tensor of a dtype and a shape wherever the reader wants it.
"""

from __future__ import annotations

import copyreg
import pickle
from collections import ChainMap
from collections.abc import Callable
from functools import cache
from io import BytesIO
from typing import Any, TypeAlias

import torch

from crossfade.channels.values.layout import Pickled

Place: TypeAlias = Callable[[torch.dtype, tuple[int, ...], bool], torch.Tensor]
"""Makes a tensor of a dtype and a shape; told whether it lay on a device where it came from."""


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether it is elements in memory, by strides, and nothing else. (A nested tensor says of its layout that it is strided.)"""
    return tensor.layout is torch.strided and not (tensor.is_quantized or tensor.is_nested)


class TensorReducer:
    """The pickler's treatment of tensors: the bytes of dense tensors stay out of the pickle (torch's own way copies them three
    times). Those on a GPU are brought to the host first, and read as CPU tensors where the reader wants nothing else.
    """

    def __init__(self) -> None:
        # The out-of-band buffers; the pickler's ``buffer_callback`` adds to them.
        self.buffers: list[pickle.PickleBuffer] = []
        self.private: set[int] = set()  # positions of those that back tensors, which cannot be made read-only

    def pickled(self, data: bytes) -> Pickled:
        """The pickle that was made with this, and its buffers."""
        return Pickled(data, [buffer.raw() for buffer in self.buffers], frozenset(self.private))

    def reduce(self, tensor: torch.Tensor) -> Any:
        """For a dispatch table."""
        kind = tensor.device.type
        if not is_dense(tensor) or kind not in ("cpu", "cuda"):
            return reduce_as_torch(tensor)
        is_far = kind == "cuda"
        near = bring_to_host(tensor) if is_far else tensor
        flat = near.detach().resolve_conj().resolve_neg().contiguous().view(-1)
        data: Any = flat.view(torch.uint8).numpy() if flat.numel() else flat.new_empty(0, dtype=torch.uint8).numpy()
        self.private.add(len(self.buffers))
        parts = pickle.PickleBuffer(data), tensor.dtype, tuple(tensor.shape), tensor.requires_grad
        return rebuild_device_tensor if is_far else _rebuild_tensor, parts


class OwnTensorReducer(TensorReducer):
    """For readers that have their values to themselves: a tensor keeps its strides if it fills its memory, can be resized, and
    comes back to the GPU on which it is. Of a longer tensor's memory only its own part goes along. Attributes that a program has
    given it are kept.
    """

    def reduce(self, tensor: torch.Tensor) -> Any:
        reduced, attributes = self._reduce(tensor), vars(tensor)
        return (_rebuild_with_attributes, (*reduced[:2], attributes)) if attributes else reduced

    def _reduce(self, tensor: torch.Tensor) -> Any:
        if not is_dense(tensor) or tensor.device.type not in ("cpu", "cuda"):
            return reduce_as_torch(tensor)
        if tensor.untyped_storage().nbytes() < tensor.nbytes and tensor.dtype in _AS_TORCH:  # expanded
            return reduce_as_torch(tensor)
        plain = tensor.detach().resolve_conj().resolve_neg()
        packed = plain if _fills_its_memory(plain) else plain.contiguous()
        flat = packed.as_strided((packed.numel(),), (1,))
        near = bring_to_host(flat) if flat.is_cuda else flat
        data: Any = near.view(torch.uint8).numpy() if near.numel() else near.new_empty(0, dtype=torch.uint8).numpy()
        self.private.add(len(self.buffers))
        where = tensor.dtype, tuple(tensor.shape), packed.stride(), str(tensor.device)
        return _rebuild_own, (pickle.PickleBuffer(data), *where, tensor.requires_grad)


_AS_TORCH = {
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
}
"""Dtypes that torch pickles itself. (Others, as float8, have no kind of storage.)"""


def _fills_its_memory(tensor: torch.Tensor) -> bool:
    """Whether its elements lie one behind the other, in whatever order."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def _rebuild_own(
    data: Any, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...], device: str, requires_grad: bool
) -> torch.Tensor:
    tensor = torch.empty_strided(shape, strides, dtype=dtype, device="cpu")
    if tensor.numel():
        flat = tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
        flat.copy_(torch.frombuffer(memoryview(data), dtype=torch.uint8))
    return tensor.to(device).requires_grad_(requires_grad)


def reduce_as_torch(tensor: torch.Tensor) -> Any:
    """How a tensor that is not dense is pickled: a sparse one as its dense parts, others torch's way.

    (Torch's way for sparse ones keeps every tensor that is unpickled in a list of its own until the next ``torch.load``.)
    """
    if tensor.layout is torch.sparse_coo:
        parts = (tensor._indices(), tensor._values())
        return _rebuild_coo, (*parts, tuple(tensor.shape), tensor.is_coalesced(), tensor.requires_grad)
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        parts = (tensor.crow_indices(), tensor.col_indices())
        return _rebuild_compressed, (*parts, tensor.values(), tuple(tensor.shape), tensor.layout, tensor.requires_grad)
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        parts = (tensor.ccol_indices(), tensor.row_indices())
        return _rebuild_compressed, (*parts, tensor.values(), tuple(tensor.shape), tensor.layout, tensor.requires_grad)
    return tensor.__reduce_ex__(5)  # type: ignore[no-untyped-call]


def _rebuild_coo(
    indices: torch.Tensor, values: torch.Tensor, shape: tuple[int, ...], is_coalesced: bool, requires_grad: bool
) -> torch.Tensor:
    return torch.sparse_coo_tensor(
        indices,
        values,
        shape,
        device=values.device,  # or it would be the one that the program has made its default
        is_coalesced=is_coalesced,
        requires_grad=requires_grad,
        check_invariants=False,
    )


def _rebuild_compressed(
    outer: torch.Tensor,
    inner: torch.Tensor,
    values: torch.Tensor,
    shape: tuple[int, ...],
    layout: torch.layout,
    requires_grad: bool,
) -> torch.Tensor:
    return torch.sparse_compressed_tensor(
        outer,
        inner,
        values,
        shape,
        layout=layout,
        device=values.device,
        requires_grad=requires_grad,
        check_invariants=False,
    )


class TensorPickler(pickle.Pickler):
    """A pickler that keeps the bytes of dense tensors out of the pickle."""

    def __init__(self, file: BytesIO, reducer: TensorReducer | None = None) -> None:
        self.reducer = reducer or TensorReducer()
        super().__init__(file, 5, buffer_callback=self.reducer.buffers.append)
        tables: list[Any] = [{torch.Tensor: self.reducer.reduce}, copyreg.dispatch_table]
        self.dispatch_table = ChainMap(*tables)


def dump_by_cloudpickle(value: object, reducer: TensorReducer, *, is_in_band: bool = False) -> bytes:
    """The pickle of what only cloudpickle takes; tensors as by `TensorPickler`. With ``is_in_band`` the buffers are in it, too."""
    file = BytesIO()
    _cloud_pickler()(file, reducer.reduce, None if is_in_band else reducer.buffers.append).dump(value)
    return file.getvalue()


@cache
def _cloud_pickler() -> Any:
    """cloudpickle's pickler with an entry for tensors; made when first needed."""
    import cloudpickle

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
        """The interpreter's pickler looks for its table once, when it is made."""

        def __init__(self, file: BytesIO, reduce: Callable[[Any], Any], buffer_callback: Any) -> None:
            self.dispatch_table = ChainMap({torch.Tensor: reduce}, cloudpickle.Pickler.dispatch_table)
            super().__init__(file, 5, buffer_callback)

    return Pickler


def bring_to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A dense tensor's values in memory of the host, pinned where that can be had. Waits for the device."""
    dense = tensor.detach().resolve_conj().resolve_neg().contiguous()
    try:
        near = torch.empty(dense.shape, dtype=dense.dtype, device="cpu", pin_memory=True)
    except RuntimeError:  # no memory that can be pinned, or no device to pin it for
        near = torch.empty(dense.shape, dtype=dense.dtype, device="cpu")
    return near.copy_(dense)


def _rebuild_tensor(data: Any, dtype: torch.dtype, shape: tuple[int, ...], requires_grad: bool) -> torch.Tensor:
    """A tensor that lay on the CPU, in its `Place` or on the memory of ``data``."""
    tensor = data(dtype, shape, False) if callable(data) else tensor_of(data, dtype, shape)
    return tensor.requires_grad_(requires_grad) if requires_grad else tensor


def rebuild_device_tensor(data: Any, dtype: torch.dtype, shape: tuple[int, ...], requires_grad: bool) -> torch.Tensor:
    """A tensor that lay on a device, in its `Place` or, on the CPU, on the memory of ``data``."""
    tensor = data(dtype, shape, True) if callable(data) else tensor_of(data, dtype, shape)
    return tensor.requires_grad_(requires_grad) if requires_grad else tensor


def _rebuild_with_attributes(
    rebuild: Callable[..., torch.Tensor], parts: tuple[Any, ...], attributes: dict[str, Any]
) -> torch.Tensor:
    """A tensor with the attributes that a program has given it."""
    tensor = rebuild(*parts)
    vars(tensor).update(attributes)
    return tensor


def tensor_of(data: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """A CPU tensor on the memory of ``data``."""
    view = memoryview(data)
    if not view.nbytes and 0 not in shape:
        raise ValueError(f"a tensor of shape {shape} has no bytes")
    if not view.nbytes:
        return torch.empty(shape, dtype=dtype, device="cpu")
    return torch.frombuffer(view, dtype=dtype).view(shape)
