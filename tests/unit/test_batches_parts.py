"""Parts that take turns in one process: their order, their errors, and that nothing stops where that is unsafe."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import pytest

pytest.importorskip("torch", reason="batches are torch's")
pytest.importorskip("greenlet", reason="parts are greenlets: pip install crossfade[batches]")

import torch
from torch import Tensor

from crossfade.batches import yield_point
from crossfade.batches.carriers.process_groups import ProcessGroups
from crossfade.batches.coroutines.parts import Run, _size, current_part, why_atomic
from crossfade.batches.coroutines.thread_state import ThreadState
from crossfade.errors import BatchesError
from tests.helpers.parts import Doubling, interleave, switching


def test_parts_take_turns_in_one_order() -> None:
    seen = list[str]()

    def part(name: str, steps: int) -> Callable[[], str]:
        def call() -> str:
            for step in range(steps):
                seen.append(f"{name}{step}")
                yield_point()
            return name

        return call

    assert interleave(part("a", 3), part("b", 2), part("c", 1)) == ["a", "b", "c"]
    assert seen == ["a0", "b0", "c0", "a1", "b1", "a2"]


@contextmanager
def own_operator() -> Iterator[Callable[[Tensor], Tensor]]:
    with torch.library._scoped_library("crossfade_test", "DEF") as library:
        library.define("switching(Tensor x) -> Tensor")

        def doubled(x: Tensor) -> Tensor:
            yield_point()
            return x * 2

        library.impl("switching", doubled, "CompositeExplicitAutograd")
        yield torch.ops.crossfade_test.switching


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_nothing_stops_inside_an_operator(mode: Any) -> None:
    """A greenlet that is switched there ends the process."""
    with own_operator() as operator, mode():
        run = Run(ProcessGroups())
        outputs = run.go([lambda: operator(torch.ones(2)), lambda: operator(torch.ones(3))])
    assert [each.sum().item() for each in outputs] == [4.0, 6.0]
    assert [dict(part.atomic) for part in run.parts] == [{"inside an operator": 1}] * 2


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_a_dispatch_mode_that_stops_under_an_operator_is_atomic(mode: Any) -> None:
    def part() -> float:
        with Doubling():
            return float(torch.ops.aten.mul(torch.ones(2), 3.0).sum())

    with mode():
        assert interleave(part, part) == [6.0, 6.0]


def test_nothing_stops_in_a_backward_or_a_transform() -> None:
    weight = torch.ones(2, requires_grad=True)

    def backward() -> None:
        switching(weight * 2).sum().backward()  # type: ignore[no-untyped-call,unused-ignore]

    def transform() -> Tensor:
        def f(x: Tensor) -> Tensor:
            yield_point()
            return (x * x).sum()

        gradient: Tensor = torch.func.grad(f)(torch.ones(2))
        return gradient

    run = Run(ProcessGroups())
    _, gradient = run.go([backward, transform])
    assert weight.grad is not None
    assert weight.grad.tolist() == gradient.tolist() == [2.0, 2.0]
    assert run.parts[0].atomic == {"in a backward": 1}
    assert run.parts[1].atomic == {"in a function transform": 1}


def test_a_compiled_region_is_atomic() -> None:
    @torch.compile(backend="eager", fullgraph=False)
    def compiled(x: Tensor) -> Tensor:
        return x * 2 + 1

    def part() -> float:
        yield_point()
        return float(compiled(torch.ones(2)).sum())

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert interleave(part, part) == [6.0, 6.0]


def test_an_error_ends_the_other_parts_and_their_cleanup_runs() -> None:
    seen = list[str]()

    def fails() -> None:
        yield_point()
        raise KeyError("mine")

    def waits() -> None:
        try:
            with torch.no_grad():
                yield_point()
                yield_point()
        finally:
            yield_point()
            seen.append(f"cleaned up, gradients {torch.is_grad_enabled()}")

    with pytest.raises(KeyError, match="mine"):
        interleave(waits, fails, waits)
    assert seen == ["cleaned up, gradients True"] * 2
    assert torch.is_grad_enabled()
    assert current_part() is None


def test_one_run_inside_another_is_refused() -> None:
    with pytest.raises(BatchesError, match="inside another"):
        interleave(lambda: interleave(lambda: 1, lambda: 2), lambda: 3)


def test_a_yield_point_outside_a_run_does_nothing() -> None:
    yield_point()
    assert why_atomic() == ""


def test_an_interrupt_between_turns_ends_all_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = list[str]()

    def waits() -> None:
        try:
            with torch.no_grad():
                yield_point()
        finally:
            seen.append(f"cleaned up, gradients {torch.is_grad_enabled()}")

    run = Run(ProcessGroups())
    turn, turns = ThreadState.turn, iter(range(9))

    def interrupted(state: ThreadState, act: Callable[[], Any], now: ThreadState) -> tuple[ThreadState, ThreadState]:
        left = turn(state, act, now)
        if next(turns) == 1:
            raise KeyboardInterrupt
        return left

    monkeypatch.setattr(ThreadState, "turn", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run.go([waits, waits])
    assert len(seen) == 2
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("fails", [False, True])
def test_a_run_keeps_nothing_of_its_parts(*, fails: bool) -> None:
    """Without the garbage collector: after an error of memory the program needs it at once."""
    held = list[weakref.ref[Tensor]]()

    def part(x: Tensor) -> Tensor:
        out = x + 1
        held.extend([weakref.ref(x), weakref.ref(out)])
        yield_point()
        if fails and len(held) == 4:
            raise torch.OutOfMemoryError("no memory")
        return out

    gc.collect()
    gc.disable()
    try:
        run = Run(ProcessGroups())
        with suppress(torch.OutOfMemoryError):
            run.go([partial(part, torch.ones(3)), partial(part, torch.ones(3))])
        assert [each() for each in held] == [None] * 4
    finally:
        gc.enable()
    assert [part.num_collectives for part in run.parts] == [1, 1]


def test_a_sparse_tensor_has_the_size_of_a_dense_one() -> None:
    """It has no ``nbytes``, and gloo sums it."""
    assert _size(([torch.eye(3).to_sparse()], None)) == 36
