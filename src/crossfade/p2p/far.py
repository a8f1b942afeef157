"""What moves values between two hosts: a stream of bytes, from and into memory of the host.

A value goes when its receive has begun, and is requested: what is sent needs no memory before that, and a value that nobody asks
for is in nobody's way. CPU tensors go from where they lie to where they are wanted; those of GPUs pass through pinned memory.
"""

from __future__ import annotations

from collections import deque
from copy import copy
from functools import partial
from typing import TYPE_CHECKING

from crossfade.device.borrowed import tensor_on, torch_or_raise
from crossfade.device.driver import HOST
from crossfade.device.events import PooledEvent
from crossfade.p2p.carrier import Carrier, Offer
from crossfade.p2p.letters import Window
from crossfade.p2p.transfer import Receive, Send, Transfer
from crossfade.p2p.wire import Load, Wire

if TYPE_CHECKING:
    import torch

_BEHIND = Window(0, 0, 0, 0, is_lent=False)
"""The value follows its letter."""


class FarCopies(Carrier):
    """The values between this rank and one of another host."""

    def __init__(self, wire: Wire) -> None:
        super().__init__()
        self._wire = wire
        self._landings: dict[int, torch.Tensor] = {}  # pinned, by number of the value
        self._unsent: dict[int, Send] = {}  # of the host, by number
        self._under_way: deque[tuple[Transfer, PooledEvent, torch.Tensor]] = deque()  # of GPUs, and the host's bytes

    def offer(self, send: Send, number: int, *, is_urgent: bool) -> Offer | None:
        side = send.side
        if not is_urgent:
            if not side.is_host:
                send.ready()
            return None
        if side.is_host:
            self._unsent[number] = send
            self._wire.load(number, Load(_bytes_of(send), bool, partial(self._on_sent, number)))
        else:
            value = _pinned(send.size_bytes)
            send.ready().hold(side.push_stream)
            side.driver.copy(value.data_ptr(), send.address, send.size_bytes, side.push_stream)
            copied = side.events.at(side.push_stream, is_waited=True)
            self._follow(send, side.push_stream, value)
            self._wire.load(number, Load(_view(value), copied.wait, bool))
        return Offer(_BEHIND, None)

    def _on_sent(self, number: int) -> None:
        """In a thread of the wire."""
        send = self._unsent.pop(number, None)
        if send is not None:
            send.finish()
            send.tensor = None

    def expect(self, number: int, receive: Receive) -> None:
        if receive.side.is_host:
            self._wire.expect(number, _bytes_of(receive))
        else:
            receive.free()
            landing = self._landings[number] = _pinned(receive.size_bytes)
            self._wire.expect(number, _view(landing))

    def pull(self, receive: Receive, number: int, window: Window) -> None:
        self.num_pulled += 1
        self.num_bytes += receive.size_bytes
        side = receive.side
        if side.is_host:
            receive.finish()
            receive.tensor = None
            return
        landing = self._landings.pop(number)
        receive.free().hold(side.pull_stream)
        side.driver.copy(receive.address, landing.data_ptr(), receive.size_bytes, side.pull_stream)
        self._follow(receive, side.pull_stream, landing)

    def _follow(self, transfer: Transfer, stream: int, value: torch.Tensor) -> None:
        self._under_way.append((transfer, transfer.finish_behind(stream), value))

    def collect(self) -> None:
        while self._under_way and self._under_way[0][1].has_come():
            self._under_way.popleft()[0].tensor = None

    @property
    def are_under_way(self) -> bool:
        return bool(self._under_way)

    def suspect(self, death: Exception) -> None:
        self.death = death
        for number in list(self._unsent):
            send = self._unsent.pop(number, None)
            if send is not None:
                send.fail(copy(death))

    def failure(self) -> Exception | None:
        return None if self._wire.failure is None else copy(self._wire.failure)

    def close(self) -> None:
        self._wire.close()
        self._landings.clear()
        self._under_way.clear()
        self._unsent.clear()


def _bytes_of(transfer: Transfer) -> memoryview:
    """The memory of a tensor on the CPU, which lives as long as the view."""
    size_bytes = transfer.size_bytes
    return _view(tensor_on(transfer.address, (size_bytes,), torch_or_raise().uint8, HOST, transfer.tensor))


def _view(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.numpy().data)


def _pinned(size_bytes: int) -> torch.Tensor:
    made: torch.Tensor = torch_or_raise().empty(size_bytes, dtype=torch_or_raise().uint8, pin_memory=True)
    return made
