"""torch tensors that lie in device memory which torch does not own.

Where the device is `HOST`, the tensors are CPU tensors and everything else is the same.

torch's documented way, the CUDA array interface, takes 5 us a tensor, most of it to ask the driver whose memory it is. Where torch
has what its own CUDA-graph trees use to make a tensor of a storage, that is taken instead. Either way the tensor's storage holds
an object of ours, which dies with the last view.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable
from functools import cache
from math import prod
from typing import TYPE_CHECKING, Any

from crossfade.device.driver import HOST
from crossfade.errors import MissingDependency

if TYPE_CHECKING:
    import torch


def torch_or_raise() -> Any:
    """The module torch, or a `MissingDependency`."""
    try:
        import torch
    except ImportError:
        raise MissingDependency("torch", extra="gpu", needed_for="tensors on a GPU") from None
    return torch


@cache
def device_of(device: int) -> torch.device:
    """The device as torch names it."""
    torch = torch_or_raise()
    return torch.device("cpu") if device == HOST else torch.device("cuda", device)  # type: ignore[no-any-return]


def tensor_on(address: int, shape: tuple[int, ...], dtype: torch.dtype, device: int, keep: Any = None) -> torch.Tensor:
    """A contiguous tensor at an aligned address of this process, on a device (its index or `HOST`). ``keep`` is held until its last
    view is gone.
    """
    return TensorMaker(shape, dtype, device).make(address, keep)


class TensorMaker:
    """Makes contiguous tensors of one shape and type on a device's index or `HOST`."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: int) -> None:
        self._shape = shape
        self._dtype = dtype
        self._device = device_of(device)
        self._size_bytes = prod(shape) * dtype.itemsize
        # Gives the tensor at an address, aligned for the type; the second argument is held until the last view is gone.
        self.make: Callable[[int, Any], torch.Tensor]
        if not self._size_bytes:
            self.make = self._empty
        elif device == HOST:
            self.make = self._on_host
        elif _has_tensors_of_storages():
            inside = torch_or_raise()._C  # looked up once: this is on the way of each tensor
            self._new_storage = inside._construct_storage_from_data_pointer
            self._new_tensor = inside._construct_CUDA_Tensor_From_Storage_And_Metadata
            self._metadata = {"size": shape, "stride": _strides(shape), "dtype": dtype, "storage_offset": 0}
            self.make = self._of_storage
        else:
            self._typestr, self._is_other = _typestr(dtype)
            self.make = self._by_interface

    def _empty(self, address: int, keep: Any) -> torch.Tensor:
        return torch_or_raise().empty(self._shape, dtype=self._dtype, device=self._device)  # type: ignore[no-any-return]

    def _on_host(self, address: int, keep: Any) -> torch.Tensor:
        flat = torch_or_raise().frombuffer(_held(address, self._size_bytes, keep), dtype=self._dtype)
        return flat if len(self._shape) == 1 else flat.view(self._shape)  # type: ignore[no-any-return]

    def _of_storage(self, address: int, keep: Any) -> torch.Tensor:
        storage = self._new_storage(address, self._device, self._size_bytes)
        storage.crossfade_keep = keep  # torch keeps a storage's Python object as long as the storage itself
        return self._new_tensor(self._metadata, storage)  # type: ignore[no-any-return]

    def _by_interface(self, address: int, keep: Any) -> torch.Tensor:
        memory = _Memory(address, self._shape, self._typestr, keep)
        tensor = torch_or_raise().as_tensor(memory, device=self._device)
        return tensor.view(self._dtype) if self._is_other else tensor  # type: ignore[no-any-return]


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Of a contiguous tensor, in elements."""
    return tuple(prod(shape[axis + 1 :]) for axis in range(len(shape)))


class _Memory:
    """What torch makes a tensor of; the tensor's storage holds it, and thereby ``keep``, as long as any view is alive."""

    def __init__(self, address: int, shape: tuple[int, ...], typestr: str, keep: Any) -> None:
        self.keep = keep
        self.__cuda_array_interface__ = {
            "shape": shape,
            "typestr": typestr,
            "data": (address, False),
            "strides": None,
            "version": 3,
            "stream": None,
        }


@cache
def _typestr(dtype: torch.dtype) -> tuple[str, bool]:
    """How the interface calls a type, and whether that is another type of the same length, to be viewed as this one."""
    torch = torch_or_raise()
    own = {torch.float16: "<f2", torch.float32: "<f4", torch.float64: "<f8", torch.uint8: "|u1", torch.int8: "|i1"}
    own |= {
        torch.int16: "<i2",
        torch.int32: "<i4",
        torch.int64: "<i8",
        torch.complex64: "<c8",
        torch.complex128: "<c16",
    }
    same = {1: "|u1", 2: "<i2", 4: "<i4", 8: "<i8", 16: "<c16"}
    return (own[dtype], False) if dtype in own else (same[dtype.itemsize], True)


class _Probe:
    """Something whose end can be seen."""


@cache
def _has_tensors_of_storages() -> bool:
    """Whether this torch makes tensors of storages, and storages hold what they are given."""
    torch = torch_or_raise()
    names = ("_construct_storage_from_data_pointer", "_construct_CUDA_Tensor_From_Storage_And_Metadata")
    return all(hasattr(torch._C, name) for name in names) and storages_hold()


def storages_hold() -> bool:
    """Whether an attribute of a storage lives as long as the last view of a tensor on it, and no longer: tried out on the CPU."""
    torch = torch_or_raise()
    memory, probe = bytearray(8), _Probe()
    seen = weakref.ref(probe)
    address = ctypes.addressof(ctypes.c_uint8.from_buffer(memory))
    try:
        storage = torch._C._construct_storage_from_data_pointer(address, torch.device("cpu"), len(memory))
        storage.crossfade_keep = probe
        tensor = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage, 0, (len(memory),), (1,))
    except (AttributeError, RuntimeError, TypeError):
        return False
    del storage, probe
    view = tensor[2:4].detach()
    del tensor
    is_held = seen() is not None
    del view
    return is_held and seen() is None


def _held(address: int, size_bytes: int, keep: Any) -> Any:
    """The bytes at an address as a buffer that holds ``keep``, as long as any view of it is alive."""
    buffer = (ctypes.c_uint8 * size_bytes).from_address(address)
    if keep is not None:
        weakref.finalize(buffer, _drop, keep).atexit = False
    return buffer


def _drop(keep: Any) -> None:
    """Its last reference goes with this call."""
