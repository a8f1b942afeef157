"""What users do that cannot be, on both engines: errors of rare kinds, actors that exit, arguments that are refused."""

from __future__ import annotations

import asyncio
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest

import crossfade
from crossfade.plan.parse import parse_plan
from tests.helpers import handlers
from tests.helpers.sessions import NUMPY, on_each_engine, opened

engine = on_each_engine(preload=NUMPY)
local = opened(preload=NUMPY)


class Worker(handlers.Worker):
    def added(self, weights: Any, value: Any) -> float:
        return float(weights.sum() + value)

    def fail_because(self, value: Any) -> None:
        raise RuntimeError("it failed") from ValueError(value)

    def fail_twice(self, value: Any) -> None:
        raise ExceptionGroup("both", [ValueError(value), TypeError(value)])

    def cancel(self, value: Any) -> None:
        raise asyncio.CancelledError(value)


Remote = crossfade.remote(Worker)


class Interrupting:
    def interrupt_at(self, number: int) -> int:
        if number == 1:
            raise KeyboardInterrupt("my own")
        return number


class Leaver:
    def __init__(self, is_short: bool = False) -> None:
        if is_short:
            sys.exit("not even begun")

    def leave_at(self, number: int) -> int:
        if number == 1:
            sys.exit(3)
        return number


def not_made() -> None:
    raise ZeroDivisionError("as it does here")


class NotMade:
    def __reduce__(self) -> Any:
        return not_made, ()


@pytest.mark.parametrize("name", ["fail_because", "fail_twice"])
def test_errors_with_causes_and_groups_show_the_actor_s_traceback(engine: str, name: str) -> None:
    with pytest.raises(crossfade.TaskError, match=r"Traceback on the actor:(.|\n)*in " + name):
        getattr(Remote.remote(), name).remote("x").get()


def test_a_cancelled_error_is_a_task_error(engine: str) -> None:
    with pytest.raises(crossfade.TaskError, match="CancelledError"):
        Remote.remote().cancel.remote("x").get()


def test_flags_and_options_that_are_none_are_refused(engine: str) -> None:
    worker = Remote.remote()
    graph = worker.same.bind(crossfade.InputNode()).compile()
    with pytest.raises(TypeError, match=r"^kill_actors is 5\nhint: teardown\(timeout=5\)$"):
        graph.teardown(5)
    with pytest.raises(TypeError, match=r"^kill_actors is None\nhint: it is True or False$"):
        graph.teardown(kill_actors=None)
    assert "same" in graph.visualize("unused", "ascii", False, True)
    with pytest.raises(TypeError, match=r"^unknown option of visualize 'formt'\nhint: did you mean 'format'\?"):
        graph.visualize(formt="ascii")
    assert graph.execute(1).get() == 1
    graph.teardown(True)
    with pytest.raises(crossfade.ActorDiedError):
        worker.same.remote(1).get()


def test_an_actor_says_when_it_is_made(engine: str) -> None:
    made, left = Remote.remote(), crossfade.remote(Leaver).remote(is_short=True)
    assert crossfade.get([made.__ray_ready__.remote(), made.__ray_ready__.remote()]) == [True, True]
    with pytest.raises(crossfade.ActorStartError):
        left.__ray_ready__.remote().get()
    with pytest.raises(AttributeError, match=r"__ray_ready__ is no method for graphs\nhint: __ray_ready__.remote\(\)"):
        made.__ray_ready__.bind()
    for name, hint in (
        ("__ray_call__", "make it a method"),
        ("__ray_terminate__", r"crossfade.kill\(actor\)"),
        ("__ray_checkpoint__", "of Ray's own methods actors have __ray_ready__"),
    ):
        with pytest.raises(AttributeError, match=rf"^actor Worker0 has no {name}\nhint: {hint}"):
            getattr(made, name)


