"""Which of an actor's plans are looked at in a turn of its loop."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from crossfade.engines.actor import Actor
from crossfade.errors import ChannelBroken
from tests.helpers.builds import interpreted_only

pytestmark = interpreted_only("an actor without its process is made of parts")


class Stands:
    """A cursor that cannot move."""

    action = None

    def __init__(self, *, is_idle: bool, error: Exception | None = None) -> None:
        self.num_looks = 0
        self._is_idle = is_idle
        self._error = error

    def is_idle(self) -> bool:
        return self._is_idle

    def advance(self) -> bool:
        self.num_looks += 1
        if self._error is not None:
            raise self._error
        return False


class Moves(Stands):
    """One that always can."""

    def advance(self) -> bool:
        super().advance()
        return True


def turn(*cursors: Stands) -> tuple[bool, list[Any]]:
    actor: Any = object.__new__(Actor)
    actor._running = [SimpleNamespace(cursor=cursor, plan=None, fault="") for cursor in cursors]
    actor._devices, actor._num_turns, actor._wires = None, 0, {}
    actor._doorbell = SimpleNamespace(flags=bytearray(2))
    actor._look_around = lambda: False
    return actor._turn(), actor._running


def test_the_end_of_a_channel_is_seen_beside_a_plan_that_waits_for_room() -> None:
    """The doorbell rings once for it, and what has no quick look would hide what has one."""
    waits, ended = Stands(is_idle=False), Stands(is_idle=True, error=ChannelBroken("the other side closed it"))
    has_moved, parts = turn(waits, ended)
    assert not has_moved
    assert parts[1].fault == "the other side closed it"
    assert waits.num_looks == 1


def test_who_has_nothing_to_do_costs_nothing_beside_one_that_moves() -> None:
    moves, idle = Moves(is_idle=False), Stands(is_idle=True)
    assert turn(moves, idle)[0]
    assert (moves.num_looks, idle.num_looks) == (1, 0)


def test_all_are_looked_at_once_where_none_seems_to_have_anything_to_do() -> None:
    cursors = [Stands(is_idle=True), Stands(is_idle=True)]
    assert not turn(*cursors)[0]
    assert [cursor.num_looks for cursor in cursors] == [1, 1]
