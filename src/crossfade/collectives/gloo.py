"""Collectives of CPU tensors over torch.distributed's gloo: actors meet in the background of all of them.

Each set of actors that does something together has a process group of its own, on loopback, whose members prove to each other that
they hold its key (`channels.gloo_proof`). Each of these actors has a thread for it, which does the group's collectives one after
another in the order of the plan (PL-1).

A collective begins with an exchange of *frames*, 256 bytes from each party to each other: what the party offers
(`collectives.terms`), or that it ends. An offer that is too long for a frame, such as an exception, follows in a second exchange.
From these all parties draw the same conclusion: to move data, to give every party the same `Failure`, or to end. So no party waits
in a reduction for one that cannot take part.

Tensors are copied before they are reduced, since values never change. Gloo cannot reduce every dtype: half-precision floats are
reduced in float32 and rounded once, small integers in wider ones. Its reduction of several ranks is in no order that can be
relied on. A reduce-scatter is an all-reduce of which each keeps its part; tensors of one dtype travel as one.

If a group has a mover, as for user-defined communicators, gloo carries frames only: the mover moves the tensors that all parties
agreed on, in the thread that asks for the result.
"""

from __future__ import annotations

import datetime
import hashlib
import struct
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist

from crossfade.channels.gloo_proof import prove_all, shared_key
from crossfade.channels.protocol import ChannelStatistics
from crossfade.collectives.terms import (
    Meeting,
    Offer,
    conclude,
    finish_reduction,
    layout_of,
    make_offer,
    pieces_of,
    shard,
)
from crossfade.errors import ChannelBroken, ChannelClosed, ChannelError
from crossfade.host.doorbell import Bell
from crossfade.host.memory import Memory
from crossfade.types import CollectiveKind, ReduceOp

__all__ = ["GlooCollective", "GlooGroup"]

_FileStore: Any = dist.FileStore  # type: ignore[attr-defined]
_PrefixStore: Any = dist.PrefixStore  # type: ignore[attr-defined]
_MEET_S = 60.0
_HEAD = struct.Struct("<qqq16s")
_FRAME_BYTES = 256
_INLINE_BYTES = _FRAME_BYTES - _HEAD.size
_OFFER, _COMPLAINT, _END = range(3)
_OPS = {
    ReduceOp.SUM: dist.ReduceOp.SUM,
    ReduceOp.AVG: dist.ReduceOp.SUM,
    ReduceOp.PRODUCT: dist.ReduceOp.PRODUCT,
    ReduceOp.MIN: dist.ReduceOp.MIN,
    ReduceOp.MAX: dist.ReduceOp.MAX,
}


@dataclass(frozen=True, slots=True)
class _Said:
    """What one party said in an exchange: ``detail`` is its layout or its complaint."""

    status: int
    number: int
    digest: bytes
    detail: bytes


