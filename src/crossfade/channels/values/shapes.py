"""Which tensors a value holds, found as the pickler that sends it finds them. Imported only where torch already is."""

from __future__ import annotations

import pickle
from io import BytesIO
from typing import Any, TypeAlias

import torch

from crossfade.channels.values.codec import PLAIN_TYPES
from crossfade.channels.values.tensors import TensorPickler, TensorReducer, dump_by_cloudpickle

Shapes: TypeAlias = tuple[tuple[torch.Size, torch.dtype], ...]
"""(shape, dtype) of each tensor of a value, each once, in the order in which the pickler meets them."""

_MOST_ITEMS = 64
_MOST_LEVELS = 3


def shapes_of(value: object) -> Shapes:
    """The shapes and dtypes of a value's tensors. Looks at no device, and waits for none.

    Tensors by themselves and in small tuples, lists and dicts are found without a pickler, in a microsecond each. A pickler that
    writes nowhere looks through all else, so an object's own ``__reduce__`` is asked once more than to send it. Raises what
    pickling raised.
    """
    if type(value) is torch.Tensor:
        return (_shape_of(value),)
    found: dict[int, tuple[torch.Size, torch.dtype]] = {}
    return tuple(found.values()) if _is_found(value, found, _MOST_LEVELS) else _by_pickler(value)


def _shape_of(tensor: torch.Tensor) -> tuple[torch.Size, torch.dtype]:
    """Of a nested tensor, which has no shape, the number of its parts stands for it."""
    return torch.Size((tensor.size(0),)) if tensor.is_nested else tensor.shape, tensor.dtype


def _is_found(value: object, found: dict[int, tuple[torch.Size, torch.dtype]], num_levels: int) -> bool:
    """Adds a value's tensors; False if it holds what takes a pickler to look into."""
    kind = type(value)
    if kind is torch.Tensor:
        found[id(value)] = _shape_of(value)  # type: ignore[arg-type]
        return True
    if kind in PLAIN_TYPES:
        return True
    items: Any = value
    if kind is dict:
        if not all(type(key) in PLAIN_TYPES for key in items):
            return False
        items = items.values()
    elif kind is not tuple and kind is not list:
        return False
    return (
        num_levels > 0 and len(items) <= _MOST_ITEMS and all(_is_found(each, found, num_levels - 1) for each in items)
    )


class _Noting(TensorReducer):
    """Takes note of tensors, and of nothing in them."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[torch.Size, torch.dtype]] = []

    def reduce(self, tensor: torch.Tensor) -> Any:
        self.found.append(_shape_of(tensor))
        return str, ()


class _Nowhere(BytesIO):
    """A file that keeps nothing."""

    def write(self, data: Any) -> int:
        return len(data)


def _by_pickler(value: object) -> Shapes:
    noting = _Noting()
    try:
        TensorPickler(_Nowhere(), noting).dump(value)
    except (pickle.PicklingError, AttributeError, TypeError):
        noting = _Noting()
        dump_by_cloudpickle(value, noting)
    return tuple(noting.found)
