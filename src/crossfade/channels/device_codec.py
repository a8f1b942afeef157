"""Values whose tensors lie on a device: a message without those tensors, and where each of them goes beside it.

Which *lane* a tensor takes (to one reader, into one device) is the caller's choice; what takes none stays in the message, as arrays
do. Within a lane tensors lie behind each other, each on a boundary of `ALIGN_BYTES`; that is the layout of a slot.

The message is one of ``channels.layout``, marked APART if any tensor was taken out. Then its buffer 0 belongs to the channel, which
notes there where each lane's slot is, and buffer 1 is a table with an entry for each tensor that was taken out:

    u32 lane | u32 place among the pickle's out-of-band buffers | u64 offset in the lane | u64 length

The pickle asks for such a buffer like for any other, and is given what makes a tensor of a dtype and a shape. So nested containers,
objects, and one tensor in two places work by pickle's own rules. Two views of one memory become two tensors, as on the CPU.

Imported only where torch already is.
"""

from __future__ import annotations

import pickle
import struct
from collections import ChainMap
from collections.abc import Callable, Iterator
from io import BytesIO
from typing import Any, NamedTuple, TypeAlias

import torch

from crossfade.channels.codec import decode
from crossfade.channels.layout import Encoded, Pickled, encode
from crossfade.channels.layout import split as take_apart
from crossfade.channels.tensors import TensorPickler, TensorReducer
from crossfade.host.memory import align

__all__ = [
    "ALIGN_BYTES",
    "LaneOf",
    "Make",
    "OpenLanes",
    "Placed",
    "Split",
    "Splitter",
    "join",
    "notes_of",
    "places_of",
    "split",
]

ALIGN_BYTES = 256

LaneOf: TypeAlias = Callable[[torch.Tensor], int | None]
"""The lane that a tensor takes; None if it stays in the message."""

Make: TypeAlias = Callable[[int, int, torch.dtype, tuple[int, ...]], torch.Tensor]
"""A tensor at (lane, offset in bytes) of a dtype and a shape."""

OpenLanes: TypeAlias = Callable[[memoryview], Make]
"""What the channel noted of the lanes' slots, to what makes tensors in them."""

_ENTRY = struct.Struct("<IIQQ")
_MOST_BARE = 256


class Placed(NamedTuple):
    """A tensor that goes beside the message.

    Attributes:
        lane: by which lane.
        offset: where it lies in the lane's slot, in bytes.
        tensor: dense and contiguous; it may be computed only by work that is enqueued now.
    """

    lane: int
    offset: int
    tensor: torch.Tensor

    @property
    def size_bytes(self) -> int:
        """Its length."""
        return self.tensor.numel() * self.tensor.itemsize


class Split(NamedTuple):
    """A value taken apart.

    Attributes:
        message: everything but the tensors beside it.
        notes: buffer 0 of the message, for the channel; empty if no tensor lies beside it.
        tensors: those, in the order in which the pickle met them.
        lane_bytes: of each lane that is used, the length of the slot that it takes.
    """

    message: Encoded
    notes: bytearray
    tensors: tuple[Placed, ...]
    lane_bytes: dict[int, int]


class _Reducer(TensorReducer):
    """What the pickler does with tensors.

    Attributes:
        placed: those that go beside the message, by their place among the buffers.
    """

    def __init__(self, lane_of: LaneOf) -> None:
        super().__init__()
        self.placed: dict[int, Placed] = {}
        self.lane_bytes: dict[int, int] = {}
        self._lane_of = lane_of

    def reduce(self, tensor: torch.Tensor) -> Any:
        if tensor.layout is not torch.strided or tensor.is_quantized:
            return tensor.__reduce_ex__(5)  # type: ignore[no-untyped-call]
        lane = self._lane_of(tensor)
        if lane is None:
            return super().reduce(tensor)
        dense = _dense(tensor)
        placed = Placed(lane, align(self.lane_bytes.get(lane, 0), ALIGN_BYTES), dense)
        self.lane_bytes[lane] = placed.offset + placed.size_bytes
        self.placed[len(self.buffers)] = placed
        nothing = pickle.PickleBuffer(bytearray())
        return _rebuild, (nothing, dense.dtype, tuple(dense.shape), tensor.requires_grad)


def _rebuild(
    make: Callable[[torch.dtype, tuple[int, ...]], torch.Tensor],
    dtype: torch.dtype,
    shape: tuple[int, ...],
    requires_grad: bool,
) -> torch.Tensor:
    tensor = make(dtype, shape)
    return tensor.requires_grad_(requires_grad) if requires_grad else tensor


class _Bare(NamedTuple):
    """What the messages of all tensors of one type and shape have in common."""

    message: Encoded
    num_bytes: int


