"""Transfers that both ends start, as the simulator knows them, and the order in which a receiver takes them."""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass, field

from crossfade.plan.actions import RECV_STREAM, SEND_STREAM, Verb
from crossfade.plan.device_streams import stream_in, stream_out
from crossfade.plan.plan import ChannelSpec
from crossfade.schedule.cores import Work

__all__ = ["Inbox", "Transfer"]


@dataclass(slots=True, eq=False)
class Transfer:
    """One value on its way from one actor to one other."""

    channel: ChannelSpec
    reader: str
    execution: int
    start_us: float = 0.0
    work: Work | None = None
    num_working: int = 0

    @property
    def key(self) -> tuple[str, int]:
        """What both of its ends know it by."""
        return self.channel.id, self.execution

    def shown_at(self, *, is_on_gpus: bool) -> tuple[tuple[str, str, Verb], tuple[str, str, Verb]]:
        """(Party, stream, verb) of its spans, one at either end: on streams of the GPUs, or in the background of the hosts."""
        streams = SEND_STREAM, RECV_STREAM
        if is_on_gpus:
            streams = stream_out(self.channel.transport).value, stream_in(self.channel.transport).value
        return (self.channel.writer, streams[0], Verb.SEND), (self.reader, streams[1], Verb.RECV)


@dataclass(slots=True)
class Inbox:
    """What one actor receives by one transport: values come one after another, in the order of its receives."""

    # (sender, channel id, execution) of the receives that have started.
    awaited: deque[tuple[str, str, int]] = field(default_factory=deque)
    # of each sender, the transfers whose send has started, in order.
    sent: defaultdict[str, deque[Transfer]] = field(default_factory=lambda: defaultdict(deque))
    is_busy: bool = False  # whether a value is on its way

    def take(self) -> Transfer | None:
        """The next transfer, if it can start."""
        if self.is_busy or not self.awaited:
            return None
        sender, *key = self.awaited[0]
        sent = self.sent[sender]
        if not sent or sent[0].key != tuple(key):
            return None
        self.awaited.popleft()
        self.is_busy = True
        return sent.popleft()

    def lost(self) -> list[tuple[str, int, str]]:
        """(channel id, execution, sender) of ends that found no other end."""
        sent = [(*transfer.key, sender) for sender, queue in self.sent.items() for transfer in queue]
        return sent + [(channel, execution, sender) for sender, channel, execution in self.awaited]
