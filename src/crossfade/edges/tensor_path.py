"""Tensors by themselves, which most values are: their records without a pickle.

All tensors of one type, shape and device are of one *kind*. The first of a kind tells the reader what the kind is; the others
name it by its number. A record's payload is::

    u32 number of the kind, with NEW for its first tensor | for each reader: u32 generation | u32 slot | u64 length
    | for its first tensor: the pickle of (the writer's device, by position, dtype, shape, requires_grad)
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import torch

from crossfade.channels.values.tensors import is_dense

__all__ = [
    "MOST_DESCRIPTION_BYTES",
    "MOST_KINDS",
    "NOTE",
    "NUMBER",
    "UNUSED",
    "Kind",
    "KindTable",
    "Kinds",
]

NUMBER = struct.Struct("<I")
NOTE = struct.Struct("<IIQ")  # of each lane: the generation and the slot of its part of the value, and its length

UNUSED = 0xFFFF_FFFF  # what stands for the generation in the note of a lane that a value does not take

NEW = 1 << 31
MOST_KINDS = 256  # Of one channel. Tensors of further ones are sent as other values are.

MOST_DESCRIPTION_BYTES = 256
"""Of a kind. Tensors of so many dimensions that it would take more are sent as other values are."""

_MOST_MADE = 64  # records of one kind that are kept: as long as slots do not change, the same ones come again and again

_Key: TypeAlias = tuple[torch.device, torch.dtype, torch.Size, bool, torch.layout]


@dataclass(slots=True)
class Kind:
    """What tensors have in common."""

    number: int  # by which the record names it
    source: int  # the writer's device, by position
    size_bytes: int
    description: bytes  # what the first tensor tells
    is_known: bool = False  # to the readers: a tensor of the kind was published
    _made: dict[tuple[tuple[int, int], ...], bytes] = field(default_factory=dict)

    def record_for(self, places: Sequence[tuple[int, int]]) -> bytes:
        """The payload of a tensor's record, with the (generation, slot) that it takes in the lane to each reader."""
        key = tuple(places)
        if self.is_known and (made := self._made.get(key)):
            return made
        notes = b"".join([NOTE.pack(*place, self.size_bytes) for place in places])
        if not self.is_known:
            return NUMBER.pack(self.number | NEW) + notes + self.description
        if len(self._made) >= _MOST_MADE:
            self._made.clear()
        record = self._made[key] = NUMBER.pack(self.number) + notes
        return record


class Kinds:
    """The kinds of one channel, at its writer. ``source_of``: the position of a tensor's device; None if it is on none."""

    def __init__(self, source_of: Callable[[torch.Tensor], int | None]) -> None:
        self._source_of = source_of
        self._kinds: dict[_Key, Kind | None] = {}

    def of(self, value: object) -> Kind | None:
        """The kind of a value, if it is a tensor that goes beside its record."""
        if type(value) is not torch.Tensor or value.is_nested:  # which has no shape
            return None
        key = (value.device, value.dtype, value.shape, value.requires_grad, value.layout)
        try:
            return self._kinds[key]
        except KeyError:
            return self._new(key, value)

    def _new(self, key: _Key, tensor: torch.Tensor) -> Kind | None:
        if len(self._kinds) >= MOST_KINDS:
            return None
        source = self._source_of(tensor) if is_dense(tensor) else None
        if source is None:
            return None
        _, dtype, shape, requires_grad, _ = key
        description = pickle.dumps((source, dtype, tuple(shape), requires_grad), 5)
        if len(description) > MOST_DESCRIPTION_BYTES:
            return None
        kind = Kind(len(self._kinds), source, tensor.numel() * tensor.itemsize, description)
        self._kinds[key] = kind
        return kind


class Described(NamedTuple):
    """What a reader knows of a kind; ``source`` is the writer's device, by position."""

    source: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    requires_grad: bool


class KindTable:
    """The kinds of one channel, as one of its ``num_readers`` sees them."""

    def __init__(self, num_readers: int) -> None:
        self._description = NUMBER.size + num_readers * NOTE.size  # where it begins
        self._kinds: dict[int, Described] = {}

    def find(self, payload: memoryview) -> Described:
        """The kind of a record's tensor. Raises a ValueError if the record is damaged."""
        (number,) = NUMBER.unpack_from(payload)
        if number & NEW and number ^ NEW < MOST_KINDS:
            self._kinds[number ^ NEW] = Described(*pickle.loads(payload[self._description :]))
        try:
            return self._kinds[number & ~NEW]
        except KeyError:
            raise ValueError(f"a damaged record names kind {number} of tensors") from None
