"""Lanes with a fault each, which operators by copy engines would show on the fake machine."""

from __future__ import annotations

from crossfade.peers.lane import Epoch, Lane


class EarlySignal(Lane):
    """Sets ``full`` as soon as an exchange begins, on the caller's stream."""

    def advance(self) -> Epoch:
        epoch = super().advance()
        assert self._stream is not None
        super().announce(epoch, self.home.peers, self._stream, is_batched=True)
        return epoch

    def announce(self, epoch: Epoch, peers: list[int], stream: int, *, is_batched: bool) -> None:
        pass


class NoLocalFork(Lane):
    """The local stream does not go on behind the caller's."""

    def fork_local(self, stream: int) -> int:
        return self.local


class NoLocalJoin(Lane):
    """The caller's stream does not go on behind the local one."""

    def join_local(self, stream: int) -> None:
        pass
