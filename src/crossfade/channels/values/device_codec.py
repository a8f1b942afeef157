"""Values whose tensors lie on a device: a message without those tensors, and where each of them goes beside it.

Which *lane* a tensor takes (to one reader, into one device) is the caller's choice; what takes none stays in the message, as arrays
do. Within a lane tensors lie behind each other, each on a boundary of `ALIGN_BYTES`; that is the layout of a slot.

The message is one of ``channels.values.layout``, marked APART if any tensor was taken out. Its buffer 0 belongs to the channel,
which notes there where each lane's slot is, and buffer 1 is a table with an entry for each tensor that was taken out:

    u32 lane | u32 place among the pickle's out-of-band buffers | u64 offset in the lane | u64 length

The pickle asks for such a buffer like for any other, and is given what makes a tensor of a dtype and a shape. So nested containers,
objects, and one tensor in two places work by pickle's own rules. Two views of one memory become two tensors, as on the CPU.

For a reader on the host (`split_for_host`) they lie in the message itself, which has room for them: the reader takes it for any
other message, and the caller that splits the value copies the bytes.

Imported only where torch already is.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from io import BytesIO
from typing import Any, NamedTuple, TypeAlias, TypeVar, cast

import torch

from crossfade.channels.values.codec import decode
from crossfade.channels.values.layout import Encoded, Pickled, encode
from crossfade.channels.values.layout import split as take_apart
from crossfade.channels.values.tensors import (
    TensorPickler,
    TensorReducer,
    dump_by_cloudpickle,
    is_dense,
    rebuild_device_tensor,
    reduce_as_torch,
)
from crossfade.host.memory import align

ALIGN_BYTES = 256

LaneOf: TypeAlias = Callable[[torch.Tensor], int | None]
"""The lane that a tensor takes; None if it stays in the message."""

Make: TypeAlias = Callable[[int, int, torch.dtype, tuple[int, ...]], torch.Tensor]
"""A tensor at (lane, offset in bytes) of a dtype and a shape."""

OpenLanes: TypeAlias = Callable[[memoryview], Make]
"""What the channel noted of the lanes' slots, to what makes tensors in them."""

_ENTRY = struct.Struct("<IIQQ")
_MANY = 1024
_R = TypeVar("_R", bound=TensorReducer)


class Placed(NamedTuple):
    """A tensor that is not in the message, or not yet."""

    lane: int  # by which lane it goes; 0 if the message has room for it
    offset: int  # where it lies in the lane's slot, or in the message, in bytes
    tensor: torch.Tensor  # dense and contiguous; it may be computed only by work that is enqueued now

    @property
    def size_bytes(self) -> int:
        return self.tensor.numel() * self.tensor.itemsize


Note: TypeAlias = Callable[[Sequence[Placed]], bytearray]  # makes the notes about the tensors that go beside a message


class Split(NamedTuple):
    """A value taken apart."""

    message: Any  # everything but the tensors apart: `Encoded`, or bytes if that is a pickle and nothing else
    notes: bytearray  # buffer 0 of the message, for the carrier; empty if no tensor lies apart
    tensors: tuple[
        Placed, ...
    ]  # those, in the order in which the pickle met them; for a reader on the host, no empty ones
    lane_bytes: dict[int, int]  # of each lane that is used, the length of the slot that it takes


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or what is enqueued to become a contiguous copy of it on torch's current stream."""
    if tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg()):
        return tensor
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


class _Reducer(TensorReducer):
    """The pickler's treatment of tensors."""

    def __init__(self, lane_of: LaneOf) -> None:
        super().__init__()
        self.placed: dict[int, Placed] = {}  # those that go beside the message, by their place among the buffers
        self.lane_bytes: dict[int, int] = {}
        self._lane_of = lane_of

    def reduce(self, tensor: torch.Tensor) -> Any:
        if not is_dense(tensor):
            return reduce_as_torch(tensor)
        lane = self._lane_of(tensor)
        if lane is None:
            return super().reduce(tensor)
        whole = dense(tensor)
        placed = Placed(lane, align(self.lane_bytes.get(lane, 0), ALIGN_BYTES), whole)
        self.lane_bytes[lane] = placed.offset + placed.size_bytes
        self.placed[len(self.buffers)] = placed
        nothing = pickle.PickleBuffer(bytearray())
        return _rebuild, (nothing, whole.dtype, tuple(whole.shape), tensor.requires_grad)


