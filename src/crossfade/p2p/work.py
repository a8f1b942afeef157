"""What a caller holds of transfers that it has begun."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from crossfade.p2p.transfer import Transfer


class _Waiter(Protocol):
    """Waits for hosts (see `crossfade.p2p.communicator.P2P`)."""

    def join(self, transfer: Transfer, timeout: float | None) -> None:
        """Waits until a transfer is enqueued, and lets the current stream wait for it."""

    def is_over(self, transfers: Sequence[Transfer]) -> bool:
        """Handles what has come. Whether the copies of transfers have been made, or cannot be made any more."""


class Work:
    """A send or a receive that has begun. It may be dropped: the transfer happens all the same."""

    def __init__(
        self, waiter: _Waiter, transfers: Sequence[Transfer], then: Callable[[], object] | None = None
    ) -> None:
        self._waiter = waiter
        self._transfers = transfers
        self._then = then

    def wait(self, timeout: float | None = None) -> bool:
        """Makes torch's current stream wait for the transfer: what comes next sees the value received, or may change the
        tensor sent. On a CPU it is so when this returns.

        The host waits until the other rank has begun its part (no stream waits for what is not enqueued), and never for a device.
        With ``waits="stream"`` it does not wait where the stream can: errors of that come with later calls (`P2P.check`).

        Args:
            timeout: the longest wait in seconds; None for the communicator's ``timeout_s``.

        Returns:
            True.

        Raises:
            ChannelTimeout: the other rank did not begin its part in time; the error says what all wait for. May be called again.
            ChannelBroken: the other rank died, or has closed its communicator.
            ChannelClosed: this rank's communicator was closed.
            ChannelError: the tensors of both ranks do not fit each other.
        """
        for transfer in self._transfers:
            self._waiter.join(transfer, timeout)
        if self._then is not None:
            then, self._then = self._then, None
            then()
        return True

    def is_completed(self) -> bool:
        """Whether the copies have been made, or cannot be made any more; waits for nothing. A receive into a tensor that is not
        contiguous needs a `wait` all the same.
        """
        return self._waiter.is_over(self._transfers)

    def exception(self) -> BaseException | None:
        """Why a transfer will not happen; None if nothing is known against it."""
        return next((transfer.error for transfer in self._transfers if transfer.error is not None), None)
