"""What two ranks tell each other of a transfer, as bytes.

A *window* is a value's memory as the other rank reaches it, with two counters: its owner's stream says by ``ready`` that the memory
may be read (or written), the other rank says by ``done`` that it has been. A letter that says that something is
enqueued makes a wait for it safe (PL-5).
"""

from __future__ import annotations

import struct
from typing import NamedTuple, TypeAlias

from crossfade.errors import ChannelError

MOST_DIMS = 16
LETTER_BYTES = 256
"""Room for the longest letter and its length."""


class Window(NamedTuple):
    """Memory of one rank, for one transfer."""

    memory: int  # the number of an `Exported`
    offset: int  # in it
    word: int  # which counters of the owner's
    uses: int  # the value of theirs that this transfer brings
    is_lent: bool  # whether the owner waits for `Pulled` or `Pushed` before it uses the memory again
    is_prompt: bool = True  # whether ``done`` is set by the stream that copies; else its host may do it later
    # which stream of the owner's says ``ready``, in the order of its announcements; 0 for one that is not in that order.
    stream: int = 0


class Exported(NamedTuple):
    """Memory that the writer's windows lie in, from now on."""

    memory: int
    size_bytes: int
    is_host: bool  # whether it is for tensors of the host, or of a GPU
    is_staged: bool  # whether it is pinned memory of the host
    handle: bytes


class Forgotten(NamedTuple):
    """No window lies in this memory any more, and it may be given back."""

    memory: int


class Announced(NamedTuple):
    """A value was sent. ``window`` is None if the value waits for a `Requested`; else ``ready`` of the window is enqueued."""

    tag: int
    size_bytes: int
    is_host: bool
    dtype: int  # in `crossfade.p2p.payload.number_of`
    shape: tuple[int, ...]
    window: Window | None


class Requested(NamedTuple):
    """The receive of an announced value has begun; ``number`` counts the announcements, from 1."""

    number: int


class Here(NamedTuple):
    """A requested value is there: ``ready`` of the window is enqueued."""

    number: int
    window: Window


class Pulled(NamedTuple):
    """The copy out of the window with these counters, and its ``done``, are enqueued."""

    word: int
    uses: int  # the word may serve another window by now: counters can be quicker than letters
    is_host: bool


class Posted(NamedTuple):
    """A receive waits; ``ready`` of its window is enqueued. ``num_read`` announcements had been read before."""

    tag: int
    size_bytes: int
    is_host: bool
    num_read: int
    window: Window


class Pushed(NamedTuple):
    """The copy into a posted window, and its ``done``, are enqueued."""

    tag: int


class Read(NamedTuple):
    """So many announcements have been read. (`Posted` says it too; this is for ranks whose receives are not posted.)"""

    num_read: int


class Refused(NamedTuple):
    """A send and a receive have met that do not fit: nothing is copied. Exactly one of the first two is not 0."""

    announced: int  # the number of the announcement
    posted: int  # 1: of the oldest posted receive with this tag
    tag: int
    size_bytes: int  # of the writer's side
    is_host: bool


class Closed(NamedTuple):
    """The writer begins no transfer any more."""


class Left(NamedTuple):
    """The writer has made its last copy; nothing follows."""


Letter: TypeAlias = (
    Announced | Closed | Exported | Forgotten | Here | Left | Posted | Pulled | Pushed | Read | Refused | Requested
)

_WINDOW = "iQIQ??H"
_EXPORTED = struct.Struct("<BiQ??B")
_FORGOTTEN = struct.Struct("<Bi")
_ANNOUNCED = struct.Struct(f"<BqQ?BB{_WINDOW}")
_SHAPES = [struct.Struct(f"<{num_dims}Q") for num_dims in range(MOST_DIMS + 1)]
_PULLED = struct.Struct("<BIQ?")
_NUMBER = struct.Struct("<BQ")
_HERE = struct.Struct(f"<BQ{_WINDOW}")
_POSTED = struct.Struct(f"<BqQ?Q{_WINDOW}")
_TAG = struct.Struct("<Bq")
_REFUSED = struct.Struct("<BQBqQ?")
_NOWHERE = Window(-1, 0, 0, 0, is_lent=False)


def pack(letter: Letter) -> bytes:
    """A letter as bytes, fewer than `LETTER_BYTES`."""
    match letter:
        case Announced(tag, size_bytes, is_host, dtype, shape, window):
            head = _ANNOUNCED.pack(0, tag, size_bytes, is_host, dtype, len(shape), *(window or _NOWHERE))
            return head + _SHAPES[len(shape)].pack(*shape)
        case Pulled(word, uses, is_host):
            return _PULLED.pack(1, word, uses, is_host)
        case Posted(tag, size_bytes, is_host, num_read, window):
            return _POSTED.pack(2, tag, size_bytes, is_host, num_read, *window)
        case Pushed(tag):
            return _TAG.pack(3, tag)
        case Requested(number):
            return _NUMBER.pack(4, number)
        case Here(number, window):
            return _HERE.pack(5, number, *window)
        case Exported(memory, size_bytes, is_host, is_staged, handle):
            return _EXPORTED.pack(6, memory, size_bytes, is_host, is_staged, len(handle)) + handle
        case Forgotten(memory):
            return _FORGOTTEN.pack(7, memory)
        case Refused(announced, posted, tag, size_bytes, is_host):
            return _REFUSED.pack(8, announced, posted, tag, size_bytes, is_host)
        case Closed():
            return b"\x09"
        case Left():
            return b"\x0a"
        case Read(num_read):
            return _NUMBER.pack(11, num_read)


def unpack(data: bytes) -> Letter:
    """The letter that `pack` made bytes of. Raises a `ChannelError` for other bytes."""
    try:
        match data[0]:
            case 0:
                _, tag, size_bytes, is_host, dtype, num_dims, *window = _ANNOUNCED.unpack_from(data)
                shape = _SHAPES[num_dims].unpack_from(data, _ANNOUNCED.size)
                where = None if window[0] == _NOWHERE.memory else Window(*window)
                return Announced(tag, size_bytes, is_host, dtype, shape, where)
            case 1:
                return Pulled(*_PULLED.unpack(data)[1:])
            case 2:
                _, tag, size_bytes, is_host, num_read, *window = _POSTED.unpack(data)
                return Posted(tag, size_bytes, is_host, num_read, Window(*window))
            case 3:
                return Pushed(_TAG.unpack(data)[1])
            case 4:
                return Requested(_NUMBER.unpack(data)[1])
            case 5:
                _, number, *window = _HERE.unpack(data)
                return Here(number, Window(*window))
            case 6:
                _, memory, size_bytes, is_host, is_staged, length = _EXPORTED.unpack_from(data)
                handle = data[_EXPORTED.size :]
                if len(handle) == length:
                    return Exported(memory, size_bytes, is_host, is_staged, handle)
            case 7:
                return Forgotten(_FORGOTTEN.unpack(data)[1])
            case 8:
                return Refused(*_REFUSED.unpack(data)[1:])
            case 9 if len(data) == 1:
                return Closed()
            case 10 if len(data) == 1:
                return Left()
            case 11:
                return Read(_NUMBER.unpack(data)[1])
    except (IndexError, struct.error):
        pass
    raise ChannelError(f"{len(data)} bytes are no letter between ranks: this is a bug in crossfade")
