"""Letters between ranks as bytes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossfade.errors import ChannelError
from crossfade.p2p.letters import (
    LETTER_BYTES,
    MOST_DIMS,
    Announced,
    Closed,
    Exported,
    Forgotten,
    Here,
    Left,
    Posted,
    Pulled,
    Pushed,
    Read,
    Refused,
    Requested,
    Window,
    pack,
    unpack,
)

_LENGTH = st.integers(0, 2**63)
_TAG = st.integers(-(2**62), 2**62)
_WORD = st.integers(0, 255)
_NUMBER = st.integers(0, 2**31 - 1)
_WINDOW = st.builds(Window, _NUMBER, _LENGTH, _WORD, _LENGTH, st.booleans(), st.booleans(), st.integers(0, 2**16 - 1))
_SHAPE = st.lists(_LENGTH, max_size=MOST_DIMS).map(tuple)
_LETTERS = st.one_of(
    st.builds(Announced, _TAG, _LENGTH, st.booleans(), _WORD, _SHAPE, st.none() | _WINDOW),
    st.builds(Posted, _TAG, _LENGTH, st.booleans(), _LENGTH, _WINDOW),
    st.builds(Pulled, _WORD, _LENGTH, st.booleans()),
    st.builds(Read, _LENGTH),
    st.builds(Pushed, _TAG),
    st.builds(Requested, _LENGTH),
    st.builds(Here, _LENGTH, _WINDOW),
    st.builds(Exported, _NUMBER, _LENGTH, st.booleans(), st.booleans(), st.binary(max_size=64)),
    st.builds(Forgotten, _NUMBER),
    st.builds(Refused, _LENGTH, st.integers(0, 1), _TAG, _LENGTH, st.booleans()),
    st.just(Closed()),
    st.just(Left()),
)


@given(_LETTERS)
def test_a_letter_is_the_same_after_its_way(letter: object) -> None:
    data = pack(letter)  # type: ignore[arg-type]
    assert len(data) < LETTER_BYTES
    came = unpack(data)
    assert came == letter
    assert type(came) is type(letter)


@pytest.mark.parametrize(
    "data", [b"", b"\x63", b"\x09more", b"\x00short", pack(Exported(1, 2, True, False, b"ab"))[:-1]]
)
def test_other_bytes_are_an_error(data: bytes) -> None:
    with pytest.raises(ChannelError, match="no letter between ranks"):
        unpack(data)
