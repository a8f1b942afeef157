"""torch CPU tensors in pickles, without a copy. Imported only where torch already is."""

from __future__ import annotations

import copyreg
import pickle
from collections import ChainMap
from io import BytesIO
from typing import Any

import torch

__all__ = ["TensorPickler", "TensorReducer"]


class TensorReducer:
    """What a pickler does with tensors: the bytes of dense CPU tensors stay out of the pickle (torch's own way copies them three
    times).

    Attributes:
        buffers: the out-of-band buffers; the pickler's ``buffer_callback`` adds to them.
        private: positions of those that back tensors, which cannot be made read-only.
    """

    def __init__(self) -> None:
        self.buffers: list[pickle.PickleBuffer] = []
        self.private: set[int] = set()

    def reduce(self, tensor: torch.Tensor) -> Any:
        """For a dispatch table."""
        if tensor.layout is not torch.strided or tensor.device.type != "cpu" or tensor.is_quantized or tensor.is_conj():
            return tensor.__reduce_ex__(5)  # type: ignore[no-untyped-call]
        flat = tensor.detach().contiguous().view(-1)
        data: Any = flat.view(torch.uint8).numpy() if flat.numel() else flat.new_empty(0, dtype=torch.uint8).numpy()
        self.private.add(len(self.buffers))
        return _rebuild_tensor, (pickle.PickleBuffer(data), tensor.dtype, tuple(tensor.shape), tensor.requires_grad)


class TensorPickler(pickle.Pickler):
    """A pickler that keeps the bytes of dense CPU tensors out of the pickle.

    Attributes:
        reducer: what it kept out.
    """

    def __init__(self, file: BytesIO, reducer: TensorReducer | None = None) -> None:
        self.reducer = reducer or TensorReducer()
        super().__init__(file, 5, buffer_callback=self.reducer.buffers.append)
        tables: list[Any] = [{torch.Tensor: self.reducer.reduce}, copyreg.dispatch_table]
        self.dispatch_table = ChainMap(*tables)


def _rebuild_tensor(data: Any, dtype: torch.dtype, shape: tuple[int, ...], requires_grad: bool) -> torch.Tensor:
    """A tensor on the memory of ``data``."""
    view = memoryview(data)
    if not view.nbytes and 0 not in shape:
        raise ValueError(f"a tensor of shape {shape} has no bytes")
    tensor = torch.frombuffer(view, dtype=dtype).view(shape) if view.nbytes else torch.empty(shape, dtype=dtype)
    return tensor.requires_grad_(requires_grad) if requires_grad else tensor
