"""A party's NCCL links in a plan: whom it trusts behind one that is broken, and what becomes of one that is made too late."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")

from crossfade.edges import nccl_link  # noqa: E402
from crossfade.edges.life import Event  # noqa: E402
from crossfade.edges.nccl_link import NcclLink  # noqa: E402
from crossfade.engines.device_ends import DeviceEnds  # noqa: E402
from crossfade.errors import ChannelBroken  # noqa: E402
from crossfade.graph.nodes import InputNode  # noqa: E402
from crossfade.host.memory import Memory  # noqa: E402
from crossfade.types import Transport  # noqa: E402
from tests.helpers.copy_pair import host_home, settle  # noqa: E402
from tests.helpers.nccl_pair import StandIn  # noqa: E402
from tests.helpers.threads import together  # noqa: E402
from tests.helpers.turn_parties import actor, call, compiled  # noqa: E402

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def parties(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, DeviceEnds]]:
    """A writer and a reader that have not met."""
    monkeypatch.setattr(nccl_link, "nccl_group", StandIn)
    given = InputNode()
    made = call(actor("A", 0), "make", given).with_tensor_transport(Transport.NCCL)
    plan = compiled(call(actor("B", 1), "take", made))
    homes = {name: host_home() for name in ("A", "B")}
    opened = {
        name: DeviceEnds(plan, name, {}, _devices(home), {}, lambda delay_s: None) for name, home in homes.items()
    }
    yield opened
    for ends in opened.values():
        leave(ends)
        ends.on(Event.UNREFERENCED)
    for home in homes.values():
        home.streams.close()
        home.pool.close()


def leave(ends: DeviceEnds) -> None:
    """What an engine does when a plan is left."""
    ends.on(Event.CLOSE)
    settle([ends])
    ends.on(Event.DRAINED)


def _devices(home: Any) -> Any:
    return SimpleNamespace(homes=[home])


def meet(parties: dict[str, DeviceEnds]) -> dict[str, BaseException | None]:
    """All of them meet; what each raised."""
    store = Memory.create("store", 0)

    def work(name: str) -> BaseException | None:
        try:
            parties[name].meet(store, None)
        except BaseException as error:
            return error
        return None

    raised = together(work, parties)
    store.close()
    return dict(zip(parties, raised, strict=True))


def test_what_was_computed_behind_a_broken_link_is_not_trusted(parties: dict[str, DeviceEnds]) -> None:
    assert meet(parties) == {"A": None, "B": None}
    assert parties["B"].distrust() is None
    parties["B"].on(Event.PEER_DIED, "A", "no memory")
    error = parties["B"].distrust()
    assert isinstance(error, ChannelBroken)
    assert "no memory" in str(error)


def test_who_sends_is_trusted_when_its_reader_is_gone(parties: dict[str, DeviceEnds]) -> None:
    assert meet(parties) == {"A": None, "B": None}
    parties["A"].on(Event.PEER_DIED, "B", "the process of B is gone")
    assert parties["A"].distrust() is None


def test_a_link_that_is_made_after_the_plan_was_given_up_is_ended(
    parties: dict[str, DeviceEnds], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[NcclLink] = []

    def remembered(*args: Any) -> NcclLink:
        made.append(NcclLink(*args))
        return made[-1]

    monkeypatch.setattr(nccl_link, "NcclLink", remembered)
    leave(parties["B"])
    raised = meet(parties)
    assert raised["A"] is None
    with pytest.raises(ChannelBroken, match="given up while B met the others"):
        raise raised["B"] or AssertionError
    assert sorted(link.reason for link in made) == ["", "the plan was given up"]
