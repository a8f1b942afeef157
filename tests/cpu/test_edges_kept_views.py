"""Views on values: they stay valid as long as they are kept, wherever they die, and never stop a graph."""

from __future__ import annotations

import gc
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import crossfade
from tests.helpers.programs import python
from tests.helpers.sessions import TORCH
from tests.helpers.threads import together

pytestmark = pytest.mark.timeout(60)

SIZE = 2000


class Keeper:
    """Makes arrays, and keeps what it is given."""

    def __init__(self) -> None:
        self._kept: list[Any] = []

    def make(self, number: int) -> Any:
        return np.full(SIZE, number)

    def make_tensor(self, number: int) -> Any:
        import torch

        return torch.full((SIZE,), number)

    def keep(self, value: Any) -> Any:
        self._kept.append(value)
        return value

    def check(self) -> list[bool]:
        """Whether each kept value is what it was, by its place."""
        return [bool((value == number).all()) for number, value in enumerate(self._kept)]

    def drop_in_a_thread(self) -> None:
        thread = threading.Thread(target=self._kept.clear)
        thread.start()
        thread.join()


@pytest.fixture(scope="module")
def keepers() -> Iterator[tuple[Any, Any]]:
    """Two actors of one session, which the last test that uses them ends."""
    crossfade.init(preload=TORCH)
    actor = crossfade.remote(Keeper)
    yield actor.remote(), actor.remote()
    crossfade.shutdown()


def _is(value: Any, number: int) -> bool:
    return len(value) == SIZE and bool((value == number).all())


@pytest.mark.parametrize("method", ["make", "make_tensor"])
@pytest.mark.parametrize("transport", ["shm", "gloo"])
@pytest.mark.parametrize("depth", [1, 4])
def test_thousands_of_kept_values_stay_valid(keepers: Any, method: str, transport: str, depth: int) -> None:
    if "gloo" in transport or "tensor" in method:
        pytest.importorskip("torch")
    first, second = keepers
    second.drop_in_a_thread.remote().get()
    num_values = 2000 if (transport, method) == ("shm", "make") else 300
    made = getattr(first, method).bind(crossfade.InputNode()).with_tensor_transport(transport)
    with second.keep.bind(made).compile(max_inflight=depth) as graph:
        kept = [graph.execute(number).get(timeout=30) for number in range(num_values)]
        assert second.check.remote().get() == [True] * num_values
    assert all(_is(value, number) for number, value in enumerate(kept))
    assert second.check.remote().get() == [True] * num_values


def test_views_that_die_in_other_threads(keepers: Any) -> None:
    first, second = keepers
    with second.keep.bind(first.make.bind(crossfade.InputNode())).compile(max_inflight=3) as graph:
        second.drop_in_a_thread.remote().get()
        for turn in range(20):
            kept = [graph.execute(number).get(timeout=30) for number in range(10)]
            assert all(_is(value, number) for number, value in enumerate(kept))
            together(lambda _, kept=kept: kept.pop(), range(len(kept)))  # type: ignore[misc]
            second.drop_in_a_thread.remote().get()
            assert not kept, turn


def test_views_of_views_keep_the_value(keepers: Any) -> None:
    first, _ = keepers
    with first.make.bind(crossfade.InputNode()).compile(max_inflight=1) as graph:
        parts = [memoryview(graph.execute(number).get()[10:][::2])[:5] for number in range(100)]
        assert [part.tolist() for part in parts] == [[number] * 5 for number in range(100)]


def test_a_view_in_a_cycle_of_garbage_is_whole_until_it_is_gone(keepers: Any) -> None:
    """Finalizers may still look at what the garbage collector takes away."""
    first, _ = keepers
    seen: list[bool] = []

    class Holder:
        def __init__(self, value: Any) -> None:
            self.me, self.value, self.view = self, value, memoryview(value)

        def __del__(self) -> None:
            seen.append(_is(self.value, 5) and self.view[7] == 5)

    with first.make.bind(crossfade.InputNode()).compile(max_inflight=1) as graph:
        Holder(graph.execute(5).get())
        for number in range(6, 10):
            graph.execute(number).get()
    del graph
    gc.collect()
    assert seen == [True]


def test_views_outlive_the_graph_the_session_and_die_after_them(keepers: Any) -> None:
    first, second = keepers
    second.drop_in_a_thread.remote().get()
    output = second.keep.bind(first.make.bind(crossfade.InputNode()))
    graph = output.compile(max_inflight=2)
    before = [graph.execute(number).get() for number in range(5)]
    graph.teardown()
    assert all(_is(value, number) for number, value in enumerate(before))
    assert second.check.remote().get() == [True] * 5
    with output.compile(max_inflight=2) as again:
        after = [again.execute(number).get() for number in range(5)]
        del before[::2]
        after += [again.execute(number).get() for number in range(5, 9)]
    crossfade.shutdown()
    del graph, again, output
    gc.collect()
    assert all(_is(value, number) for number, value in enumerate(after))
    assert [int(value[0]) for value in before] == [1, 3]
    del after, before


AT_EXIT = """
import atexit, threading, numpy as np, crossfade
{torch}
@crossfade.remote
class Maker:
    def make(self, number): return {value}
maker = Maker.remote()
graph = maker.make.bind(crossfade.InputNode()).compile(max_inflight=2)
kept = [graph.execute(number).get() for number in range(6)]
class Last:
    def __init__(self, value): self.value = value
    def __del__(self): print("last", float(self.value[0]), flush=True)
last = Last(graph.execute(6).get())
last.me = last
atexit.register(lambda: print([float(value[-1]) for value in kept]))
{ending}
"""


ENDINGS = ["", "graph.teardown()", "crossfade.shutdown()", "del graph"]


def _end(ending: str, is_tensor: bool) -> subprocess.CompletedProcess[str]:
    value = "torch.full((5000,), float(number))" if is_tensor else "np.full(5000, number)"
    code = AT_EXIT.format(torch="import torch" if is_tensor else "", value=value, ending=ending)
    return python("-c", code, timeout_s=110)


@pytest.mark.timeout(240)
@pytest.mark.parametrize(("is_tensor", "endings"), [(False, ENDINGS), (True, ["", "graph.teardown()"])])
def test_views_at_the_end_of_the_interpreter(is_tensor: bool, endings: list[str]) -> None:
    if is_tensor:
        pytest.importorskip("torch")
    with ThreadPoolExecutor(2) as pool:
        ends = dict(zip(endings, pool.map(_end, endings, [is_tensor] * len(endings)), strict=True))
    for ending, done in ends.items():
        assert (done.returncode, done.stderr) == (0, ""), ending
        assert done.stdout.splitlines()[0] == "[0.0, 1.0, 2.0, 3.0, 4.0, 5.0]", ending
