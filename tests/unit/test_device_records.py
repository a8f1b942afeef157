"""What two ends of a ring tell each other, as bytes."""

from __future__ import annotations

import pytest

from crossfade.device.records import (
    Announced,
    ChunksEnqueued,
    ChunksFreeEnqueued,
    Enqueued,
    Finished,
    FreeEnqueued,
    Offer,
    Record,
    Refused,
    Retired,
    Wanted,
    pack,
    unpack,
)
from crossfade.errors import ChannelError

RECORDS: list[Record] = [
    Enqueued(3, 1, 1 << 40),
    FreeEnqueued(2, 7),
    Wanted(12345),
    Offer(4, 2, 3, 1 << 33, bytes(range(64))),
    Retired(9, 1 << 35),
    Finished(),
    Refused(1 << 40, "kein Speicher für 3 GB"),
    Announced(0),
    ChunksEnqueued(5),
    ChunksFreeEnqueued(6),
]


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: type(record).__name__)
def test_a_record_comes_back_from_its_bytes(record: Record) -> None:
    data = pack(record)
    assert len(data) <= 100
    assert unpack(data) == record
    for wrong in (data[:-1], data + b"x", b"\xff" + data[1:], b""):
        with pytest.raises(ChannelError):
            unpack(wrong)
