"""One party's end of a collective that a group does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch

from crossfade.channels.protocol import ChannelStatistics
from crossfade.collectives.group import Group
from crossfade.collectives.task import Task
from crossfade.collectives.terms import Terms
from crossfade.device.recorded import Around
from crossfade.errors import ChannelBroken, ChannelClosed


class GroupCollective:
    """Collective ``number`` of the plan, in which this party has the given rank and gets so many values.

    ``around`` records the span on the device, if set (see `crossfade.device.recorded.Recorded`).
    """

    on_moved: Callable[[int, int], None] | None = None

    def __init__(self, group: Group, terms: Terms, number: int, rank: int, num_outputs: int) -> None:
        self.terms = terms
        self.around: Around | None = None
        self._group = group
        self._number = number
        self._rank = rank
        self._num_outputs = num_outputs
        self._task: Task | None = None
        self._expected: tuple[torch.dtype, tuple[int, ...]] | None = None
        self._forwarding: int | None = None  # the stream that waits for the results in the place of the compute stream
        self._num_values = 0
        self._num_bytes = 0
        self._is_closed = False

    def start(self, values: Sequence[object]) -> None:
        self._raise_if_ended()
        begin = None if self.around is None else self._begin
        task = Task(self.terms, self._number, self._rank, self._num_outputs, self._expected, begin)
        self._group.start(task, values)
        self._task = task

    def _begin(self, stream: int) -> Callable[[int], None]:
        """Begins a span. Each execution has one round, so its number is that of the rounds before."""
        assert self.around is not None
        return self.around(stream, self._num_values)

    def pass_on(self) -> Callable[[], AbstractContextManager[None]] | None:
        forwarding = self._group.streams.forwarding()
        if forwarding is None:
            return None
        self._forwarding, current = forwarding
        return current

    def try_finish(self) -> Sequence[object] | None:
        """Results are ready on the compute stream (on another, if they are only forwarded), and perhaps not yet computed."""
        task = self._task
        if task is not None and task.result is None:
            self._group.poll(task)
        if task is None or task.result is None:
            self._group.look_for_faults()
            self._raise_if_ended()
            return None
        self._task = None
        self._group.take(task, self._forwarding)
        self._expected = task.expected
        self._num_values += 1
        self._num_bytes += sum(tensor.nbytes for tensor in task.offer.tensors)
        if self.on_moved is not None and self.around is None:  # else the device records it
            self.on_moved(*task.moved_ns)
        return task.result

    def is_idle(self) -> bool:
        task = self._task
        return (task is None or task.result is None) and not self._group.can_progress()

    def _raise_if_ended(self) -> None:
        if self._is_closed:
            raise ChannelClosed(f"{self.terms.label} was closed by this side")
        if self._group.reason and (self._task is None or self._task.result is None):
            raise ChannelBroken(f"{self.terms.label} is broken: {self._group.reason}")

    def break_off(self, reason: str) -> None:
        self._group.break_off(reason)

    def close(self) -> None:
        """The thread belongs to the group, which tells the others."""
        self._is_closed = True
        self._task = None  # with its tensors, where it was never finished

    def statistics(self) -> ChannelStatistics:
        return ChannelStatistics(self._num_values, self._num_bytes)