class Splitter:
    """Takes values apart.

    Args:
        lane_of: which lane a tensor takes.
        note_bytes: what the channel has to note of a value's lanes takes so much room.
    """

    def __init__(self, lane_of: LaneOf, note_bytes: int = 0) -> None:
        self._lane_of = lane_of
        self._note_bytes = note_bytes
        self._bare: dict[tuple[int, torch.dtype, torch.Size, bool], _Bare] = {}

    def split(self, value: object) -> Split:
        """Takes a value apart. Tensors that are not contiguous are copied, on torch's current stream.

        Raises:
            Exception: what pickling raised.
        """
        if type(value) is torch.Tensor and value.layout is torch.strided and not value.is_quantized:
            lane = self._lane_of(value)
            if lane is not None:
                return self._split_bare(value, lane)
        return self._split_any(value)

    def _split_bare(self, tensor: torch.Tensor, lane: int) -> Split:
        """A tensor by itself: what most values are. Only the first of its kind is pickled."""
        key = (lane, tensor.dtype, tensor.shape, tensor.requires_grad)
        known = self._bare.get(key)
        if known is None:
            if len(self._bare) >= _MOST_BARE:
                self._bare.clear()
            parts = self._split_any(tensor)
            self._bare[key] = _Bare(parts.message, parts.lane_bytes[lane])
            return parts
        notes = bytearray(self._note_bytes)
        (first, _), *others = known.message.buffers
        message = known.message._replace(buffers=((first, memoryview(notes)), *others))
        return Split(message, notes, (Placed(lane, 0, _dense(tensor)),), {lane: known.num_bytes})

    def _split_any(self, value: object) -> Split:
        try:
            data, reducer = _dump(value, self._lane_of)
        except (pickle.PicklingError, AttributeError, TypeError):
            data, reducer = _dump_by_cloudpickle(value, self._lane_of)
        else:
            if b"__main__" in data:  # a class or function that only this process's main module has
                data, reducer = _dump_by_cloudpickle(value, self._lane_of)
        if not reducer.placed:
            buffers = [buffer.raw() for buffer in reducer.buffers]
            return Split(encode(Pickled(data, buffers, frozenset(reducer.private))), bytearray(), (), {})
        table = b"".join(
            _ENTRY.pack(placed.lane, place, placed.offset, placed.size_bytes)
            for place, placed in reducer.placed.items()
        )
        here = [place for place in range(len(reducer.buffers)) if place not in reducer.placed]
        notes = bytearray(self._note_bytes)
        buffers = [memoryview(notes), memoryview(table), *(reducer.buffers[place].raw() for place in here)]
        private = frozenset(2 + number for number, place in enumerate(here) if place in reducer.private)
        message = encode(Pickled(data, buffers, private, is_apart=True))
        return Split(message, notes, tuple(reducer.placed.values()), reducer.lane_bytes)


def split(value: object, lane_of: LaneOf) -> Split:
    """`Splitter.split`, once."""
    return Splitter(lane_of).split(value)


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def _dump(value: object, lane_of: LaneOf) -> tuple[bytes, _Reducer]:
    file, reducer = BytesIO(), _Reducer(lane_of)
    TensorPickler(file, reducer).dump(value)
    return file.getvalue(), reducer


def _dump_by_cloudpickle(value: object, lane_of: LaneOf) -> tuple[bytes, _Reducer]:
    import cloudpickle

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
        """With an entry for tensors. (The interpreter's pickler looks for its table once, when it is made.)"""

        def __init__(self, file: BytesIO, reducer: _Reducer) -> None:
            self.dispatch_table = ChainMap({torch.Tensor: reducer.reduce}, cloudpickle.Pickler.dispatch_table)
            super().__init__(file, 5, reducer.buffers.append)

    file, reducer = BytesIO(), _Reducer(lane_of)
    Pickler(file, reducer).dump(value)
    return file.getvalue(), reducer


def join(
    message: memoryview,
    open_lanes: OpenLanes,
    *,
    private: Callable[[memoryview], object] = bytearray,
    shared: Callable[[memoryview], object],
) -> Any:
    """Puts a value together.

    Args:
        message: the whole message, writable.
        open_lanes: is given what the channel noted, if tensors lie beside the message, and gives what makes them; that must be
            right about how long each lane's slot is.
        private: what to make of a buffer in the message that only this reader may see.
        shared: what to make of every other one. (`crossfade.channels.codec.decode` has the same two.)

    Raises:
        Exception: what unpickling raised, or ValueError when the message is not one.
    """
    _, is_apart, data, places = take_apart(message)
    if not is_apart:
        return decode(message, private=private, shared=shared)
    if len(places) < 2 or places[1][0].nbytes % _ENTRY.size:
        raise ValueError("a message has no table of tensors")
    (notes, _), (table, _) = places[:2]
    del places[:2]
    make = open_lanes(notes)
    beside = {place: _maker(make, *where) for place, *where in _entries(table)}
    here = iter([private(place) if is_private else shared(place) for place, is_private in places])
    buffers = (beside[n] if n in beside else next(here) for n in range(len(places) + len(beside)))
    return pickle.loads(data, buffers=buffers)


def notes_of(message: memoryview) -> memoryview | None:
    """What the channel noted of the lanes of a value, before it is put together; None if no tensor lies beside the message.

    Raises:
        ValueError: the message is none.
    """
    _, is_apart, _, places = take_apart(message)
    return places[0][0] if is_apart and places else None


def places_of(message: memoryview) -> list[tuple[int, int, int]]:
    """(lane, offset, length) of each tensor that lies beside a message, in the order in which `Split` has them.

    Raises:
        ValueError: the message is none.
    """
    _, is_apart, _, places = take_apart(message)
    if not is_apart or len(places) < 2 or places[1][0].nbytes % _ENTRY.size:
        raise ValueError("a message has no table of tensors")
    return [(lane, offset, size_bytes) for _, lane, offset, size_bytes in _entries(places[1][0])]


def _entries(table: memoryview) -> Iterator[tuple[int, int, int, int]]:
    """(place, lane, offset, length) of each tensor."""
    for lane, place, offset, size_bytes in _ENTRY.iter_unpack(table):
        yield place, lane, offset, size_bytes


def _maker(
    make: Make, lane: int, offset: int, size_bytes: int
) -> Callable[[torch.dtype, tuple[int, ...]], torch.Tensor]:
    def made(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        if torch.Size(shape).numel() * dtype.itemsize != size_bytes:
            raise ValueError(f"a tensor of shape {shape} and {dtype} does not have {size_bytes} bytes")
        return make(lane, offset, dtype, shape)

    return made
