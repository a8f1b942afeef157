"""A writer and its readers in one process, which take turns, and the values that go through them."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from random import Random
from typing import Any

import pytest
import torch

from crossfade.channels.protocol import EMPTY
from crossfade.errors import ChannelBroken
from tests.helpers.copy_pair import lose, settle


class Pair:
    """Writes and reads as the loops of processes do that take turns."""

    def __init__(self, writer: Any, readers: list[Any]) -> None:
        self.writer = writer
        self.readers = readers

    def turn(self) -> None:
        for end in (self.writer, *self.readers):
            end.carrier.progress()

    def write(self, value: object, limit: int = 20) -> bool:
        for _ in range(limit):
            self.turn()
            if self.writer.try_write(value):
                return True
        return False

    def read(self) -> list[Any]:
        """What each reader gets: at once where copies bring it, and else when it was asked for and some turns have passed."""
        if self.readers[0].carrier.requests is None:
            values = [reader.try_read() for reader in self.readers]
            assert EMPTY not in values
            return values
        for reader in self.readers:
            assert reader.try_start()
        return [self.take(reader) for reader in self.readers]

    def take(self, reader: Any, limit: int = 2000) -> Any:
        for _ in range(limit):
            self.turn()
            value = reader.try_read()
            if value is not EMPTY:
                reader.release()
                return value
        raise AssertionError("the value did not come")


Opened = tuple[Pair, Any, list[Any]]
"""A pair, its writer and its readers."""


def in_turns(open_ends: Callable[..., Any]) -> Callable[..., AbstractContextManager[Opened]]:
    @contextmanager
    def opened(*args: Any, **options: Any) -> Iterator[Opened]:
        with open_ends(*args, **options) as (writer, readers):
            yield Pair(writer, readers), writer, readers

    return opened


def same(one: Any, other: Any) -> bool:
    if isinstance(other, torch.Tensor):
        return one.dtype is other.dtype and torch.equal(one, other)
    if isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in other)
    if isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def draw_value(random: Random) -> Any:
    """A number, a tensor, or a container of several, now and then much longer than those before."""
    kind = random.randrange(5)
    if kind == 0:
        return random.random()
    tensors = [
        torch.randint(0, 100, (random.choice((0, 1, 7, 1000, 40_000)),)).to(
            random.choice((torch.int64, torch.bfloat16))
        )
        for _ in range(random.randrange(1, 4))
    ]
    return tensors[0] if kind < 3 else {"tensors": tensors, "number": random.random(), "again": (tensors[0],)}


def check_values_stay_whole(pair: Pair, depth: int, num_values: int, seed: int) -> None:
    """Random values arrive whole, and those that are kept stay so until they are dropped."""
    random = Random(seed)
    torch.manual_seed(seed)
    sent: list[Any] = []
    kept: list[tuple[Any, Any]] = []
    num_sent = 0
    for _ in range(num_values):
        value = draw_value(random)
        if len(sent) < depth and pair.write(value):
            sent.append(value)
            num_sent += 1
        while sent and (len(sent) == depth or random.random() < 0.5):
            expected = sent.pop(0)
            for got in pair.read():
                assert same(got, expected)
                kept.append((got, expected))
                del got
        random.shuffle(kept)
        while len(kept) > random.choice((0, 2, 10)):
            got, expected = kept.pop()
            assert same(got, expected)
            del got
    for expected in sent:
        assert all(same(got, expected) for got in pair.read())
    assert num_sent > num_values // 2
    kept.clear()
    gc.collect()


def check_both_die(pair: Pair) -> None:
    """Behind a message and a tensor; each side hears of the other's death."""
    writer, (reader,) = pair.writer, pair.readers
    reader.break_off("the writer died")
    assert reader.try_read() == "a message"
    with pytest.raises(ChannelBroken, match="the writer died"):
        reader.try_read()
    lose(writer, 0, "the reader died")
    with pytest.raises(ChannelBroken, match="the reader died"):
        writer.try_write(torch.arange(4))
    settle([reader, writer])
