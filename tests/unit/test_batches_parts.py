"""Parts that take turns in one process: what torch keeps per thread stays with its part, and nothing stops where that is unsafe."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import pytest

pytest.importorskip("torch", reason="batches are torch's")
pytest.importorskip("greenlet", reason="parts are greenlets: pip install crossfade[batches]")

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils.checkpoint import checkpoint

from crossfade.batches import yield_point
from crossfade.batches.carriers import ProcessGroups
from crossfade.batches.parts import Run, current_part, why_atomic
from crossfade.batches.thread_state import ThreadState
from crossfade.errors import BatchesError


def interleave(*calls: Callable[[], Any]) -> list[Any]:
    return Run(ProcessGroups()).go(calls)


class Switching(torch.autograd.Function):
    """The identity; a switch in its forward, where autograd is off."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        yield_point()
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        yield_point()
        return gradients[0]


switching: Callable[[Tensor], Tensor] = Switching.apply


class Doubling(TorchDispatchMode):  # type: ignore[no-untyped-call,unused-ignore]
    """Sees operators."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call,unused-ignore]
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        yield_point()
        return func(*args, **(kwargs or {}))


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


def test_both_parts_have_gradients_after_a_switch_without_grad_mode() -> None:
    weight = torch.tensor(3.0, requires_grad=True)

    def part(factor: float) -> Tensor:
        return switching(weight * factor) * factor

    outputs = interleave(lambda: part(1.0), lambda: part(2.0))
    assert all(each.grad_fn is not None for each in outputs)
    (outputs[0] + outputs[1]).backward()  # type: ignore[no-untyped-call,unused-ignore]
    assert weight.grad is not None
    assert weight.grad.item() == 5.0


@pytest.mark.parametrize("outer", [True, False])
def test_inference_mode_stays_in_its_part(outer: bool) -> None:
    def inside() -> bool:
        with torch.inference_mode():
            yield_point()
            return torch.is_inference_mode_enabled()

    def outside() -> list[bool]:
        found = [torch.is_inference_mode_enabled()]
        yield_point()
        return [*found, torch.is_inference_mode_enabled(), torch.ones(1).is_inference()]

    with torch.inference_mode(outer):
        assert interleave(inside, outside) == [True, [outer] * 3]
        assert torch.is_inference_mode_enabled() is outer


def test_modes_and_hooks_stay_in_their_part() -> None:
    packed = list[Tensor]()

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor)
        return tensor

    class Seeing(TorchFunctionMode):
        seen = 0

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            Seeing.seen += 1
            return func(*args, **(kwargs or {}))

    def with_modes() -> list[str]:
        mode = Doubling()
        with mode, Seeing(), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            yield_point()
            (torch.ones(2, requires_grad=True) * torch.ones(2)).sum()
        return mode.seen

    def without() -> int:
        before = len(_get_current_dispatch_mode_stack())
        yield_point()
        seen, saved = Seeing.seen, len(packed)
        (torch.ones(2, requires_grad=True) * torch.ones(2)).sum()
        assert (Seeing.seen, len(packed)) == (seen, saved)
        yield_point()
        return before + len(_get_current_dispatch_mode_stack())

    seen, modes = interleave(with_modes, without)
    assert "aten.mul.Tensor" in seen
    assert packed
    assert modes == 0


def test_a_mode_around_the_run_is_in_both_parts() -> None:
    mode = Doubling()
    weight = torch.ones(2, requires_grad=True)
    with mode:
        outputs = interleave(lambda: (weight * 2).sum(), lambda: (weight * 3).sum())
        assert _get_current_dispatch_mode_stack() == [mode]
    assert mode.seen.count("aten.mul.Tensor") == 2
    sum(outputs).backward()  # type: ignore[no-untyped-call,unused-ignore]
    assert weight.grad is not None
    assert weight.grad.tolist() == [5.0, 5.0]


def test_autocast_stays_in_its_part() -> None:
    def cast() -> torch.dtype:
        with torch.autocast("cpu", torch.bfloat16):
            yield_point()
            return torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype

    def plain() -> torch.dtype:
        yield_point()
        return torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype

    assert interleave(cast, plain, cast) == [torch.bfloat16, torch.float32, torch.bfloat16]


def test_random_numbers_belong_to_the_part_and_follow_from_the_seed() -> None:
    def part(stops: int) -> Callable[[], Tensor]:
        def call() -> Tensor:
            found = []
            for _ in range(3):
                found.append(torch.rand(4))
                for _ in range(stops):
                    yield_point()
            return torch.cat(found)

        return call

    def both(stops: int) -> tuple[Tensor, Tensor, Tensor]:
        torch.manual_seed(7)
        one, other = interleave(part(stops), part(2 * stops))
        return one, other, torch.rand(3)

    first, second, after = both(0)
    assert not torch.equal(first, second)
    for again in (both(1), both(3)):
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(again, (first, second, after), strict=True))


@pytest.mark.parametrize("reentrant", [True, False])
def test_dropout_in_a_checkpoint_is_the_same_twice(reentrant: bool) -> None:
    weight = torch.ones(64, dtype=torch.double, requires_grad=True)

    def part() -> Tensor:
        def block(x: Tensor) -> Tensor:
            return torch.dropout(switching(x), 0.5, True)

        out: Any = checkpoint(block, weight * 1.0, use_reentrant=reentrant)
        total: Tensor = out.sum()
        return total

    outputs = interleave(part, part)
    sum(outputs).backward()  # type: ignore[no-untyped-call,unused-ignore]
    assert weight.grad is not None
    assert weight.grad.sum().item() == pytest.approx(sum(each.item() for each in outputs))


def test_context_variables_stay_in_their_part() -> None:
    variable = ContextVar("variable", default="outside")

    def part(name: str) -> Callable[[], str]:
        def call() -> str:
            variable.set(name)
            yield_point()
            return variable.get()

        return call

    assert interleave(part("a"), part("b")) == ["a", "b"]
    assert variable.get() == "outside"


def test_a_warning_of_torch_after_switches_in_functions_does_not_crash() -> None:
    code = (
        "import torch, warnings\n"
        "from tests.unit.test_batches_parts import switching, interleave\n"
        "w = torch.ones(2, requires_grad=True)\n"
        "f = lambda: switching(switching(w)).sum()\n"
        "for _ in range(3): sum(interleave(f, f, f)).backward()\n"
        "warnings.simplefilter('ignore')\n"
        "torch.set_warn_always(True)\n"
        "out = torch.empty(1)\n"
        "for _ in range(10): torch.add(torch.ones(3), 1, out=out); out = torch.empty(1)\n"
        "print('alive')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "alive"), done.stderr


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


def test_a_run_keeps_nothing_of_its_parts() -> None:
    import gc
    import weakref

    held = list[weakref.ref[Tensor]]()

    def part() -> Tensor:
        out = torch.ones(3)
        held.append(weakref.ref(out))
        yield_point()
        return out

    run = Run(ProcessGroups())
    run.go([part, part])
    gc.collect()
    assert [each() for each in held] == [None, None]
    assert [part.num_collectives for part in run.parts] == [1, 1]
