"""What torch keeps per thread stays with its part."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="batches are torch's")
pytest.importorskip("greenlet", reason="parts are greenlets: pip install crossfade[batches]")

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.checkpoint import checkpoint

from crossfade.batches import yield_point
from crossfade.batches.coroutines import thread_state
from crossfade.batches.coroutines.thread_state import ThreadState, seeded
from tests.helpers.parts import Doubling, interleave, switching


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


@pytest.mark.parametrize("outer", [True, False])
def test_gradients_stay_off_where_parts_stop_under_autocast(outer: bool) -> None:
    """Other dispatch keys are put back by guards, one of which sets the gradient modes too."""

    def part() -> list[bool]:
        found = []
        with torch.autocast("cpu", torch.bfloat16):
            for _ in range(3):
                found += [torch.is_grad_enabled(), torch._C._is_fwd_grad_enabled()]
                yield_point()
        return [*found, torch.is_grad_enabled()]

    with torch.set_grad_enabled(outer):
        assert interleave(part, part, part) == [[outer, True] * 3 + [outer]] * 3
        assert torch.is_grad_enabled() is outer
    with torch.inference_mode():
        assert interleave(part, part) == [[False] * 7] * 2


def test_a_part_with_a_stream_of_its_own_has_no_casts_of_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """They may not be there yet when it begins."""
    monkeypatch.setattr(torch._C, "_cuda_setStream", lambda **_: None, raising=False)
    weight = torch.ones(2, 2, requires_grad=True)

    def cast() -> object:
        return torch.mm(torch.ones(2, 2), weight).grad_fn.next_functions[1][0]  # type: ignore[union-attr]

    with torch.autocast("cpu", torch.bfloat16):
        now = ThreadState.take()._replace(stream=(0, 0, 1))
        now.put(now)
        kept = cast()
        now.put(now)
        assert cast() is kept, "one cast serves the stream"
        now._replace(stream=(3, 0, 1)).put(now)
        assert cast() is not kept


class _Philox:
    """What is asked of a GPU's generator."""

    def __init__(self, seed: int) -> None:
        self._seed, self._offset = seed, 0

    def initial_seed(self) -> int:
        return self._seed

    def get_offset(self) -> int:
        return self._offset

    def set_offset(self, offset: int) -> None:
        self._offset = offset


def test_random_numbers_on_a_gpu_follow_from_those_of_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that share activations have one seed there, whatever they draw on the CPU; others have other ones."""
    monkeypatch.setattr(thread_state, "_gpu_generator", lambda: SimpleNamespace(device="cpu"))

    def seeds(on_cpu: int, on_gpu: int, num_runs: int = 2) -> list[int]:
        torch.manual_seed(on_cpu)
        state = ThreadState.take()._replace(gpu_generator=_Philox(on_gpu))
        return [seeded(state).gpu_generator.initial_seed() for _ in range(2 * num_runs)]

    assert seeds(1, 7) == seeds(2, 7)
    assert len({*seeds(1, 7), *seeds(1, 8)}) == 8


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


def test_without_gradients_parts_draw_from_the_generator_of_the_thread_in_their_turns() -> None:
    def part() -> list[float]:
        found = []
        for _ in range(3):
            found.append(torch.rand(()).item())
            yield_point()
        return found

    torch.manual_seed(7)
    with torch.no_grad():
        one, other = interleave(part, part)
    after = torch.rand(()).item()
    torch.manual_seed(7)
    assert [each for turn in zip(one, other, strict=True) for each in turn] == [torch.rand(()).item() for _ in range(6)]
    assert after == torch.rand(()).item()


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
        "from tests.helpers.parts import switching, interleave\n"
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
