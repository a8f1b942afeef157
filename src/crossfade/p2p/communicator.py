"""Tagged send and receive between the ranks of a torch.distributed group."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from copy import copy
from functools import partial
from math import prod
from types import TracebackType
from typing import TYPE_CHECKING, Self

from crossfade.device.borrowed import tensor_on, torch_or_raise
from crossfade.errors import ChannelClosed, ChannelError, ChannelTimeout, DeviceError
from crossfade.p2p.attendant import Attendant
from crossfade.p2p.carrier import P2PStatistics
from crossfade.p2p.memory import OwnedCell, Side, side_of
from crossfade.p2p.opening import died, open_ranks, ranks_of
from crossfade.p2p.pairs import Pairs
from crossfade.p2p.payload import Transport, Waits, check_capture, check_ranks, check_tensor, choose, empty, number_of
from crossfade.p2p.transfer import Receive, Send, Transfer
from crossfade.p2p.waiting import Waiting
from crossfade.p2p.work import Work
from crossfade.peers.rendezvous import Ranks

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup


class P2P:
    """Sends and receives tensors between the ranks of a torch.distributed group.

    The k-th send from one rank to another with a tag meets the k-th receive of that pair with that tag, in whatever order the two
    ranks begin them, and whatever is under way with other tags. Between GPUs the copy engines move the bytes, beside whatever the
    GPUs compute; a large tensor is copied once, straight into the receiver's tensor.

    Any thread may use it. Opening and `close` are collective.

    Args:
        group: of torch.distributed; None for the default group. (Or `crossfade.peers.rendezvous.Ranks`, where there is none yet.)
        device: this rank's GPU, or ``"cpu"``; None for torch's current GPU where there is one. CPU tensors can be sent in any case.
        transport: ``"copy"``: GPUs read and write each other's memory, which takes NVLink; ``"staged"``: values pass through pinned
            memory of the host; ``"auto"``: the former between GPUs that NVLink connects, the latter between others. Between hosts
            values go by TCP, everywhere with ``"tcp"``. All ranks give the same. On the CPU ``"staged"`` is for tests.
        waits: ``"host"``: `Work.wait` keeps the host until the other rank has begun its part, so that no order of calls can hang a
            GPU; ``"stream"``: it goes on at once where torch's current stream can wait for a receive whose send has not begun, as
            NCCL's does. A value that does not come makes all later calls raise (`check`). All ranks give the same.
        buffer_bytes: what values may take that are copied before the receiver asks for them (CPU tensors, GPU tensors of up to
            1 MB, or an eighth of this where streams wait, or in memory that cannot be exported, all that is staged), in memory of
            the host and of the GPU each. Sends beyond that wait for their receives. Where streams wait, as much again for receives.
        timeout_s: the longest that a call waits for other ranks' hosts.

    Raises:
        DeviceError: there is no group, or ``"copy"`` was asked for where it cannot be.
        ValueError: an argument makes no sense.
    """

    def __init__(
        self,
        group: ProcessGroup | Ranks | None = None,
        *,
        device: torch.device | str | None = None,
        transport: str = "auto",
        waits: str = "host",
        buffer_bytes: int = 256 << 20,
        timeout_s: float = 60.0,
    ) -> None:
        if buffer_bytes < 0 or not timeout_s > 0:
            raise ValueError(
                f"buffer_bytes is {buffer_bytes} and timeout_s {timeout_s}\nhint: bytes and seconds, the latter more than 0"
            )
        way, waiter = choose(Transport, "the transport", transport), choose(Waits, "waits", waits)
        torch = torch_or_raise()
        where = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if device is None else device)
        if where.type not in ("cpu", "cuda"):
            raise DeviceError(f"there is no point-to-point for device '{where}'", hint="take a CUDA device or 'cpu'")
        ranks = group if isinstance(group, Ranks) else ranks_of(group, where)
        opened = open_ranks(ranks, where, way, waiter, buffer_bytes, timeout_s)
        self.rank = opened.rank
        self.num_ranks = len(opened.pairs)
        self._timeout_s = timeout_s
        self._opened = opened
        self._sides = opened.sides
        self._pairs = opened.pairs
        self._is_closing = False
        self._is_ahead = waiter is Waits.STREAM
        self._alarm = opened.own_alarm
        alarms = {pair.name: alarm for pair, alarm in zip(opened.pairs, opened.alarms, strict=True)}
        self._waiting = Waiting(self._alarm, alarms, self.look, self._has_more_to_come, opened.pidfds, self._on_death)
        self._all = Pairs(opened.pairs, opened.sides.values(), timeout_s, self._waiting.too_late)
        self._lock = self._all.lock
        self._attendant = Attendant(
            [side.driver for side in self._sides.values()],
            self._all.is_quiet,
            partial(self._waiting.attend, self._all.work_off),
            self._tick,
        )

    # Transfers

    def isend(self, tensor: torch.Tensor, dst: int | Sequence[int], tag: int = 0) -> Work:
        """Begins a send of a tensor to one rank or several.

        Args:
            tensor: of any shape and numeric dtype. What torch's current stream computes until now is sent.
            dst: the rank in the group; this one's own is possible.
            tag: any integer from -2^62 to 2^62.

        Returns:
            A `Work`; once the current stream is behind its `Work.wait`, the tensor may be changed.

        Raises:
            TypeError, ValueError: an argument makes no sense.
            ChannelBroken: the rank died, or has closed its communicator.
            ChannelClosed: this communicator is closed.
        """
        given = tuple(dst) if isinstance(dst, Iterable) else (dst,)
        ranks, tag = check_ranks("isend", given, tag, self.num_ranks)
        side = self._check("isend", tensor, ranks)
        source = tensor.detach().contiguous()
        shape, dtype = tuple(tensor.shape), number_of(tensor.dtype)
        sends: list[Send] = []
        with self._lock:
            pairs = [] if self._all.is_closed else [self._pairs[rank] for rank in ranks]
            try:
                for pair in pairs:
                    pair.begin_send()
                self._begin()
                for pair, rank in zip(pairs, ranks, strict=True):
                    sends.append(Send(side, tag, rank, source, shape, dtype, side.current_stream()))
                    pair.send(sends[-1])
            finally:
                for pair in pairs:
                    pair.end_send()
            self._attendant.call()
        return Work(self, sends)

    def irecv(self, tensor: torch.Tensor, src: int, tag: int = 0) -> Work:
        """Begins a receive into a tensor from one rank. Arguments and errors are those of `isend`.

        Returns:
            A `Work`; once the current stream is behind its `Work.wait`, the tensor has the value.
        """
        (src,), tag = check_ranks("irecv", (src,), tag, self.num_ranks)
        side = self._check("irecv", tensor, (src,))
        target = tensor.detach()
        is_direct = target.is_contiguous()
        if not is_direct:
            target = torch_or_raise().empty_like(target, memory_format=torch_or_raise().contiguous_format)
        with self._lock:
            self._begin()
            receive = Receive(side, tag, src, target, side.current_stream())
            self._pairs[src].receive(receive)
            self._attendant.call()
        return Work(self, (receive,), None if is_direct else partial(tensor.detach().copy_, target))

    def send(self, tensor: torch.Tensor, dst: int | Sequence[int], tag: int = 0) -> None:
        """`isend`, and `Work.wait`."""
        self.isend(tensor, dst, tag).wait()

    def recv(self, tensor: torch.Tensor, src: int, tag: int = 0) -> None:
        """`irecv`, and `Work.wait`."""
        self.irecv(tensor, src, tag).wait()

    def recv_any(self, src: int, tag: int = 0, *, timeout: float | None = None) -> torch.Tensor:
        """Receives a tensor of which neither shape nor dtype is known here.

        Args:
            src: the rank in the group.
            tag: see `isend`.
            timeout: the longest wait for its send, in seconds; None for the communicator's ``timeout_s``.

        Returns:
            A new tensor on the sender's kind of device, valid on torch's current stream.

        Raises:
            ChannelTimeout: nothing came in time. What comes later meets the next receive.
        """
        (src,), tag = check_ranks("recv_any", (src,), tag, self.num_ranks)
        self._all.use((src,))
        with self._lock:
            self._begin()
            receive = Receive(next(iter(self._sides.values())), tag, src, None, 0)
            self._pairs[src].receive(receive)
        try:
            self._await(lambda: receive.arrival is not None or receive.is_settled, str(receive), timeout)
        except BaseException as error:
            is_interrupted = not isinstance(error, ChannelTimeout)
            with self._lock:
                if self._pairs[src].withdraw(receive, is_given_up=is_interrupted) or is_interrupted:
                    raise
        if receive.error is not None:
            raise copy(receive.error)
        assert receive.arrival is not None, "it is there, or an error was raised"
        value = receive.arrival.value
        side = self._sides[value.is_host]
        tensor = empty(value, side.driver.device)
        with self._lock:
            self._begin()  # another thread may have closed it meanwhile
            receive.take_into(side, tensor, side.current_stream())
            self._pairs[src].accept(receive, receive.arrival)
        Work(self, (receive,)).wait(timeout)
        return tensor

    def probe(self, tag: int = 0, *, timeout: float | None = None) -> int:
        """Waits until a value with a tag was sent to this rank that no receive has met. Errors are those of `recv_any`.

        Returns:
            The rank that sent it; the lowest, if there are several.
        """
        _, tag = check_ranks("probe", range(self.num_ranks), tag, self.num_ranks)
        self._begin()
        found: list[int] = []

        def ready() -> bool:
            with self._lock:
                found[:] = [rank for rank, pair in enumerate(self._pairs) if pair.has_value(tag)]
            return bool(found)

        self._await(ready, f"a receive from any rank with tag {tag}", timeout)
        return found[0]

    def empty(self, *shape: int, dtype: torch.dtype, device: torch.device | str | None = None) -> torch.Tensor:
        """A tensor in memory that other ranks reach in any case: a receive into it, and a send of it, copy once. So it is with CPU
        tensors, and with GPU tensors where torch's allocator uses expandable segments.

        Args:
            shape: its shape.
            dtype: its type.
            device: the GPU for which the communicator was opened, or ``"cpu"``; None for the former where there is one.

        Raises:
            DeviceError: there is no memory for it.
            ChannelClosed: the communicator is closed. (Tensors that are there must not be used after `close`.)
        """
        torch = torch_or_raise()
        is_host = len(self._sides) == 1 if device is None else torch.device(device).type == "cpu"
        side = self._sides.get(is_host)
        if side is None:
            raise ValueError(f"there are no tensors on {device} here\nhint: the communicator was opened for the CPU")
        size_bytes = prod(shape) * dtype.itemsize
        with self._lock:
            self._begin()
            cells = side.direct.cells
            cell = cells.own(size_bytes)
        return tensor_on(cell.address, shape, dtype, side.driver.device, OwnedCell(cell, cells.ended))

    def _check(self, call: str, tensor: torch.Tensor, ranks: Sequence[int]) -> Side:
        check_tensor(tensor, call)
        self._all.use(ranks)
        side = side_of(self._sides, tensor, call)
        check_capture(call, is_host=side.is_host)
        return side

    def _begin(self) -> None:
        """At the beginning of a call, with the lock."""
        if self._is_closing:
            raise ChannelClosed("the communicator is closed", hint="open a new one with P2P(group)")
        self.look()
        self._all.check()

    def look(self) -> bool:
        """Handles what other ranks have said. Whether anything came."""
        has_come = self._all.look()
        if has_come:
            self._waiting.notify()
        return has_come

    def join(self, transfer: Transfer, timeout: float | None) -> None:
        """Waits until everything is enqueued that a transfer needs, and lets the current stream wait for it. Raises as `Work.wait`
        does.
        """
        check_capture("wait", is_host=transfer.side.is_host)
        if transfer.is_settled or self._settles(transfer):
            self._waiting.forget()
        else:
            self._await(lambda: self._settles(transfer), str(transfer), timeout)
        is_joined = self._all.land(transfer)
        if transfer.error is not None:
            raise copy(transfer.error)
        if not is_joined:
            transfer.join()

    def _settles(self, transfer: Transfer) -> bool:
        """Whether the host has nothing left to wait for; where it can, the current stream waits in its place."""
        if self._is_ahead and isinstance(transfer, Receive) and not transfer.is_settled:
            with self._lock:
                if self._all.land_ahead(transfer):
                    self._waiting.notify()
                    self._attendant.watch()
        return transfer.is_settled

    def _has_more_to_come(self) -> bool:
        return self._is_ahead and self._all.has_landings_to_come()

    def _tick(self) -> None:
        self.look()
        self._waiting.bury()
        self._waiting.set_status(self._all.awaited())

    def is_over(self, transfers: Sequence[Transfer]) -> bool:
        """Whether the copies of transfers have been made, or cannot be made any more; waits for nothing."""
        self.look()
        return self._all.are_over(transfers)

    def _await(self, ready: Callable[[], bool], what: str, timeout: float | None) -> None:
        self._waiting.until_met(ready, self._timeout_s if timeout is None else timeout, what)

    # Deaths

    def _on_death(self, rank: int) -> None:
        with self._lock:
            if not self._all.is_closed:
                self._pairs[rank].on_death(died(self._pairs[rank].name))

    def check(self) -> None:
        """Raises if a rank has died, or a stream was let go that waited for a value. On GPUs, ask after a synchronisation, before
        results are trusted; also once it is closed.

        Raises:
            ChannelBroken, ChannelError: it names the rank.
        """
        if self._pairs:
            self._waiting.bury()
        for rank, pair in enumerate(self._pairs):
            if pair.is_dying():
                self._on_death(rank)
            if pair.carrier.death is not None:
                self._all.has_raised = True
                raise copy(pair.carrier.death)
        self._all.check()

    def statistics(self) -> P2PStatistics:
        """What this rank has enqueued until now; zeros once it is closed."""
        return P2PStatistics.of([pair.carrier for pair in self._pairs])

    # The end

    def close(self) -> None:
        """Gives everything back, once all ranks have come here, or have died. Collective; idempotent.

        Values that were sent can be received until the receiver closes as well. What has met nothing by then fails on both sides;
        what a stream waits for ahead is waited for.

        Raises:
            ChannelTimeout: not all ranks came. Everything is given back all the same.
            ChannelError: see `check`, if nothing has raised it before. Everything is given back all the same.
        """
        self._close(has_failed=False)

    def _close(self, *, has_failed: bool) -> None:
        with self._lock:
            if self._all.is_closed or self._is_closing:
                return
            self._is_closing = True
        if not has_failed:
            self._waiting.until(lambda: not self._all.awaited(), self._timeout_s, lambda: "closes its communicator")
        self._waiting.bury()
        with self._lock:
            for pair in self._pairs:
                pair.leave(ChannelClosed("the communicator is closed", hint="open a new one with P2P(group)"))
        is_closed = self._waiting.until(self._have_all_closed, self._timeout_s, lambda: "closes its communicator")
        with self._lock:
            self._all.is_closed = True
        self._alarm.ring()
        self._attendant.close()
        late = self._waiting.who_waits()
        self._opened.close()
        self._all.forget()
        del self._alarm, self._opened
        self._pairs = []
        self._waiting.close()
        if not is_closed:
            raise ChannelTimeout(f"not all ranks closed their communicators within {self._timeout_s:g} s{late}")
        if not self._all.has_raised:
            self._all.check()

    def _have_all_closed(self) -> bool:
        with self._lock:
            return all([pair.has_ended() for pair in self._pairs])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
            return
        with suppress(ChannelError):  # the error in the block is the one to see
            self._close(has_failed=True)

    def __repr__(self) -> str:
        return f"P2P(rank {self.rank} of {self.num_ranks}{', closed' if self._all.is_closed else ''})"
