"""Who has to be asked about before a value is published, and asking the system."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from crossfade.host.processes import Alive, await_end, open_pidfd
from crossfade.plan.plan import ChannelSpec, CollectiveSpec, Plan
from crossfade.plan.upstream import upstream
from crossfade.types import DRIVER, CollectiveKind, ReduceOp, Transport

DEVICE, HOST = Transport.GLOO, Transport.SHM


def plan_of(*edges: tuple[str, str, Transport], together: tuple[str, ...] = ()) -> Plan:
    """A plan with these channels (writer, readers parted by blanks, transport), and perhaps a collective on devices."""
    channels = [
        ChannelSpec(f"n{i}", f"n{i}", writer, tuple(readers.split()), transport, 2)
        for i, (writer, readers, transport) in enumerate(edges)
    ]
    kind, each = CollectiveKind.ALLREDUCE, tuple(() for _ in together)
    collective = CollectiveSpec("c0", kind, ReduceOp.SUM, 0, DEVICE, together, each, each)
    return Plan((), (), tuple(channels), {}, (), False, 1, (collective,) if together else ())


def is_device(spec: ChannelSpec | CollectiveSpec) -> bool:
    return spec.transport is DEVICE


def found(plan: Plan, party: str) -> str:
    return " ".join(sorted(upstream(plan, party, is_device)))


def test_device_data_come_through_others() -> None:
    plan = plan_of((DRIVER, "A", HOST), ("A", "B", DEVICE), ("B", "C", DEVICE), ("C", DRIVER, HOST))
    assert [found(plan, party) for party in (DRIVER, "A", "B", "C")] == ["", "", "A", "A B"]


def test_a_host_on_the_way_ends_it() -> None:
    plan = plan_of(("A", "B", DEVICE), ("B", "C", HOST), ("C", "D", DEVICE))
    assert found(plan, "D") == "C"


def test_every_reader_and_every_way_counts() -> None:
    plan = plan_of(("A", "C D", DEVICE), ("B", "C", DEVICE), ("C", "E", DEVICE), ("D", "E", DEVICE), ("E", "F", HOST))
    assert found(plan, "E") == "A B C D"
    assert found(plan, "D") == "A"
    assert found(plan, "F") == ""


def test_a_circle_comes_to_an_end_and_nobody_is_his_own_peer() -> None:
    plan = plan_of(("A", "B", DEVICE), ("B", "A C", DEVICE))
    assert [found(plan, party) for party in "ABC"] == ["B", "A", "A B"]


def test_in_a_collective_everybody_s_data_reach_everybody() -> None:
    plan = plan_of(("A", "B", DEVICE), ("C", "D", DEVICE), together=("B", "C"))
    assert found(plan, "B") == "A C"
    assert found(plan, "D") == "A B C"
    assert upstream(plan, "D", lambda spec: isinstance(spec, ChannelSpec) and is_device(spec)) == {"C"}


@contextmanager
def process() -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """A process that waits, and its descriptor."""
    popen = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    pidfd = open_pidfd(popen.pid)
    try:
        yield popen, pidfd
    finally:
        popen.kill()
        popen.communicate()
        os.close(pidfd)


@pytest.mark.timeout(20)
def test_the_dead_are_named_without_waiting() -> None:
    with process() as (first, first_fd), process() as (second, second_fd):
        alive = Alive({"b": first_fd, "a": second_fd})
        assert alive.check() == []
        first.kill()
        assert await_end(first_fd, 10)
        assert alive.check() == ["b"]
        second.kill()
        assert await_end(second_fd, 10)
        assert alive.check() == alive.check() == ["a", "b"]
        alive.close()
        alive.close()
        assert alive.check() == []


@pytest.mark.timeout(20)
def test_a_descriptor_that_its_owner_closes_hides_no_death() -> None:
    with process() as (popen, pidfd):
        own = os.dup(pidfd)
        alive = Alive({"a": own})
        os.close(own)
        assert alive.check() == []
        popen.kill()
        assert await_end(pidfd, 10)
        assert alive.check() == ["a"]
        alive.close()


@pytest.mark.timeout(20)
def test_who_asks_while_it_is_being_closed_hears_of_nobody() -> None:
    """A publisher's thread may be about to look; the descriptors that it would look at may be others' by then."""
    with process() as (popen, pidfd):
        alive = Alive({"a": pidfd})
        popen.kill()
        assert await_end(pidfd, 10)
        closer = threading.Thread(target=alive.close)
        poll = alive._poll

        def close_first(timeout_ms: float | None = None, /) -> list[tuple[int, int]]:
            closer.start()
            closer.join(0.1)
            return poll(timeout_ms)

        alive._poll = close_first
        assert alive.check() == ["a"]
        closer.join(10)
        assert alive.check() == []


def test_where_there_is_nobody_to_ask_about_nothing_is_asked() -> None:
    alive = Alive({})
    assert alive.check() == []
    alive.close()