class GlooGroup:
    """One party's part in what a set of parties does together.

    Args:
        store: memory that all parties see, for meeting each other; owned by this object from now on.
        number: the group's number among those of the plan.
        parties: the names of all parties, in the same order at each; making the group waits for all of them.
        me: this party's name.
        bell: this process's own doorbell, rung when something is done.
        mover: moves the tensors, given the collective and this party's offer; may block. None for gloo.

    Raises:
        ChannelError: the parties could not connect.
    """

    def __init__(
        self,
        store: Memory,
        number: int,
        parties: Sequence[str],
        me: str,
        bell: Bell,
        mover: Callable[[Meeting, Offer], Sequence[object]] | None = None,
    ) -> None:
        self._mover = mover
        self._has_said_all = threading.Event()
        self._parties = tuple(parties)
        self._bell = bell
        self._ends: list[GlooCollective] = []
        self._tasks: SimpleQueue[tuple[GlooCollective, Sequence[object]] | None] = SimpleQueue()
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._timeout = datetime.timedelta(days=365)
        self._store = store  # torch opens its path again in the file store's destructor
        file_store = _FileStore(f"/proc/self/fd/{store.fd}", -1)
        file_store.set_timeout(datetime.timedelta(seconds=_MEET_S))
        prefixed = _PrefixStore(f"group{number}", file_store)
        try:
            key = shared_key(prefixed)
            self._group: Any = dist.ProcessGroupGloo(prefixed, self._parties.index(me), len(parties), options)
            prove_all(self._group, key, self._parties, self._parties.index(me))
        except RuntimeError as error:
            raise ChannelError(f"{me} could not join the group of {', '.join(parties)}: {error}") from error
        self._thread = threading.Thread(target=self._run, name="crossfade-collectives", daemon=True)
        self._thread.start()

    def collective(self, meeting: Meeting, number: int, rank: int, num_outputs: int) -> GlooCollective:
        """This party's end of collective ``number`` of the plan, in which it has the given rank and gets so many values."""
        end = GlooCollective(self._tasks, meeting, number, rank, num_outputs)
        self._ends.append(end)
        return end

    def ask_to_end(self) -> None:
        """After what was started, END is said; what others start after that is over for them too."""
        self._tasks.put(None)

    def finish(self, deadline: float) -> None:
        """Moves the tensors that all parties agreed on and this one has not fetched, since the others may wait for it. Call
        `ask_to_end` first. Waits until the last agreement is known, up to ``deadline`` on the monotonic clock.
        """
        if self._mover is not None:
            self._has_said_all.wait(max(0.0, deadline - time.monotonic()))
            for end in self._ends:
                with suppress(ChannelError):
                    end.move_agreed()

    def close(self, deadline: float) -> None:
        """Waits for the thread, up to a moment of the monotonic clock; `ask_to_end` comes before."""
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if not self._thread.is_alive():
            self._store.close()

    def _run(self) -> None:
        reason = "another party closed it"
        try:
            while (task := self._tasks.get()) is not None:
                if not self._serve(*task):
                    break
                self._bell.ring_if_asleep()
            else:
                self._has_said_all.set()
                self._exchange(_END, -1, b"")
        except Exception as error:  # gloo's RuntimeErrors, mostly: somebody is gone
            reason = f"{type(error).__name__} in the group of {', '.join(self._parties)}: {error}"
        for end in self._ends:
            end.break_off(reason)
        self._has_said_all.set()
        self._group = None  # the others see that the connection is gone
        self._bell.ring_if_asleep()

    def _serve(self, end: GlooCollective, values: Sequence[object]) -> bool:
        """Does one collective; False if somebody has ended."""
        meeting = end.meeting
        offer = make_offer(meeting, end.rank, values, *(() if self._mover is None else (None,)))
        if offer.failure is None:
            said = self._exchange(_OFFER, end.number, offer.layout())
        else:
            said = self._exchange(_COMPLAINT, end.number, offer.complaint())
        if any(each.status == _END for each in said):
            return False
        start_ns = time.monotonic_ns()
        if any(each.number != end.number for each in said):
            raise ChannelError(f"PL-1: {meeting.label} met with collectives number {[each.number for each in said]}")
        by_rank = [said[self._parties.index(party)] for party in meeting.parties]
        complaints = [each.detail if each.status == _COMPLAINT else None for each in by_rank]
        failure = conclude(meeting, [each.detail for each in by_rank], complaints)
        if failure is not None:
            end.result = [failure] * end.num_outputs
        elif self._mover is not None:
            end.agreed = partial(self._mover, meeting, offer)
        else:
            end.result = self._move(meeting, end.rank, offer, by_rank[meeting.root].detail)
        end.num_values += 1
        end.num_bytes += sum(tensor.nbytes for tensor in offer.tensors)
        if end.on_moved is not None:
            end.on_moved(start_ns, time.monotonic_ns())
        return True

    # Frames

    def _exchange(self, status: int, number: int, detail: bytes) -> list[_Said]:
        """What everybody says, in the order of the group; details only where they are not all alike."""
        digest = hashlib.blake2b(detail, digest_size=16).digest()
        mine = _HEAD.pack(status, number, len(detail), digest) + detail[:_INLINE_BYTES].ljust(_INLINE_BYTES, b"\0")
        frames = self._gather_bytes(mine)
        heads = [_HEAD.unpack_from(frame) for frame in frames]
        details = [frame[_HEAD.size : _HEAD.size + head[2]] for frame, head in zip(frames, heads, strict=True)]
        longest = max(head[2] for head in heads)
        if len({(head[0], head[3]) for head in heads}) == 1 and status == _OFFER:
            details = [detail] * len(heads)
        elif longest > _INLINE_BYTES and all(head[0] != _END for head in heads):
            whole = self._gather_bytes(detail.ljust(longest, b"\0"))
            details = [each[: head[2]] for each, head in zip(whole, heads, strict=True)]
        return [_Said(head[0], head[1], head[3], text) for head, text in zip(heads, details, strict=True)]

    def _gather_bytes(self, mine: bytes) -> list[bytes]:
        """What everybody gives, each as many bytes."""
        given = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
        gathered = torch.empty((len(self._parties), len(mine)), dtype=torch.uint8, device="cpu")
        self._group.allgather([list(gathered.unbind())], [given]).wait()
        return [bytes(row.numpy()) for row in gathered]

    # Tensors

    def _move(self, meeting: Meeting, rank: int, offer: Offer, root_layout: bytes) -> list[torch.Tensor]:
        match meeting.kind:
            case CollectiveKind.ALLREDUCE:
                return self._reduce(meeting, offer.tensors)
            case CollectiveKind.REDUCESCATTER:
                return [shard(meeting, tensor, rank) for tensor in self._reduce(meeting, offer.tensors)]
            case CollectiveKind.ALLGATHER:
                return [self._gather(meeting, offer.tensors[0])]
            case CollectiveKind.BROADCAST:
                return [self._broadcast(meeting, rank, offer, root_layout)]

    def _reduce(self, meeting: Meeting, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """All tensors reduced, those of one dtype as one."""
        options: Any = dist.AllreduceOptions()
        options.reduceOp = _OPS[meeting.op or ReduceOp.SUM]
        results: dict[int, torch.Tensor] = {}
        for dtype, places in pieces_of(tensors).items():
            parts = [tensors[place].reshape(-1).to(dtype) for place in places]
            flat = torch.cat(parts) if len(parts) > 1 else parts[0].clone()
            if flat.numel():
                self._group.allreduce([flat], options).wait()
            finish_reduction(meeting, flat)
            pieces = torch.split(flat, [part.numel() for part in parts])
            for place, piece in zip(places, pieces, strict=True):
                results[place] = piece.to(tensors[place].dtype).view(tensors[place].shape)
        return [results[place] for place in range(len(tensors))]

    def _gather(self, meeting: Meeting, tensor: torch.Tensor) -> torch.Tensor:
        """The tensors of all, in rank order, along dim 0."""
        num_parties = len(meeting.parties)
        result = torch.empty((num_parties * tensor.shape[0], *tensor.shape[1:]), dtype=tensor.dtype, device="cpu")
        if result.numel():
            by_rank = _as_bytes(result).view(num_parties, -1).unbind()
            by_group = [by_rank[meeting.parties.index(party)] for party in self._parties]
            self._group.allgather([by_group], [_as_bytes(tensor.contiguous())]).wait()
        return result

    def _broadcast(self, meeting: Meeting, rank: int, offer: Offer, root_layout: bytes) -> torch.Tensor:
        dtype, shape = layout_of(root_layout)
        result = torch.empty(shape, dtype=dtype, device="cpu")
        if rank == meeting.root:
            result.copy_(offer.tensors[0])
        options = dist.BroadcastOptions()
        options.rootRank = self._parties.index(meeting.parties[meeting.root])
        options.rootTensor = 0
        if result.numel():
            self._group.broadcast([_as_bytes(result)], options).wait()
        return result


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor."""
    return tensor.view(-1).view(torch.uint8)


class GlooCollective:
    """One party's end of one collective; made by `GlooGroup.collective`.

    Attributes:
        result: what this party gets, until it takes it.
        agreed: makes the result, if the group has a mover and all parties have agreed to move.
    """

    on_moved: Callable[[int, int], None] | None = None

    def __init__(self, tasks: Any, meeting: Meeting, number: int, rank: int, num_outputs: int) -> None:
        self.meeting = meeting
        self.number = number
        self.rank = rank
        self.num_outputs = num_outputs
        self.result: Sequence[object] | None = None
        self.agreed: Callable[[], Sequence[object]] | None = None
        self.num_values = 0
        self.num_bytes = 0
        self._tasks: SimpleQueue[tuple[GlooCollective, Sequence[object]] | None] = tasks
        self._broken = ""
        self._is_closed = False

    def start(self, values: Sequence[object]) -> None:
        """See the protocol."""
        self._raise_if_ended()
        self._tasks.put((self, values))

    def pass_on(self) -> None:
        """See the protocol: what comes out is there."""

    def try_finish(self) -> Sequence[object] | None:
        """See the protocol. Blocks if the group has a mover."""
        self.move_agreed()
        if self.result is not None:
            result, self.result = self.result, None
            return result
        self._raise_if_ended()
        return None

    def is_idle(self) -> bool:
        """See the protocol."""
        return self.result is None and self.agreed is None

    def move_agreed(self) -> None:
        """Lets the mover move the tensors that were agreed on, unless that was done."""
        if self.agreed is not None:
            agreed, self.agreed = self.agreed, None
            self.result = agreed()

    def _raise_if_ended(self) -> None:
        if self._is_closed:
            raise ChannelClosed(f"{self.meeting.label} was closed by this side")
        if self._broken:
            raise ChannelBroken(f"{self.meeting.label} is broken: {self._broken}")

    def break_off(self, reason: str) -> None:
        """See the protocol."""
        self._broken = self._broken or reason

    def close(self) -> None:
        """See the protocol. The thread belongs to the group, which tells the others."""
        self._is_closed = True

    def statistics(self) -> ChannelStatistics:
        """See the protocol."""
        return ChannelStatistics(self.num_values, self.num_bytes)