def _rebuild(
    make: Callable[[torch.dtype, tuple[int, ...]], torch.Tensor],
    dtype: torch.dtype,
    shape: tuple[int, ...],
    requires_grad: bool,
) -> torch.Tensor:
    tensor = make(dtype, shape)
    return tensor.requires_grad_(requires_grad) if requires_grad else tensor


class Splitter:
    """Takes values apart. ``lane_of`` gives the lane that a tensor takes. ``note_bytes`` is the room that the channel's notes on a
    value's lanes take; it does not count where ``note`` makes the notes about a value's tensors.
    """

    def __init__(self, lane_of: LaneOf, note_bytes: int = 0, note: Note | None = None) -> None:
        self._lane_of = lane_of
        self._note: Note = note or (lambda _: bytearray(note_bytes))

    def split(self, value: object) -> Split:
        """Takes a value apart. Copies tensors that are not contiguous, on torch's current stream. Raises what pickling raised."""
        data, reducer = _dump(value, lambda: _Reducer(self._lane_of))
        if not reducer.placed:
            return Split(encode(reducer.pickled(data)), bytearray(), (), {})
        table = b"".join(
            _ENTRY.pack(placed.lane, place, placed.offset, placed.size_bytes)
            for place, placed in reducer.placed.items()
        )
        here = [place for place in range(len(reducer.buffers)) if place not in reducer.placed]
        notes = self._note(tuple(reducer.placed.values()))
        buffers = [memoryview(notes), memoryview(table), *(reducer.buffers[place].raw() for place in here)]
        private = frozenset(2 + number for number, place in enumerate(here) if place in reducer.private)
        message = encode(Pickled(data, buffers, private, is_apart=True))
        return Split(message, notes, tuple(reducer.placed.values()), reducer.lane_bytes)


def _dump(value: object, new_reducer: Callable[[], _R]) -> tuple[bytes, _R]:
    """A value's pickle, and what was kept out of it."""
    file, reducer = BytesIO(), new_reducer()
    try:
        TensorPickler(file, reducer).dump(value)
        data = file.getvalue()
    except (pickle.PicklingError, AttributeError, TypeError):
        data = None
    if data is None or b"__main__" in data:  # a class or function that only this process's main module has
        reducer = new_reducer()
        data = dump_by_cloudpickle(value, reducer)
    return data, reducer


class _Room(NamedTuple):
    """Stands for a buffer that the device copies: `encode` looks at its length only."""

    nbytes: int


class _HostReducer(TensorReducer):
    """Keeps device tensors apart from what the host copies."""

    def __init__(self, is_on_device: Callable[[torch.Tensor], bool]) -> None:
        super().__init__()
        self.rooms: dict[int, torch.Tensor] = {}  # those that are not empty, by their place among the buffers
        self._is_on_device = is_on_device

    def reduce(self, tensor: torch.Tensor) -> Any:
        if not (is_dense(tensor) and self._is_on_device(tensor)):
            return super().reduce(tensor)
        whole = dense(tensor)
        place = len(self.buffers)
        self.private.add(place)
        if whole.numel():
            self.rooms[place] = whole
        nothing = pickle.PickleBuffer(bytearray())
        return rebuild_device_tensor, (nothing, whole.dtype, tuple(whole.shape), tensor.requires_grad)


def split_for_host(value: object, is_on_device: Callable[[torch.Tensor], bool]) -> Split:
    """Takes a value apart whose device tensors are to lie in the message. Copies and raises as `Splitter.split`
    does. ``is_on_device`` says which tensors' bytes the caller copies; all others are in the message already.
    """
    if (
        type(value) is torch.Tensor and value.numel() and is_dense(value) and is_on_device(value)
    ):  # what most values are
        head, offset, size_bytes = _describe(value.dtype, value.shape, value.requires_grad)
        return Split(Encoded(head, (), size_bytes), bytearray(), (Placed(0, offset, dense(value)),), {})
    return _split_any(value, is_on_device)


