"""Keyed frames: what a holder of the key has sent arrives, and nothing else does."""

from __future__ import annotations

import time
import tracemalloc

import pytest

from crossfade.host.frames import (
    HEAD_BYTES,
    KEY_BYTES,
    MAX_FDS,
    MAX_PAYLOAD_BYTES,
    FrameError,
    Opener,
    Role,
    Sealer,
    new_key,
)

KEY = bytes(range(KEY_BYTES))


def sealed(*payloads: bytes, key: bytes = KEY, role: Role = "driver", num_fds: int = 0) -> list[bytes]:
    """The frames of these payloads, in order."""
    sealer, frames = Sealer(key, role), []
    for payload in payloads:
        head, tail = sealer.seal(payload, num_fds)
        sealer.number += 1
        frames.append(head + payload + tail)
    return frames


def refused(data: bytes, num_fds: int = 0) -> str:
    """Why a piece is refused; nothing of it is taken."""
    opener = Opener(KEY, "actor")
    assert opener.take(data, num_fds) == []
    assert isinstance(opener.error, FrameError)
    assert opener.take(sealed(b"good")[0]) == []
    return str(opener.error)


@pytest.mark.parametrize("step_bytes", [1, 7, 28, 1000, 1 << 20])
def test_frames_arrive_however_the_stream_is_cut(step_bytes: int) -> None:
    payloads = [b"", b"x", b"y" * 5000, b"", b"z" * 100_000]
    stream = b"".join(sealed(*payloads))
    opener = Opener(KEY, "actor")
    frames = [frame for at in range(0, len(stream), step_bytes) for frame in opener.take(stream[at : at + step_bytes])]
    assert [frame.payload for frame in frames] == payloads
    assert opener.error is None


def test_each_bit_of_a_frame_counts() -> None:
    (frame,) = sealed(b"payload")
    for index in range(len(frame) * 8):
        changed = bytearray(frame)
        changed[index >> 3] ^= 1 << (index & 7)
        refused(bytes(changed))


def test_other_keys_replays_reflections_and_other_orders_are_refused() -> None:
    first, second = sealed(b"one", b"two")
    assert "does not begin like" in refused(sealed(b"one", key=new_key())[0])
    assert "does not begin like" in refused(sealed(b"one", role="actor")[0])
    assert "message 0" in refused(second)
    opener = Opener(KEY, "actor")
    assert [frame.payload for frame in opener.take(first + first)] == [b"one"]
    assert "message 1" in str(opener.error)
    opener = Opener(KEY, "actor")  # a frame is left out
    third = sealed(b"one", b"two", b"three")[2]
    assert [frame.payload for frame in opener.take(first + third)] == [b"one"]
    assert opener.error is not None


def test_frames_before_a_bad_one_are_good() -> None:
    opener = Opener(KEY, "actor")
    assert [frame.payload for frame in opener.take(b"".join(sealed(b"one", b"two")) + b"g" * 100)] == [b"one", b"two"]
    assert opener.error is not None


def test_an_absurd_length_is_refused_when_the_head_is_there() -> None:
    tracemalloc.start()
    start = time.process_time()
    refused(b"\xff" * HEAD_BYTES)
    sealer = Sealer(KEY, "driver")
    head, _ = sealer.seal(b"")
    refused((1 << 40).to_bytes(8, "little") + head[8:])
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < 1 << 20
    assert time.process_time() - start < 1


def test_what_is_cut_short_gives_nothing() -> None:
    (frame,) = sealed(b"payload" * 100)
    for length in range(len(frame)):
        opener = Opener(KEY, "actor")
        assert opener.take(frame[:length]) == []
        assert opener.error is None


def test_descriptors_are_counted() -> None:
    (frame,) = sealed(b"payload", num_fds=2)
    opener = Opener(KEY, "actor")
    assert opener.take(frame[:1], 1) == []
    assert opener.take(frame[1:2], 1) == []
    assert [each.num_fds for each in opener.take(frame[2:])] == [2]
    assert "2 descriptors, and 1" in refused(frame, 1)
    assert "2 descriptors, and 3" in refused(frame, 3)
    assert "descriptors" in refused(sealed(b"payload")[0], 1)
    assert "descriptors" in refused(frame[:10], MAX_FDS + 1)
    opener = Opener(KEY, "actor")  # those of the next frame do not make up for those that are missing
    frames = sealed(b"one", b"two", num_fds=1)
    assert opener.take(frames[0] + frames[1][:1], 1) == []
    assert opener.error is not None


def test_what_is_too_large_is_not_sent() -> None:
    sealer = Sealer(KEY, "driver")
    with pytest.raises(ValueError, match="too large"):
        sealer.seal(b"", MAX_FDS + 1)

    class Huge(bytes):
        def __len__(self) -> int:
            return MAX_PAYLOAD_BYTES + 1

    with pytest.raises(ValueError, match="too large"):
        sealer.seal(Huge())
    with pytest.raises(ValueError, match="a key has 32 bytes"):
        Sealer(b"short", "driver")


def test_a_frame_costs_a_few_microseconds() -> None:
    sealer, opener = Sealer(KEY, "driver"), Opener(KEY, "actor")
    payload = b"p" * 300
    num_frames = 5000
    start = time.process_time()
    for _ in range(num_frames):
        head, tail = sealer.seal(payload)
        sealer.number += 1
        assert opener.take(head + payload + tail)
    each_us = (time.process_time() - start) / num_frames * 1e6
    print(f"sealing and opening a frame takes {each_us:.1f} us")
    assert each_us < 100
