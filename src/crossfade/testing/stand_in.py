"""What every stand-in of a device driver needs: addresses, streams, events and graphs as integers, all of them in a ledger."""

from __future__ import annotations

from collections.abc import Sequence

from crossfade.device.driver import Allocation
from crossfade.device.ledger import Ledger


class StandIn:
    """The part of `crossfade.device.driver.Driver` that does not depend on when operations run. A subclass is the policy.

    Streams, events and graphs are numbered from 1. Memory and handles are entered in the ledger by their addresses.
    """

    def __init__(self, device: int) -> None:
        self.device = device
        self.ledger = Ledger()
        self._numbers = {"stream": 0, "event": 0, "graph": 0}

    def _new(self, kind: str, label: str = "") -> int:
        self._numbers[kind] += 1
        self.ledger.take_at(kind, self._numbers[kind], label)
        return self._numbers[kind]

    def export(self, address: int) -> bytes:
        return address.to_bytes(64, "little")

    def open_handle(self, handle: bytes, label: str) -> int:
        address = int.from_bytes(handle, "little")
        self.ledger.take_at("opened", address, label)
        return address

    def close_handle(self, address: int) -> None:
        self.ledger.drop_at("opened", address)

    def allocation_of(self, address: int) -> Allocation | None:
        """Nothing that is not a policy's own can be exported."""
        return None

    def identity_of(self, address: int) -> int:
        found = self.allocation_of(address)
        return found.identity if found is not None else 0

    def free(self, address: int) -> None:
        self.ledger.drop_at("memory", address)

    def create_stream(self, label: str, *, is_urgent: bool = False) -> int:
        return self._new("stream", label)

    def destroy_stream(self, stream: int) -> None:
        self.ledger.drop_at("stream", stream)

    def create_event(self) -> int:
        return self._new("event")

    def create_host_event(self) -> int:
        return self.create_event()

    def destroy_event(self, event: int) -> None:
        self.ledger.drop_at("event", event)

    def destroy_graph(self, graph: int) -> None:
        self.ledger.drop_at("graph", graph)

    def name_range(self, address: int, size_bytes: int, label: str) -> None:
        pass

    def write_value(self, stream: int, address: int, value: int) -> None:
        raise NotImplementedError

    def wait_value(self, stream: int, address: int, value: int) -> None:
        raise NotImplementedError

    def wait_and_reset(self, stream: int, address: int, value: int, reset: int) -> None:
        self.wait_all_and_reset(stream, [address], value, reset)

    def write_values(self, stream: int, addresses: Sequence[int], value: int) -> None:
        for address in addresses:
            self.write_value(stream, address, value)

    def wait_all_and_reset(self, stream: int, addresses: Sequence[int], value: int, reset: int) -> None:
        raise NotImplementedError

    def failure(self) -> str:
        return ""

    def enter_thread(self) -> None:
        pass
