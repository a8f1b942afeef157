"""What a session has, and which actor holds how much of it. Pure bookkeeping: nobody is kept from using more than was booked.

Amounts are kept as whole ten-thousandths, so that ten times 0.1 is 1.

GPUs are booked one by one, by index. Who asks for k has k of them alone; a part is of one GPU, which others may hold other
parts of. A part goes to the GPU with the least room that is enough, so that as many as possible stay whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from crossfade.errors import ActorStartError

CPU = "num_cpus"
GPU = "num_gpus"

_UNITS = 10_000


def amounts(
    num_cpus: float | None = None, num_gpus: float | None = None, resources: Mapping[str, float] | None = None
) -> dict[str, float]:
    """What was asked for, by name, without what is None or 0. Refuses what is no amount (TypeError, ValueError)."""
    if resources is not None and not isinstance(resources, Mapping):
        raise TypeError(f"resources is {resources!r}\nhint: it is a dict, such as {{'license': 1}}")
    own = dict(resources or {})
    for name in own:
        if name in ("CPU", "GPU", CPU, GPU):
            raise ValueError(f"{name!r} is among the resources\nhint: use num_cpus= and num_gpus= for these")
    asked = {CPU: num_cpus, GPU: num_gpus, **own}
    for name, amount in asked.items():
        _check(name, amount)
    return {name: amount for name, amount in asked.items() if amount}


def _check(name: str, amount: object) -> None:
    if amount is None:
        return
    if isinstance(amount, bool) or not isinstance(amount, int | float):
        raise TypeError(f"{name} is {amount!r}\nhint: it is a number")
    if not math.isfinite(amount) or amount < 0:
        raise ValueError(f"{name} is {amount!r}\nhint: it is 0 or more")
    if 0 < amount < 1 / _UNITS:
        raise ValueError(f"{name} is {amount!r}\nhint: the smallest part that can be booked is {1 / _UNITS}")


class Ledger:
    """Who holds how much; ``totals`` says how much there is, by name."""

    def __init__(self, totals: Mapping[str, float]) -> None:
        self._totals = {name: _units(amount) for name, amount in totals.items()}
        self._held: dict[str, dict[str, int]] = {}
        self._gpus: dict[str, dict[int, int]] = {}  # how much of which GPU, by holder

    @property
    def holders(self) -> tuple[str, ...]:
        """Who holds something, in the order in which it was booked."""
        return tuple(self._held)

    def total(self, name: str) -> float:
        """How much there is in all."""
        return self._totals.get(name, 0) / _UNITS

    def free(self, name: str) -> float:
        """The amount that is not reserved."""
        return self._free(name) / _UNITS

    def book(self, holder: str, asked: Mapping[str, float]) -> None:
        """Books all that is asked, or nothing. An `ActorStartError` says what is free and who holds the rest."""
        wanted = {name: units for name, amount in asked.items() if (units := _units(amount))}
        for name, units in wanted.items():
            if units > self._free(name):
                raise self._refusal(holder, name, units)
        gpus = self._place(holder, wanted.get(GPU, 0))
        if wanted:
            self._held[holder] = wanted
        if gpus:
            self._gpus[holder] = gpus

    def gpus(self, holder: str) -> tuple[int, ...]:
        """Indices of the GPUs of which a holder has all or a part."""
        return tuple(sorted(self._gpus.get(holder, ())))

    def gpu_shares(self, holder: str) -> dict[int, float]:
        """How much of which GPU a holder has, by index."""
        return {index: units / _UNITS for index, units in self._gpus.get(holder, {}).items()}

    def give_back(self, holder: str) -> None:
        """Frees all that a holder has, if it has anything."""
        self._held.pop(holder, None)
        self._gpus.pop(holder, None)

    def give_back_if(self, is_gone: Callable[[str], bool]) -> None:
        """Frees what is held by those who are gone."""
        for holder in self.holders:
            if is_gone(holder):
                self.give_back(holder)

    def _free(self, name: str) -> int:
        return self._totals.get(name, 0) - sum(held.get(name, 0) for held in self._held.values())

    def _room(self) -> dict[int, int]:
        """How much of each GPU is free. The last one is a part of a GPU where the session has no whole number."""
        total = self._totals.get(GPU, 0)
        room = {index: min(_UNITS, total - start) for index, start in enumerate(range(0, total, _UNITS))}
        for held in self._gpus.values():
            for index, units in held.items():
                room[index] -= units
        return room

    def _place(self, holder: str, units: int) -> dict[int, int]:
        """How much of which GPU a new holder of so many gets."""
        room, gpus = self._room(), {}
        num_whole, part = divmod(units, _UNITS)
        if part:
            index = min((index for index in room if room[index] >= part), key=room.__getitem__, default=None)
            if index is None:
                raise self._scattered(holder, units, room)
            gpus[index] = part
        whole = [index for index in room if room[index] == _UNITS and index not in gpus][:num_whole]
        if len(whole) < num_whole:
            raise self._scattered(holder, units, room)
        return {**gpus, **dict.fromkeys(whole, _UNITS)}

    def _scattered(self, holder: str, units: int, room: Mapping[int, int]) -> ActorStartError:
        """There is as much, but in pieces of several GPUs."""
        parts = ", ".join(f"{_shown(rest)} of GPU {index}" for index, rest in room.items() if rest)
        return ActorStartError(
            f"actor {holder} asks for {GPU}={_shown(units)}, and what is free is in pieces: {parts}",
            hint="whole GPUs are for one actor, and a part is of one GPU; crossfade.kill(actor) gives back what an actor holds",
            actor=holder,
        )

    def _refusal(self, holder: str, name: str, units: int) -> ActorStartError:
        total = self._totals.get(name, 0)
        held = {other: mine[name] for other, mine in self._held.items() if name in mine}
        rest = ", ".join(f"{other} holds {_shown(mine)}" for other, mine in held.items()) or "nobody holds any"
        keyword = name if name in (CPU, GPU) else f"resources={{{name!r}: ...}}"
        hint = (
            "crossfade.kill(actor) gives back what an actor holds"
            if units <= total
            else f"the session has {_shown(total)}; crossfade.init({keyword}) says how much there is"
        )
        return ActorStartError(
            f"actor {holder} asks for {name}={_shown(units)}, and {_shown(self._free(name))} of {_shown(total)} is free: {rest}",
            hint=hint,
            actor=holder,
        )


def _units(amount: float) -> int:
    return round(amount * _UNITS)


def _shown(units: int) -> str:
    return f"{units / _UNITS:g}" if units % _UNITS else str(units // _UNITS)