def _split_any(value: object, is_on_device: Callable[[torch.Tensor], bool]) -> Split:
    data, reducer = _dump(value, lambda: _HostReducer(is_on_device))
    if not reducer.buffers:
        return Split(data, bytearray(), (), {})
    rooms = {place: _Room(whole.nbytes) for place, whole in reducer.rooms.items()}
    buffers = [rooms.get(place) or buffer.raw() for place, buffer in enumerate(reducer.buffers)]
    whole = encode(Pickled(data, cast(list[memoryview], buffers), frozenset(reducer.private)))
    tensors = tuple(Placed(0, whole.buffers[place][0], part) for place, part in reducer.rooms.items())
    here = tuple(buffer for place, buffer in enumerate(whole.buffers) if place not in rooms)
    return Split(Encoded(whole.head, here, whole.size_bytes), bytearray(), tensors, {})


@lru_cache(_MANY)
def _describe(dtype: torch.dtype, shape: torch.Size, requires_grad: bool) -> tuple[bytes, int, int]:
    """(what stands before the bytes of a tensor by itself, where they start, length of the message)."""
    blank = torch.empty(shape, dtype=dtype, device="meta", requires_grad=requires_grad)
    message, _, tensors, _ = _split_any(blank, lambda tensor: True)
    encoded = cast(Encoded, message)
    return encoded.head, tensors[0].offset, encoded.size_bytes


def join(
    message: memoryview,
    open_lanes: OpenLanes,
    *,
    private: Callable[[memoryview], object] = bytearray,
) -> Any:
    """Puts a value together from a message, which is writable. ``open_lanes`` is given what the channel noted, if tensors lie
    beside the message, and gives what makes them; that must be right about how long each lane's slot is. ``private``
    and what is raised: see `crossfade.channels.values.codec.decode`.
    """
    _, is_apart, data, places = take_apart(message)
    if not is_apart:
        return decode(message, private=private)
    entries, (notes, _) = _entries(places), places[0]
    del places[:2]
    make = open_lanes(notes)
    beside = {place: _maker(make, lane, offset, size_bytes) for lane, place, offset, size_bytes in entries}
    here = iter([private(place) if is_private else place.toreadonly() for place, is_private in places])
    buffers = (beside[n] if n in beside else next(here) for n in range(len(places) + len(beside)))
    return pickle.loads(data, buffers=buffers)


def notes_of(message: memoryview) -> memoryview | None:
    """The channel's notes on the lanes of a value, before it is put together; None if no tensor lies beside the message. Raises a
    ValueError if the message is none.
    """
    _, is_apart, _, places = take_apart(message)
    return places[0][0] if is_apart and places else None


def places_of(message: memoryview) -> list[tuple[int, int, int]]:
    """(lane, offset, length) of each tensor that lies beside a message, in the order in which `Split` has them. Raises a ValueError
    if the message is none.
    """
    _, is_apart, _, places = take_apart(message)
    return [(lane, offset, size_bytes) for lane, _, offset, size_bytes in _entries(places if is_apart else ())]


def _entries(places: Sequence[tuple[memoryview, bool]]) -> Iterator[tuple[int, int, int, int]]:
    """(lane, place, offset, length) of each tensor that lies beside a message with these buffers."""
    if len(places) < 2 or places[1][0].nbytes % _ENTRY.size:
        raise ValueError("a message has no table of tensors")
    return _ENTRY.iter_unpack(places[1][0])


def _maker(
    make: Make, lane: int, offset: int, size_bytes: int
) -> Callable[[torch.dtype, tuple[int, ...]], torch.Tensor]:
    def made(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        if torch.Size(shape).numel() * dtype.itemsize != size_bytes:
            raise ValueError(f"a tensor of shape {shape} and {dtype} does not have {size_bytes} bytes")
        return make(lane, offset, dtype, shape)

    return made
