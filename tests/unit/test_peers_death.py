"""A rank dies in the middle of an all-reduce: another one that has not heard of it does not take rubbish for a result.

Rank 0 hears of the death first, its streams are let go, and they give rank 1 a sum in which a block is missing. Rank 1 has all the
signals that it waits for. So its own watchdog is not enough: its check has to ask the system who is alive.
"""

from __future__ import annotations

import pytest

from crossfade.peers.tuning import Tuning
from crossfade.testing.fake import Fault, Machine
from tests.helpers.peer_deaths import DeathWorld, LooseMachine, drive
from tests.helpers.peer_worlds import Call, Collective

CALL = Call(Collective.ALL_REDUCE, tunings=(Tuning(one_shot_bytes=0, is_batched=False),))
MOMENTS = range(22)


def outcomes(*, is_asking: bool) -> list[Fault | None]:
    return [drive(DeathWorld(CALL, num_left, is_asking=is_asking)) for num_left in MOMENTS]


def test_nobody_takes_rubbish_for_a_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Machine, "touch", LooseMachine.touch)
    monkeypatch.setattr(Machine, "store", LooseMachine.store)
    found = [fault for fault in outcomes(is_asking=False) if fault is not None]
    assert {str(fault) for fault in found} == {"wrong value: rank 1 takes rubbish for a result"}
    assert outcomes(is_asking=True) == [None] * len(MOMENTS)
