"""A value that is changed after it was returned or passed: debug mode finds it, and names it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import crossfade
from tests.helpers.sessions import TORCH

pytestmark = pytest.mark.timeout(60)


class Sinner:
    """Changes what it should not."""

    def __init__(self) -> None:
        self._kept: Any = None
        self._buffer = np.zeros(3_000_000)

    def make(self, kind: str) -> Any:
        self._kept = _value(kind)
        return self._kept

    def change(self, *_: Any) -> int:
        _change(self._kept)
        return 1

    def change_given(self, value: Any) -> int:
        _change(value)
        return 1

    def look(self, value: Any) -> int:
        return 1

    def same(self, value: Any) -> Any:
        return value

    def both(self, a: Any, b: Any) -> tuple[str, str]:
        return type(a).__name__, type(b).__name__

    def reuse(self, number: int, begun: str, filled: str) -> Any:
        """Fills the buffer again when the reader has begun with value 0, and lets it go on when value 3 is in the buffer."""
        if number == 1:
            with open(begun, "w"):
                pass
        self._buffer[:] = number
        if number == 3:
            with open(filled, "w"):
                pass
        return self._buffer

    def first(self, value: Any, *pipes: str) -> float:
        if value[0] == 0:
            for pipe in pipes:
                with open(pipe):
                    pass
        return float(value[0])

    def unpicklable(self, _: Any) -> Any:
        return (n for n in range(3))

    def take_one(self, numbers: Any) -> int:
        return int(next(numbers))


Actor = crossfade.remote(Sinner)
KINDS = ["array", "large array", "bytearray", "list", "dict", "object", "tensor", "large tensor", "strided tensor"]


class Point:
    def __init__(self, x: int) -> None:
        self.x = x


def _value(kind: str) -> Any:
    if "tensor" in kind:
        torch: Any = pytest.importorskip("torch")
        tensor: Any = torch.zeros(100_000 if "large" in kind else 10, 2)
        return tensor[:, 1] if "strided" in kind else tensor
    makers: dict[str, Callable[[], Any]] = {
        "array": lambda: np.zeros(10),
        "large array": lambda: np.zeros(100_000),
        "bytearray": lambda: bytearray(10_000),
        "list": lambda: [1, [2, 3]],
        "dict": lambda: {"a": np.zeros(5000), "b": 1},
        "object": lambda: Point(1),
    }
    return makers[kind]()


def _change(value: Any) -> None:
    match value:
        case list():
            value[1].append(4)
        case dict():
            value["a"] = 5
        case Point():
            value.x += 1
        case _:
            value[3] = 1


def _error_of(ref: Any) -> BaseException | None:
    try:
        ref.get(timeout=30)
    except crossfade.MutatedValueError as error:
        return error
    return None


@pytest.fixture(params=["local", "inline"], scope="module")
def engine(request: pytest.FixtureRequest) -> Iterator[str]:
    crossfade.init(engine=request.param, preload=TORCH)
    yield request.param
    crossfade.shutdown()


@pytest.fixture(scope="module")
def actors(engine: str) -> tuple[Any, Any]:
    return Actor.remote(), Actor.remote()


@pytest.mark.parametrize("kind", KINDS)
def test_a_value_that_its_maker_changes_is_found_where_it_is_used_next(actors: Any, kind: str) -> None:
    actor = actors[0]
    with crossfade.InputNode() as inp:
        made = actor.make.bind(inp)
        changed = actor.change.bind(made)
        used = actor.both.bind(made, changed)
    with used.compile(debug=True) as graph:
        with pytest.raises(crossfade.MutatedValueError) as caught:
            graph.execute(kind).get()
        message = str(caught.value)
        assert "the value of Sinner0.make (node n0) was changed on actor Sinner0" in message
        assert "the start of Sinner0.change (node n1) and the start of Sinner0.both (node n2)" in message
        assert "in between ran Sinner0.change (node n1)" in message
        assert isinstance(caught.value, crossfade.TaskError)
        assert message.count("hint: ") == 1
        assert message.endswith(f"hint: {caught.value.hint}")


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "array" not in kind or kind == "bytearray"])
def test_a_value_that_its_reader_changes_is_found_when_it_is_let_go_of(actors: Any, kind: str) -> None:
    maker, reader = actors
    with reader.change_given.bind(maker.make.bind(crossfade.InputNode())).compile(debug=True) as graph:
        for _ in range(3):
            with pytest.raises(crossfade.MutatedValueError, match=r"node n0.* was changed on actor Sinner1") as caught:
                graph.execute(kind).get()
            assert "between the start of Sinner1.change_given (node n1) and its release" in str(caught.value)


def test_an_input_that_an_actor_changes_is_named_as_the_input(actors: Any) -> None:
    found = pytest.raises(crossfade.MutatedValueError, match=r"the graph's input \* \(i0\) was changed")
    with actors[0].change_given.bind(crossfade.InputNode()).compile(debug=True) as graph, found:
        graph.execute(bytearray(10)).get()


@pytest.mark.parametrize("kind", KINDS)
def test_values_that_nobody_changes_are_left_alone(actors: Any, kind: str) -> None:
    maker, reader = actors
    with crossfade.InputNode() as inp:
        made = maker.make.bind(inp)
        again = maker.same.bind(made)
        output = reader.both.bind(made, again)
    with output.compile(debug=True, record=True) as graph:
        for _ in range(5):
            one, other = graph.execute(kind).get()
            assert one == other


def test_a_method_that_does_not_run_since_its_value_was_changed_has_no_span(actors: Any) -> None:
    actor, _ = actors
    with crossfade.InputNode() as inp:
        made = actor.make.bind(inp)
        output = actor.both.bind(made, actor.change.bind(made))
    with output.compile(debug=True, record=True) as graph:
        with pytest.raises(crossfade.MutatedValueError):
            graph.execute("list").get()
        spans = graph.timeline().spans
    assert [span.what.split(".")[1] for span in spans if span.label.startswith("run ")] == ["make", "change"]


def test_a_value_that_cannot_be_pickled_may_stay_on_its_actor(actors: Any) -> None:
    actor = actors[0]
    with actor.take_one.bind(actor.unpicklable.bind(crossfade.InputNode())).compile(debug=True) as graph:
        assert graph.execute(1).get() == 0


def test_a_buffer_that_is_used_again_while_it_is_being_sent(engine: str, actors: Any, tmp_path: Path) -> None:
    """By gloo the memory is read in the background. While the reader is at value 0 it takes value 1 in and no more, so value 2 is
    still to be sent when the buffer is filled with value 3.
    """
    pytest.importorskip("torch")
    if engine == "inline":
        return  # values are copied at once there, so nothing is read in the background
    maker, reader = actors
    pipes = [str(tmp_path / name) for name in ("begun", "filled")]
    for pipe in pipes:
        os.mkfifo(pipe)
    made = maker.reuse.bind(crossfade.InputNode(), *pipes).with_tensor_transport("gloo")
    with reader.first.bind(made, *pipes).compile(debug=True, overlap=True) as graph:
        refs = [graph.execute(number) for number in range(4)]
        errors = [error for ref in refs if (error := _error_of(ref)) is not None]
    assert errors
    assert "the value of Sinner0.reuse (node n0), which was being sent, was changed on actor Sinner0" in str(errors[0])


def test_a_failure_passes_the_checks(actors: Any) -> None:
    actor = actors[0]
    with actor.look.bind(actor.first.bind(crossfade.InputNode())).compile(debug=True) as graph:
        with pytest.raises(TypeError):
            graph.execute(5).get()
        assert graph.execute([5]).get() == 1


@pytest.mark.parametrize(("value", "is_on"), [("1", True), ("0", False), ("", False)])
def test_the_environment_decides_where_the_caller_does_not(
    monkeypatch: pytest.MonkeyPatch, value: str, is_on: bool
) -> None:
    from crossfade.api.options import CompileOptions

    monkeypatch.setenv("CROSSFADE_DEBUG", value)
    assert CompileOptions.of({}).debug is is_on
    assert CompileOptions.of({"debug": not is_on}).debug is not is_on


def test_without_debug_nothing_watches(actors: Any) -> None:
    with actors[0].change_given.bind(crossfade.InputNode()).compile() as graph:
        assert graph.execute(bytearray(10)).get() == 1
