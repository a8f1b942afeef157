"""What processes of several hosts tell each other, all of them in one process, over loopback."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from crossfade.host.bulletin import Bulletin, FarAlive
from tests.helpers.threads import together
from tests.helpers.wires import stream_pair

_LIMIT_S = 20.0


@contextmanager
def _bulletins(names: str) -> Iterator[dict[str, Bulletin]]:
    made = {name: Bulletin(name, "127.0.0.1", names.replace(name, "")) for name in names}
    for place, one in enumerate(names):
        for other in names[place + 1 :]:
            for name, peer, stream in zip((one, other), (other, one), stream_pair(), strict=True):
                made[name].connect(peer, stream)
    for bulletin in made.values():
        bulletin.await_peers(_LIMIT_S)
    yield made
    for bulletin in made.values():
        bulletin.close()


def test_what_one_puts_all_have() -> None:
    with _bulletins("abc") as made:

        def exchange(name: str) -> list[bytes]:
            made[name].put(name, name.encode() * 1000)
            return [made[name].get(key, _LIMIT_S) for key in "abc"]

        assert together(exchange, "abc") == [[key.encode() * 1000 for key in "abc"]] * 3


def test_notices_come_in_the_order_of_the_one_who_tells_also_those_from_before() -> None:
    with _bulletins("ab") as made:
        heard: list[tuple[str, bytes]] = []
        is_over = threading.Event()

        def hear(peer: str, notice: bytes) -> None:
            heard.append((peer, notice))
            if notice == b"19":
                is_over.set()

        for number in range(10):
            made["a"].tell("topic", b"%d" % number)
        made["a"].put("told", b"")
        made["b"].get("told", _LIMIT_S)
        made["b"].listen("topic", hear)
        for number in range(10, 20):
            made["a"].tell("topic", b"%d" % number)
        assert is_over.wait(_LIMIT_S)
        assert heard == [("a", b"%d" % number) for number in range(20)]


def test_a_peer_that_leaves_ends_waits_and_is_known_to_be_gone() -> None:
    with _bulletins("abc") as made:
        alive, lost = FarAlive(made["a"], "b"), list[str]()
        for bulletin in made.values():
            bulletin.on_lost = lost.append
        assert alive.check() == []
        made["b"].close()
        assert alive.check(_LIMIT_S) == ["b"]
        assert FarAlive(made["a"], "c").check() == []
        with pytest.raises(ConnectionError, match="b cannot be reached"):
            made["a"].get("never", _LIMIT_S)
        made["a"].tell("topic", b"to those who are left")
        made["c"].put("key", b"value")
        assert made["c"].has(["key"])
        assert not lost  # it has said so


def test_a_peer_whose_connection_ends_is_lost() -> None:
    with _bulletins("ab") as made:
        is_lost = threading.Event()
        made["a"].on_lost = lambda peer: is_lost.set()
        made["b"]._streams["a"].end()
        assert is_lost.wait(_LIMIT_S)
        assert FarAlive(made["a"], "b").check() == ["b"]


def test_who_does_not_come_is_waited_for_no_longer_than_was_said() -> None:
    alone = Bulletin("a", "127.0.0.1", "b")
    with pytest.raises(TimeoutError, match="one of b did not connect within 0 s"):
        alone.await_peers(0.05)
    alone.close()
