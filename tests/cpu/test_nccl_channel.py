"""NCCL channels, with gloo in the place of NCCL: values, and how their ends close and break."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")

from crossfade.edges import nccl_link  # noqa: E402
from crossfade.edges.life import Event  # noqa: E402
from crossfade.edges.nccl_link import (  # noqa: E402
    NcclLink,
    nccl_group,
)
from crossfade.engines.device_ends import DeviceEnds  # noqa: E402
from crossfade.errors import ChannelBroken, ChannelClosed, ChannelError, DeviceError, Failure  # noqa: E402
from crossfade.graph.nodes import InputNode  # noqa: E402
from crossfade.host.memory import Memory  # noqa: E402
from crossfade.testing import conformance  # noqa: E402
from crossfade.types import Transport  # noqa: E402
from tests.cpu.test_staged_engine import Summed  # noqa: E402
from tests.helpers.channel_pairs import check_values_stay_whole, in_turns, same  # noqa: E402
from tests.helpers.copy_pair import host_home, lose, settle  # noqa: E402
from tests.helpers.nccl_pair import StandIn, open_links, open_nccl_channels, open_nccl_ends, open_nccl_pair  # noqa: E402
from tests.helpers.small_graphs import actor, compiled  # noqa: E402
from tests.helpers.threads import together  # noqa: E402
from tests.helpers.turn_parties import call  # noqa: E402
from tests.helpers.waiting import until  # noqa: E402

pytestmark = pytest.mark.timeout(60)
torch.set_num_threads(1)

open_nccl = in_turns(open_nccl_ends)
open_channels: Any = open_nccl_channels
TestNcclChannel = conformance.suite(open_nccl_pair)


@pytest.mark.parametrize("num_readers", [1, 3])
@pytest.mark.parametrize("seed", range(4))
def test_values_arrive_whole_and_stay_so_while_they_are_kept(num_readers: int, seed: int) -> None:
    with open_nccl(4, num_readers) as (pair, _, _):
        check_values_stay_whole(pair, 4, 60, seed)


def test_values_without_device_tensors_enqueue_nothing() -> None:
    with open_nccl(2, 1) as (pair, writer, (reader,)):
        groups = [writer.carrier.links[0].lanes[0].group, reader.carrier.link.lanes[0].group]
        failure = Failure.capture(KeyError(1), actor="a", node="n")
        for value in (3, failure, ["text"], torch.empty(0, 3)):
            assert pair.write(value)
            assert same(pair.read()[0], value)
        assert [group.num_sent + group.num_received for group in groups] == [1, 1]  # the greeting
        assert pair.write([torch.arange(3), torch.ones(2), torch.empty(0)])
        assert same(pair.read()[0], [torch.arange(3), torch.ones(2), torch.empty(0)])
        assert [group.num_sent + group.num_received for group in groups] == [3, 3]
        assert pair.write(Summed(torch.arange(100)))
        assert pair.read()[0].total == 4950


def test_channels_of_one_link_are_received_in_the_order_in_which_they_were_sent() -> None:
    with open_channels(2, 1, 2) as ((first, (here,)), (second, (there,))):
        for number in range(10):
            assert there.try_start()  # asked for before either has come
            assert here.try_start()
            assert first.try_write([number])  # messages by themselves come in any order
            assert second.try_write(torch.full((5,), number))
            assert first.try_write(torch.full((7,), number))
            assert here.try_read() == [number]
            here.release()
            assert there.try_read().tolist() == [number] * 5
            there.release()
            assert here.try_start()
            assert here.try_read().tolist() == [number] * 7
            here.release()


def test_pl1_a_value_that_is_asked_for_out_of_order_breaks_the_link() -> None:
    with open_channels(2, 1, 2) as ((first, (here,)), (second, (there,))):
        assert first.try_write(torch.arange(5))
        assert second.try_write(torch.arange(7))
        assert there.try_start()
        with pytest.raises(ChannelBroken, match="PL-1: value 1 of a to b0 over NCCL was asked for where 0 comes next"):
            there.try_read()
        assert here.try_start()
        with pytest.raises(ChannelBroken, match="PL-1"):
            here.try_read()


def test_what_was_sent_and_not_asked_for_is_received_when_the_channels_close() -> None:
    with open_channels(3, 1, 2) as ((first, (here,)), (second, (there,))):
        group = first.carrier.links[0].lanes[0].group
        for number in range(3):
            assert second.try_write({"number": number, "tensor": torch.ones(100_000)})
            assert first.try_write(torch.ones(1000))
        assert there.try_start()
        assert same(there.try_read(), {"number": 0, "tensor": torch.ones(100_000)})
        here.close()
        with pytest.raises(ChannelClosed):
            here.try_read()
        begin = time.monotonic()
    until(lambda: group.ended, pause_s=0.001)
    assert group.ended == "shutdown"
    assert time.monotonic() - begin < nccl_link._GRACE_S


def test_a_reader_that_waits_for_a_writer_in_vain_ends_the_link(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl_link, "_GRACE_S", 0.05)
    with open_nccl(2, 1) as (_, _, (reader,)):
        group = reader.carrier.link.lanes[0].group
        reader.close()
        settle([reader])
        assert group.ended == "abort"


def test_who_has_no_memory_breaks_the_link() -> None:
    with open_nccl(2, 1) as (pair, _, (reader,)):

        def refuse(size_bytes: int) -> Any:
            raise RuntimeError("out of memory")

        reader.carrier.link.lanes[0].arrivals.allocate = refuse
        assert pair.write(torch.ones(1000))
        assert reader.try_start()
        with pytest.raises(ChannelBroken, match="no memory for 4000 bytes that NCCL brings: out of memory"):
            reader.try_read()


@pytest.mark.parametrize("is_direct", [True, False])
def test_the_tensors_of_a_dead_party_are_not_given_out(is_direct: bool) -> None:
    with open_nccl(3, 1) as (pair, writer, (reader,)):
        assert pair.write("a message")
        assert pair.write(torch.arange(4))
        assert reader.try_start()
        assert reader.try_start()
        (reader.break_off if is_direct else reader.carrier.refuse)("somebody died")
        if is_direct:
            reader.carrier.link.break_off("somebody died")
        assert reader.try_read() == "a message"
        with pytest.raises(ChannelBroken, match="somebody died"):
            reader.try_read()
        lose(writer, 0, "the reader died")
        with pytest.raises(ChannelBroken, match="the reader died"):
            writer.try_write(torch.arange(4))


def test_nccl_needs_gpus() -> None:
    home = host_home()
    with pytest.raises(
        DeviceError, match=r"the transport 'nccl' needs a GPU on both sides.*\nhint: 'copy' and 'staged'"
    ):
        open_links(("a", "b"), ([home], [home]), nccl_group)


@pytest.mark.parametrize("fault", [RuntimeError, DeviceError])
def test_a_link_whose_second_lane_cannot_be_made_ends_the_first_one(fault: type[Exception]) -> None:
    made: list[StandIn] = []

    class Fails(StandIn):
        def send(self, tensors: list[Any], rank: int, tag: int) -> Any:
            return refuse() if self in made[2:] else super().send(tensors, rank, tag)

        def recv(self, tensors: list[Any], rank: int, tag: int) -> Any:
            return refuse() if self in made[2:] else super().recv(tensors, rank, tag)

    def refuse() -> None:
        raise fault("no lane for this")

    def make(store: Any, rank: int, home: Any, address: str) -> Any:
        made.append(Fails(store, rank, home, address))
        return made[-1]

    homes = [host_home() for _ in range(3)]
    # The side that was refused ends its lane, and gloo, which stands for NCCL, may then not have made the other side's yet.
    with pytest.raises((ChannelError, DeviceError), match=r"no lane for this|Connection closed by peer"):
        open_links(("a", "b"), (homes[:2], homes[2:] * 2), make)
    for thread in threading.enumerate():
        if thread.name == "crossfade-nccl-abort":
            thread.join(30)
    assert len(made) in (3, 4)  # who is first ends its second one while the other side still makes its own
    assert {group.ended for group in made} == {"abort"}
    for home in homes:
        home.streams.close()
        home.pool.close()
        assert home.driver.ledger.held() == []


def test_transfers_are_recorded_where_somebody_asks_and_else_nothing_is_enqueued_for_it() -> None:
    spans: list[tuple[str, int | None, int]] = []

    def record(name: str) -> Any:
        def begin(stream: int, execution: int | None = None) -> Any:
            return lambda size_bytes: spans.append((name, execution, size_bytes))

        return begin

    with open_nccl(2, 1) as (pair, writer, (reader,)):
        ends = (("send", writer), ("recv", reader))
        assert pair.write(torch.ones(3))
        assert same(pair.read()[0], torch.ones(3))
        assert spans == []
        for name, end in ends:
            end.carrier.recorded[0].around = record(name)
        for value in ("text", [torch.ones(3), torch.arange(5), torch.empty(0)], torch.ones(2)):
            assert pair.write(value)
            assert same(pair.read()[0], value)
        assert spans == [("send", None, 52), ("recv", 2, 52), ("send", None, 8), ("recv", 3, 8)]
        assert pair.write(torch.ones(4))  # received when the channel closes, which nobody records
    assert spans[4:] == [("send", None, 16)]


@pytest.fixture
def parties(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, DeviceEnds]]:
    """A writer and a reader that have not met."""
    monkeypatch.setattr(nccl_link, "nccl_group", StandIn)
    given = InputNode()
    made = call(actor("A", 0), "make", given).with_tensor_transport(Transport.NCCL)
    plan = compiled(call(actor("B", 1), "take", made), overlap=False)
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
