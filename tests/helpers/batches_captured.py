"""Captured parts on the CPU, with a recorder in place of CUDA graphs: it repeats the operators that ran, into the same tensors."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor
from torch.distributed.distributed_c10d import Work
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from crossfade.batches import handle, interleave, interleaved, steps
from crossfade.batches.capture import calls as captured
from crossfade.batches.capture.calls import CapturedStep
from crossfade.batches.choice.calibration import MOST_STEPS, Moves, Way
from crossfade.batches.choice.tuner import Step
from crossfade.errors import BatchesError
from tests.helpers.batches_models import assert_near, gradients, random_model, same_input, train
from tests.helpers.batches_wrappers import GROUPS


class Tape(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Operators, their inputs and their outputs."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, out))
        return out

    def replay(self) -> None:
        with torch.no_grad():
            for func, args, kwargs, out in self.calls:
                again = func(*args, **kwargs)
                if func.namespace == "_c10d_functional":
                    again = pytree.tree_map_only(Tensor, torch.ops._c10d_functional.wait_tensor, again)
                for old, new in zip(pytree.tree_leaves(out), pytree.tree_leaves(again), strict=True):
                    if isinstance(old, Tensor) and old is not new and old.numel():
                        old.copy_(new)
                    elif isinstance(new, torch.ScriptObject):
                        Work.unbox(new).wait()


def record(work: Callable[[], Any]) -> tuple[Callable[[], object], Any]:
    with Tape() as tape:
        result = work()
    return tape.replay, result


def captured_steps(device: str) -> None:
    """Parts and their backward, recorded: the repetition gives what the module gives for other inputs, with other parameters."""
    for index in range(6):
        model, x = random_model(index).to(device), same_input(4 + index % 3, index).to(device)
        handle: Any = interleave(model, way=GROUPS)
        train(handle, model, x)  # communicators are there then
        parts = Step(Way(Moves.GROUPS))
        step = CapturedStep(model, lambda y, of=handle, by=parts: of._run(by, (y,), {})[0], (x,), {}, record)
        for seed in range(3):
            other = same_input(4 + index % 3, 10 + seed).to(device)
            assert_near(train(step, model, other), train(model, model, other))
            with torch.no_grad():
                for each in model.parameters():
                    each.mul_(0.9)


@contextmanager
def graphs_on_cpu() -> Iterator[None]:
    """Calls and steps are captured by the recorder."""
    with pytest.MonkeyPatch.context() as patched:
        for module in (handle, steps):
            patched.setattr(module, "can_capture", lambda _: True)
            patched.setattr(module, "why_not_captured", lambda *_, **__: "")
        patched.setattr(captured, "Graphs", lambda: record)
        yield


def calls_on_cpu(device: str) -> None:
    """Captured calls of a handle, while ways are measured and after that, when only the chosen one's graph is left."""
    for way in ("one batch", GROUPS, None):
        model, kept = random_model(7).to(device), list[tuple[Tensor, Tensor]]()
        with graphs_on_cpu(), torch.no_grad():
            calls = interleave(model, way=way, capture=True)
            for seed in range(MOST_STEPS + 6 if way is None else 6):
                x = same_input(6, seed).to(device)
                kept.append((calls(x), model(x)))
            for ours, wanted in kept:
                assert torch.allclose(ours, wanted), way
            report = calls.report()
            assert report.is_settled
            num_graphs = [len(each._graphs) for each in calls._captured.values()]
            if report.way.endswith(", captured"):
                assert num_graphs == [1]
                name, parameter = next(model.named_parameters())
                model.get_submodule(name.rpartition(".")[0]).register_parameter(
                    name.rpartition(".")[2], torch.nn.Parameter(parameter.detach())
                )
                with pytest.raises(BatchesError, match="another one"):
                    calls(same_input(6, 0).to(device))
            else:
                assert way is None, report
                assert not num_graphs


def whole_steps_on_cpu(device: str) -> None:
    with graphs_on_cpu():
        whole_steps_captured(device, ("one batch", GROUPS, None))


def whole_steps_captured(device: str, ways: Sequence[str | None]) -> None:
    """Steps of two batches and their backward as graphs: gradients add up, weights of losses and parameters change, and a step of
    other functions is not the graph's.
    """
    for way in ways:
        model = random_model(7).to(device)

        def loss_of(x: Tensor, own: Any = model) -> Tensor:
            return own(x).square().mean()  # type: ignore[no-any-return]

        steps_of = interleaved(way=way, capture=model)
        kept = []  # results of steps before
        for seed in range(MOST_STEPS + 4 if way is None else 6):
            rows, weights = [same_input(4, seed).to(device), same_input(2, 50 + seed).to(device)], (seed + 1.0, 2.0)
            whole = torch.stack([loss_of(each) for each in rows]) @ torch.tensor(weights, device=device).to(rows[0])
            whole = whole / sum(weights)
            torch.autograd.backward([whole])
            wanted = gradients(model)
            for _ in range(2):  # the second adds to what is there
                kept.append(_step(steps_of, loss_of, rows, weights))
                assert torch.allclose(kept[-1][-1], whole.detach()), (way, seed)
            assert_near((whole, [each / 2 for each in gradients(model)]), (whole, wanted))
            with torch.no_grad():
                for each in model.parameters():
                    each.mul_(0.97)
        report = steps_of.report()
        if way is None:
            assert any("captured" in name for name in report.measured_ms), report
        else:
            assert report.is_settled
            assert report.way == f"{way}, captured", report
        x = same_input(4, 0).to(device)
        *_, loss = _step(steps_of, lambda x, own=model: own(x).square().sum(), [x, x[:2]], (1.0, 1.0))
        assert any("its functions are others" in note for note in steps_of.report().notes)
        with torch.no_grad():
            assert torch.allclose(loss, (model(x).square().sum() + model(x[:2]).square().sum()) / 2)
        graphs = [ref(graph) for each in steps_of._captured.values() for graph in each._graphs.values()]
        assert graphs or way is None
        gc.disable()  # NCCL's communicators would wait for graphs that a cycle of references keeps
        del steps_of
        gc.enable()
        assert all(graph() is None for graph in graphs)


def _step(
    steps_of: Any, function: Callable[..., Tensor], rows: Sequence[Tensor], weights: Sequence[float]
) -> list[Any]:
    """Its parts, and its loss."""
    with steps_of as run:
        parts = [run(function, each, weight=weight) for each, weight in zip(rows, weights, strict=True)]
        loss = run.backward()
    return [*parts, loss]
