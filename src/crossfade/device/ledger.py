"""What a process holds of a device, by name: for leak checks, on a GPU and on the fake alike."""

from __future__ import annotations

from itertools import count


class Ledger:
    """Everything that was taken and not given back.

    One entry costs a dict insertion and is made only on cold paths and once for each lease. Safe to use from any thread and from
    destructors: each call is one operation on a dict.
    """

    def __init__(self) -> None:
        # (kind, label) of each thing, by number. Who takes a thing for each value does by itself what `take` and `drop` do.
        self.entries: dict[int, tuple[str, str]] = {}
        self.numbers = count()  # gives those numbers
        self._places: dict[tuple[str, int], list[int]] = {}

    def take(self, kind: str, label: str) -> int:
        """Notes a thing (``"memory"``, ``"lease"``, ...) and gives the number to `drop` it by."""
        number = next(self.numbers)
        self.entries[number] = (kind, label)
        return number

    def drop(self, number: int) -> bool:
        """The thing was given back. Says whether it was held: of several calls, in any threads, one is told so."""
        return self.entries.pop(number, None) is not None

    def take_at(self, kind: str, place: int, label: str = "") -> None:
        """Notes a thing that is known by an address or a handle; the same memory may be opened, and noted, more than once."""
        self._places.setdefault((kind, place), []).append(self.take(kind, label))

    def drop_at(self, kind: str, place: int) -> None:
        """The thing was given back; the one that was noted first, if there are several."""
        numbers = self._places[kind, place]
        self.drop(numbers.pop(0))
        if not numbers:
            del self._places[kind, place]

    def held(self, kind: str | None = None) -> list[str]:
        """What is held now, oldest first, as ``kind: label``."""
        entries = list(self.entries.values())
        return [f"{each}: {label}" for each, label in entries if kind in (None, each)]
