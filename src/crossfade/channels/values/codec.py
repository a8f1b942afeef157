"""Values to messages and back: pickle protocol 5 with out-of-band buffers, and short ways for what is common.

numpy arrays read back as read-only views on the message. torch CPU tensors cannot be made read-only, so a reader that shares
the message with others copies their memory. Tensors on a GPU are brought to the host, and are CPU tensors where they are read.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from functools import cache
from io import BytesIO
from typing import Any, Final, NamedTuple

from crossfade.channels.values.fitting import Fitting, refuse_too_large, too_large
from crossfade.channels.values.layout import Encoded, Pickled, encode, split
from crossfade.errors import Failure

PLAIN_TYPES: Final = frozenset({bytes, bytearray, str, int, float, bool, complex, type(None)})
"""What is pickled as it is: there is nothing in it."""

_FEW = 16
_by_cloudpickle: set[type] = set()


def prepare(value: object) -> bytes | Encoded:
    """A value as a pickle, if nothing of it lies outside, else as a message.

    By the C pickler where that is right, else by cloudpickle (lambdas, local classes, what is in ``__main__``). Raises what
    pickling raised.
    """
    kind = type(value)
    if kind in PLAIN_TYPES or is_plain(value):
        return pickle.dumps(value, 5)
    numpy = sys.modules.get("numpy")
    if numpy is not None and kind is numpy.ndarray and (message := array_codec().encode(value)) is not None:
        return message
    pickled = _dump(value, kind)
    return encode(pickled) if pickled.buffers else pickled.pickle


def is_plain(value: object) -> bool:
    """Whether a value is a number, a text and the like, or a short tuple or list of such: a shape, a few figures."""
    kind = type(value)
    if kind in PLAIN_TYPES:
        return True
    if (kind is tuple or kind is list) and len(value) <= _FEW:  # type: ignore[arg-type]
        return all(type(each) in PLAIN_TYPES for each in value)  # type: ignore[attr-defined]
    return False


def message_of(value: object) -> Encoded:
    """A value as a message."""
    prepared = prepare(value)
    return encode(Pickled(prepared, ())) if isinstance(prepared, bytes) else prepared


def _has_torch() -> bool:
    """Whether there may be tensors. (A program that forbids torch has None in its place.)"""
    return sys.modules.get("torch") is not None


def _dump(value: object, kind: type) -> Pickled:
    if kind.__module__ == "numpy":
        refuse_too_large(getattr(value, "nbytes", 0))
    try:
        return _dumped(value, kind)
    except MemoryError as error:
        raise too_large(value) from error


def _dumped(value: object, kind: type) -> Pickled:
    if kind in _by_cloudpickle:
        return _dump_by_cloudpickle(value)
    try:
        pickled = _dump_with_tensors(value) if _has_torch() else _dump_plain(value)
    except (pickle.PicklingError, AttributeError, TypeError):
        pickled = _dump_by_cloudpickle(value)
        if kind.__module__ != "builtins":  # containers are judged each time by what is in them
            _by_cloudpickle.add(kind)
        return pickled
    if b"__main__" in pickled.pickle:  # a class or function that only this process's main module has
        return _dump_by_cloudpickle(value)
    return pickled


class ArrayCodec(NamedTuple):
    """The functions of `crossfade.channels.values.arrays`."""

    describe: Callable[[Any], bytes | None]
    encode: Callable[[Any], Encoded | None]
    understand: Callable[[bytes], Any]
    make: Callable[[Any, Any, int], Any]


@cache
def array_codec() -> ArrayCodec:
    """How arrays travel; the module is imported with the first one."""
    from crossfade.channels.values.arrays import describe_array, encode_array, make_array, understand

    return ArrayCodec(describe_array, encode_array, understand, make_array)


def _dump_plain(value: object) -> Pickled:
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(value, 5, buffer_callback=buffers.append)
    return Pickled(data, [buffer.raw() for buffer in buffers])


def dump_constants(value: object) -> Pickled:
    """A value as a pickle that cloudpickle has made, for a reader who has its tensors to itself: they come back as they are."""
    with Fitting(value):
        return _dump_by_cloudpickle(value, is_own=True)


def _dump_with_tensors(value: object) -> Pickled:
    from crossfade.channels.values.tensors import TensorPickler, TensorReducer

    file, kept = BytesIO(), TensorReducer()
    TensorPickler(file, kept).dump(value)
    return kept.pickled(file.getvalue())


def _dump_by_cloudpickle(value: object, *, is_own: bool = False) -> Pickled:
    """``is_own``: its reader has its tensors to itself."""
    if _has_torch():
        from crossfade.channels.values.tensors import OwnTensorReducer, TensorReducer, dump_by_cloudpickle

        kept = OwnTensorReducer() if is_own else TensorReducer()
        return kept.pickled(dump_by_cloudpickle(value, kept))
    import cloudpickle

    buffers: list[pickle.PickleBuffer] = []
    data = cloudpickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    return Pickled(data, [buffer.raw() for buffer in buffers])


def dump_in_band(value: object) -> bytes:
    """A value as one pickle, by cloudpickle: all of it may be changed where it is read. Tensors come back as they are."""
    with Fitting(value):
        if _has_torch():
            from crossfade.channels.values.tensors import OwnTensorReducer, dump_by_cloudpickle

            return dump_by_cloudpickle(value, OwnTensorReducer(), is_in_band=True)
        import cloudpickle

        return cloudpickle.dumps(value, protocol=5)  # type: ignore[no-any-return]


def decode(
    message: memoryview,
    *,
    private: Callable[[memoryview], object] = bytearray,
    shared: Callable[[memoryview], object] = memoryview.toreadonly,
) -> Any:
    """The value of a message, which is writable. ``private`` makes of a buffer that only this reader may see a writable view, or a
    copy; ``shared`` makes of every other buffer a read-only view, or a copy. Raises what unpickling raised, or a ValueError when
    the message is not one.
    """
    is_array, is_apart, data, places = split(message)
    if is_apart:
        raise ValueError("tensors of this value lie on a device that this channel does not know")
    buffers = [private(place) if is_private else shared(place) for place, is_private in places]
    if is_array and len(buffers) == 1:
        arrays = array_codec()
        return arrays.make(arrays.understand(bytes(data)), buffers[0], places[0][0].nbytes)
    return pickle.loads(data, buffers=buffers)


def hint_for_pickling(error: BaseException) -> str | None:
    """What to do about a value that cannot be pickled; None if the error says so itself, or is of another kind."""
    try:
        text = str(error)
    except Exception:  # an exception of the user's
        return None
    is_of_its_kind = isinstance(error, TypeError | pickle.PicklingError | AttributeError) and "pickle" in text
    if not is_of_its_kind or "\nhint: " in text:
        return None
    if "generator' object" in text:
        return "a generator does not leave its process: make a list of what it gives"
    return (
        "locks, open files, connections and the like do not leave their process: make them on the actor, in its constructor say, "
        "or leave them out in __getstate__"
    )


def undecodable(error: BaseException, channel: str) -> Failure:
    """What a reader gets in the place of a value that it cannot unpickle."""
    return Failure.capture(
        error, actor="", node=f"unpickling the value of {channel} where it is read", hint=hint_for_unpickling(error)
    )


def hint_for_unpickling(error: BaseException) -> str | None:
    """What to do about an error of unpickling whose own words tell nothing to the program that made the value."""
    if isinstance(error, AttributeError) and error.name == "__dict__":
        return (
            "a class with __slots__ of the script itself cannot come back: put it into a module, or give it __getstate__ and "
            "__setstate__"
        )
    return None
