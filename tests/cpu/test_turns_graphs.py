"""Graphs in which several actors push into one, between processes: they give what they would give without turns, and never stop."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings

torch: Any = pytest.importorskip("torch")

import crossfade  # noqa: E402
from crossfade.edges.turns import TurnRules, Turns  # noqa: E402
from crossfade.engines import device_turns  # noqa: E402
from crossfade.plan.turns import predecessors  # noqa: E402
from tests.helpers.calm import calm_s  # noqa: E402
from tests.helpers.counts import num  # noqa: E402
from tests.helpers.footprint import check_growth  # noqa: E402
from tests.helpers.graphs import (  # noqa: E402
    TENSOR_KINDS,
    TENSOR_METHODS,
    Benches,
    GraphDraw,
    check_engines_agree,
    graph_draws,
    open_benches,
)
from tests.helpers.sessions import TORCH, opened  # noqa: E402
from tests.helpers.tensor_workers import TensorWorker  # noqa: E402

LINK_GBS = 0.04
"""A push of 40 KB is held for a millisecond at most, one of 8 MB for 0.2 s."""


class CountedTurns(Turns):
    """Counts the values of this process that were held, each once however often it was tried."""

    num_held = 0
    book = ""
    """A file that gets a byte for each value that goes, if there is one: who looks there wakes nobody, as a call would."""

    _last_held = 0

    def must_hold(self, number: int, lane_bytes: Any) -> bool:
        is_held = super().must_hold(number, lane_bytes)
        if is_held and number != self._last_held:
            self._last_held = number  # values are asked for in their order
            CountedTurns.num_held += 1
        return is_held

    def tell(self, number: int) -> None:
        super().tell(number)
        if CountedTurns.book:
            with open(CountedTurns.book, "ab") as book:
                book.write(b".")


class TurnWorker(TensorWorker):
    """As its base; all that it pushes waits for its turn."""

    def __init__(self) -> None:
        vars(device_turns).update(_RULES=TurnRules(1, LINK_GBS), Turns=CountedTurns)
        super().__init__()

    def num_held(self) -> int:
        """How many of its values were held until now."""
        return CountedTurns.num_held

    def keep_book(self, path: str) -> None:
        """From now on; not at all where the path is empty."""
        CountedTurns.book = path

    def pid(self) -> int:
        return os.getpid()

    def fill(self, number: int, size: int = 5_000, pipe: str = "") -> Any:
        """Many times one number; once somebody has opened and closed the named pipe, if there is one."""
        if pipe:
            with open(pipe) as file:
                file.read()
        return torch.full((size,), number)

    def pass_on(self, value: Any) -> Any:
        return value + 1

    def firsts(self, *values: Any) -> list[int]:
        return [int(value[0]) for value in values]


torch.set_num_threads(1)


@pytest.fixture(scope="module")
def benches() -> Iterator[Benches]:
    with pytest.MonkeyPatch.context() as patch:  # the inline engine's actors live in this process
        for name in ("_RULES", "Turns"):
            patch.setattr(device_turns, name, getattr(device_turns, name))
        with open_benches(TurnWorker, TORCH) as both:
            yield both


DRAWS = graph_draws(transports=("copy",), kinds=TENSOR_KINDS, methods=TENSOR_METHODS, most_depth=4)
SHORT_DRAWS = graph_draws(
    transports=("copy",), with_large=False, kinds=TENSOR_KINDS, methods=TENSOR_METHODS, most_depth=4
)


@pytest.mark.timeout(num(600, 3600))
@settings(max_examples=num(14, 600))
@given(draw=DRAWS)
def test_random_graphs_give_the_same_with_turns_as_inline(benches: Benches, draw: GraphDraw) -> None:
    check_engines_agree(benches, [draw])


@pytest.mark.timeout(num(600, 3600))
@settings(max_examples=num(10, 300))
@given(one=SHORT_DRAWS, other=SHORT_DRAWS)
def test_two_random_graphs_on_the_same_actors(benches: Benches, one: GraphDraw, other: GraphDraw) -> None:
    check_engines_agree(benches, [one, other])


session = opened("module", preload=TORCH)


Remote: Any = crossfade.remote(TurnWorker)


@pytest.fixture(scope="module")
def actors(session: None) -> list[Any]:
    return [Remote.remote() for _ in range(4)]


def fan_in(actors: list[Any], *, size: int = 5_000, pipe: str = "", **options: Any) -> Any:
    """The last actor uses what the others make, in their order; the first of them waits for the pipe."""
    *senders, receiver = actors
    with crossfade.InputNode() as number:
        made = [
            sender.fill.bind(number, size, pipe if sender is senders[0] else "").with_tensor_transport("copy")
            for sender in senders
        ]
        return receiver.firsts.bind(*made).compile(**options)


@pytest.mark.parametrize("options", [{}, {"max_inflight": 1}, {"overlap": True}], ids=str)
def test_orders_of_turns_that_cross_in_two_graphs(actors: list[Any], options: dict[str, Any]) -> None:
    graphs = [fan_in(actors, **options), fan_in([*actors[2::-1], actors[3]], **options)]
    assert all(len(predecessors(graph.plan)) == 2 for graph in graphs)
    refs: list[Any] = []
    for number in range(60):
        refs += [(number, graph.execute(number)) for graph in graphs]
        while len(refs) > 2 * (graphs[0].plan.max_inflight - 1):
            expected, ref = refs.pop(0)
            assert ref.get(timeout=30) == [expected] * 3
    for expected, ref in refs:
        assert ref.get(timeout=30) == [expected] * 3
    for graph in graphs:
        graph.teardown(timeout=30)


def test_who_is_late_holds_the_others_up_for_their_own_time_only(actors: list[Any], pipe: Path, tmp_path: Path) -> None:
    """The first waits until both others went: the second is held for the 8 ms that 320 KB take here, and goes though nobody
    rings; the third is held until then, or comes after it.
    """
    books = [tmp_path / "second", tmp_path / "third"]
    for actor, book in zip(actors[1:3], books, strict=True):
        book.touch()
        crossfade.get(actor.keep_book.remote(str(book)))
    before = crossfade.get(actors[1].num_held.remote())
    graph = fan_in(actors, size=40_000, pipe=str(pipe))
    for number in range(1, 6):
        ref = graph.execute(number)
        while any(book.stat().st_size < number for book in books):
            time.sleep(0.001)
        pipe.write_text("")
        assert ref.get(timeout=30) == [number] * 3
    assert crossfade.get(actors[1].num_held.remote()) - before == 5
    assert [book.stat().st_size for book in books] == [5, 5]
    for actor in actors[1:3]:
        crossfade.get(actor.keep_book.remote(""))
    graph.teardown(timeout=30)


def test_a_writer_whose_value_only_comes_after_this_ones_is_not_waited_for(actors: list[Any]) -> None:
    """A writes y for R and x for B, which makes of x what R uses first: y must not wait for that."""
    a, b, r = actors[:3]
    with crossfade.InputNode() as number:
        y = a.fill.bind(number).with_tensor_transport("copy")
        x = a.fill.bind(number).with_tensor_transport("copy")
        z = b.pass_on.bind(x).with_tensor_transport("copy")
        graph = r.firsts.bind(z, y).compile()
    assert predecessors(graph.plan) == {}
    assert graph.execute(3).get(timeout=30) == [4, 3]
    graph.teardown(timeout=30)


def test_graphs_with_turns_that_come_and_go_leave_nothing(actors: list[Any]) -> None:
    def cycle(num: int) -> None:
        for number in range(num):
            graph = fan_in(actors)
            assert graph.execute(number).get(timeout=30) == [number] * 3
            graph.teardown(timeout=30)

    pids = [os.getpid(), *(crossfade.get(actor.pid.remote()) for actor in actors)]
    check_growth(cycle, pids)


def get_all(graph: Any, refs: list[Any]) -> None:
    for ref in refs:
        ref.get(timeout=30)
    graph.execute(1).get(timeout=30)


@pytest.mark.parametrize("victim", [0, 1, 3])
def test_a_death_among_those_who_take_turns_ends_the_graph_and_nobody_else(actors: list[Any], victim: int) -> None:
    mortal, left = Remote.options(name=f"turn{victim}").remote(), actors[:3]
    graph = fan_in([*left[:victim], mortal, *left[victim:]], size=100_000)
    assert graph.execute(1).get(timeout=30) == [1] * 3
    refs = [graph.execute(number) for number in range(graph.plan.max_inflight)]
    os.kill(crossfade.get(mortal.pid.remote()), signal.SIGKILL)
    begin = calm_s()
    with pytest.raises(crossfade.ActorDiedError, match=f"turn{victim}"):
        get_all(graph, refs)
    assert calm_s() - begin < 5
    graph.teardown(timeout=30)
    again = fan_in(left)
    assert again.execute(2).get(timeout=30) == [2] * 2
    again.teardown(timeout=30)