def test_a_method_that_exits_ends_its_actor(engine: str) -> None:
    leavers = crossfade.remote(Leaver)
    leaver, calls = leavers.remote(), leavers.remote()
    graph = leaver.leave_at.bind(crossfade.InputNode()).compile()
    refs = [graph.execute(number) for number in range(2)]
    assert refs[0].get() == 0
    for _ in range(2):
        with pytest.raises(crossfade.ActorDiedError, match="exited with code 3"):
            refs[1].get()
    with pytest.raises(crossfade.ActorDiedError, match="exited with code 3"):
        leaver.leave_at.remote(0).get()
    for _ in range(2):
        with pytest.raises(crossfade.ActorDiedError, match="exited with code 3"):
            calls.leave_at.remote(1).get()
    with pytest.raises(crossfade.ActorStartError):
        leavers.remote(is_short=True).leave_at.remote(0).get()


def test_a_method_that_raises_an_interrupt_of_its_own_is_like_any_other(local: None) -> None:
    actor = crossfade.remote(Interrupting).remote()
    graph = actor.interrupt_at.bind(crossfade.InputNode()).compile()
    refs = [graph.execute(number) for number in range(3)]
    assert (refs[0].get(), refs[2].get()) == (0, 2)
    for ref in (refs[1], actor.interrupt_at.remote(1)):
        with pytest.raises(crossfade.TaskError, match=r"interrupt_at.*raised KeyboardInterrupt: my own"):
            ref.get()


@pytest.mark.parametrize("engine", ["local"], indirect=True)
def test_what_is_bound_and_cannot_be_made_at_its_actor_is_said(engine: str) -> None:
    actor = Remote.remote()
    node = actor.added.bind(NotMade(), crossfade.InputNode())
    with pytest.raises(ZeroDivisionError, match="unpickling what was bound to its methods on actor"):
        node.compile()
    assert crossfade.get(actor.same.remote(3)) == 3


def test_a_time_limit_of_several_is_named_whole(local: None, pipe: Path) -> None:
    quick, slow = Remote.remote(), Remote.remote()
    graph = slow.until.bind(crossfade.InputNode()).compile()
    for start in (slow.until.remote, graph.execute):
        refs = [quick.slow.remote(0.1), start(str(pipe))]
        with pytest.raises(crossfade.GetTimeoutError, match=r"within 0\.3 s"):
            crossfade.get(refs, timeout=0.3)
        pipe.write_text("")
        assert crossfade.get(refs, timeout=60.0) == [0.1, None]


def test_an_actor_does_not_get_the_driver_s_name(engine: str) -> None:
    with pytest.raises(ValueError, match="driving process"):
        Remote.options(name="driver")
    long = Remote.options(name="x" * 400).remote()
    assert crossfade.get(long.same.remote(3)) == 3


def test_a_method_of_an_actor_cannot_be_sent(engine: str) -> None:
    actor = Remote.remote()
    with pytest.raises(TypeError, match=r"method same of actor .* cannot be sent"):
        pickle.dumps(actor.same)


def test_what_is_no_file_and_no_plan_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="open file"):
        crossfade.dump("somewhere.txt")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="text of a plan"):
        parse_plan(None)  # type: ignore[arg-type]
    with pytest.raises(FileNotFoundError, match=r"missing/a\.svg"):
        crossfade.Timeline("measured", ()).save(tmp_path / "missing" / "a.svg")
    crossfade.Timeline("measured", ()).save(tmp_path / ("a" * 250 + ".json"))


def test_options_of_methods_are_those_of_rays() -> None:
    def two(value: Any) -> Any:
        return value, value

    assert crossfade.method(num_returns=2, tensor_transport="nccl", concurrency_group="io")(two) is two
    with pytest.raises(
        TypeError, match=r"^unknown option of a method 'num_return'\nhint: did you mean 'num_returns'\?"
    ):
        crossfade.method(num_return=2)
    with pytest.raises(
        TypeError, match=r"(?s)^crossfade.method is given <function .*\nhint: write @crossfade.method\(num_returns=2\)"
    ):
        crossfade.method(two)


@pytest.mark.parametrize(
    ("asked", "error"), [("dynamic", TypeError), (2.0, TypeError), (True, TypeError), (0, ValueError)]
)
def test_numbers_of_returns_are_whole_numbers(asked: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"num_returns is .*\nhint: it is"):
        crossfade.method(num_returns=asked)
