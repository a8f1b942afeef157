"""The table of `crossfade.edges.life`, over all orders of events."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import product

import pytest

from crossfade.edges.life import TABLE, Action, Event, Life, State

NUM_EVENTS = 6
END = {State.RELEASED, State.LOST}


def lives() -> Iterator[list[tuple[State, Event, State, tuple[Action, ...]]]]:
    """What each order of events makes of a life, step by step."""
    for events in product(Event, repeat=NUM_EVENTS):
        life, steps = Life(), []
        for event in events:
            before = life.state
            actions = life.on(event)
            steps.append((before, event, life.state, actions))
        yield steps


@pytest.fixture(scope="module")
def all_lives() -> list[list[tuple[State, Event, State, tuple[Action, ...]]]]:
    found = list(lives())
    assert len(found) == len(Event) ** NUM_EVENTS
    return found


def test_every_state_is_reached_and_every_one_has_a_way_to_an_end() -> None:
    arrows = {(before, after) for (before, _), (after, _) in TABLE.items()}
    reached, ends = {State.OPEN}, set(END)
    for _ in State:
        reached |= {after for before, after in arrows if before in reached}
        ends |= {before for before, after in arrows if after in ends}
    assert reached == ends == set(State)


def test_nothing_is_released_before_it_was_closed_drained_and_unreferenced(all_lives: list) -> None:  # type: ignore[type-arg]
    for steps in all_lives:
        events = [event for _, event, _, _ in steps]
        actions = Counter(action for *_, done in steps for action in done)
        assert actions[Action.RELEASE] <= 1
        if actions[Action.RELEASE]:
            released = next(at for at, (*_, done) in enumerate(steps) if Action.RELEASE in done)
            closed = events.index(Event.CLOSE)
            drained = closed + events[closed:].index(Event.DRAINED)
            assert closed < drained < released
            assert events[released] is Event.UNREFERENCED
            assert Event.DEVICE_FAILED not in events[closed:drained]


def test_it_drains_once_and_notifies_only_where_it_cannot(all_lives: list) -> None:  # type: ignore[type-arg]
    for steps in all_lives:
        actions = Counter(action for *_, done in steps for action in done)
        assert actions[Action.DRAIN] == (Event.CLOSE in [event for _, event, _, _ in steps])
        assert actions[Action.NOTIFY] == (steps[-1][2] is State.LOST)
        assert not (actions[Action.NOTIFY] and actions[Action.RELEASE])


def test_every_death_is_passed_on_as_long_as_there_is_something_to_tell(all_lives: list) -> None:  # type: ignore[type-arg]
    for steps in all_lives:
        for before, event, _, actions in steps:
            if event is Event.PEER_DIED:
                assert actions == (() if before in END else (Action.MUTE, Action.REFUSE))
            else:
                assert Action.MUTE not in actions


def test_a_life_that_has_ended_stays_so_and_asks_for_nothing(all_lives: list) -> None:  # type: ignore[type-arg]
    for steps in all_lives:
        for before, _, after, actions in steps:
            if before in END:
                assert (after, actions) == (before, ())


def test_it_never_goes_back(all_lives: list) -> None:  # type: ignore[type-arg]
    order = [State.OPEN, State.BROKEN, State.CLOSING, State.DRAINED, State.RELEASED]
    for steps in all_lives:
        for before, _, after, _ in steps:
            assert after is State.LOST or order.index(after) >= order.index(before)
