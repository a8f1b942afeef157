"""The round table in shared memory at which parties of a collective meet, all parties in one process."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from crossfade.collectives.table import RECORD_BYTES, End, Message, Part, RendezvousTable, Status
from crossfade.host.memory import Memory

NUM_PARTIES = 3
NUM_SLOTS = 4


def tables() -> list[RendezvousTable]:
    """Everybody's table, of parts that each has mapped for itself."""
    made = [Part.create(f"party{rank}", bytes([rank + 1] * 16), 100, NUM_SLOTS) for rank in range(NUM_PARTIES)]
    rows = []
    for rank in range(NUM_PARTIES):
        parts = [
            part if k == rank else Part(Memory(os.dup(part.memory.fd)), 100, NUM_SLOTS) for k, part in enumerate(made)
        ]
        assert [part.key for part in parts] == [bytes([k] * 16) for k in (1, 2, 3)]
        rows.append(RendezvousTable(parts, rank))
    return rows


def far_tables() -> list[RendezvousTable]:
    """Tables of parties that see no part but their own, and tell each other what changes."""
    rows: list[RendezvousTable] = []

    def teller(rank: int) -> Callable[[bytes], None]:
        def tell(news: bytes) -> None:
            for row in rows:
                if row is not rows[rank]:
                    row.hear(rank, news)

        return tell

    for rank in range(NUM_PARTIES):
        parts = [Part.create(f"party{k}", bytes(16), 100, NUM_SLOTS) for k in range(NUM_PARTIES)]
        rows.append(RendezvousTable(parts, rank, teller(rank)))
    return rows


@pytest.fixture(params=[tables, far_tables])
def parties(request: pytest.FixtureRequest) -> list[RendezvousTable]:
    made: list[RendezvousTable] = request.param()
    return made


def offer(number: int, text: bytes = b"text") -> Message:
    return Message(Status.OFFER, number, text)


def test_everybody_reads_what_everybody_said(parties: list[RendezvousTable]) -> None:
    for round_ in range(20):
        for rank, table in enumerate(parties):
            assert not any(each.has_all(round_) for each in parties[:rank])
            assert table.publish(offer(round_, b"%d of %d" % (rank, round_))) == round_
        for table in parties:
            assert table.has_all(round_)
            assert [said.text for said in table.read_all(round_)] == [b"%d of %d" % (k, round_) for k in range(3)]
    for table in parties:
        table.close()


@pytest.mark.parametrize("size", [0, RECORD_BYTES - 25, RECORD_BYTES - 24, RECORD_BYTES - 23, 1_000_000])
def test_texts_of_every_length(parties: list[RendezvousTable], size: int) -> None:
    for round_ in range(2 * NUM_SLOTS):
        texts = [bytes([65 + rank + round_]) * (size if rank == 1 else 3) for rank in range(NUM_PARTIES)]
        for table, text in zip(parties, texts, strict=True):
            table.publish(Message(Status.COMPLAINT, 7, text))
        for table in parties:
            assert table.read_all(round_) == [Message(Status.COMPLAINT, 7, text) for text in texts]
    for table in parties:
        table.close()


def test_one_collective_never_overwrites_what_somebody_has_not_read() -> None:
    """With two slots a party that starts again as soon as it may is one round ahead of the slowest, and not two."""
    parts = [Part.create(f"party{rank}", bytes(16), 0, 2) for rank in range(2)]
    quick, slow = RendezvousTable(parts, 0), RendezvousTable(parts, 1)
    quick.publish(offer(0, b"first"))
    slow.publish(offer(0))
    quick.read_all(0)
    quick.publish(offer(0, b"second"))
    assert not quick.has_all(1)  # so it cannot say a third before the slow one has read the first
    assert slow.read_all(0)[0].text == b"first"


def test_who_waits_is_woken_and_nobody_else(parties: list[RendezvousTable]) -> None:
    parties[1].await_some(True)
    parties[0].publish(offer(0))
    parties[1].own.wake.wait(10.0)
    assert [table.own.wake._semaphore._get_value() for table in parties] == [0, 0, 0]  # type: ignore[union-attr]


def test_who_ends_still_keeps_its_word_and_nobody_waits_for_more(parties: list[RendezvousTable]) -> None:
    first, second, third = parties
    first.publish(offer(0))
    first.end()
    assert second.has_ended()
    assert not second.has_given_up()
    assert [second.is_over(number) for number in (0, 1)] == [False, True]
    second.publish(offer(0))
    third.publish(offer(0))
    assert all(table.has_all(0) for table in (first, second, third))
    third.give_up()
    third.end()
    assert third.own.end == End.GIVEN_UP
    assert first.has_given_up()
    second.finish()
    assert first.unfinished("abc") == ["a", "c"]


def test_a_closed_part_is_silent() -> None:
    first, *_ = tables()
    first.publish(offer(0))
    first.close()
    first.close()
    assert not first.has_all(0)
    first.own.wake.post()
    first.own.wake.wait()
