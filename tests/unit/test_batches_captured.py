"""Captured calls, with a recorder on the CPU in place of CUDA graphs: it repeats the operators that ran, into the same tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import ref

import pytest

pytest.importorskip("torch", reason="batches are torch's")
pytest.importorskip("greenlet", reason="parts are greenlets: pip install crossfade[batches]")

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from crossfade.batches.capture import limits
from crossfade.batches.capture.calls import CapturedCall, CapturedStep
from crossfade.errors import BatchesError
from tests.helpers.batches_captured import record


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(6, 8)
        self.second = nn.Linear(8, 6)
        self.second.bias.requires_grad_(False)
        self.unused = nn.Parameter(torch.ones(3))
        self.scale = nn.Parameter(torch.ones(6))
        self.register_buffer("buffer", torch.ones(6))

    def forward(self, x: Tensor, *, shift: Tensor | None = None, times: int = 1) -> dict[str, Any]:
        rows = torch.tanh(self.first(x))
        out = self.second(rows) * self.scale * times
        with torch.no_grad():
            largest = out.amax()
        return {"out": out if shift is None else out + shift, "largest": largest, "rows": rows, "times": times}


def inputs(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(5, 6, generator=generator), torch.randn(6, generator=generator)


def captured(model: Model) -> CapturedStep:
    x, shift = inputs(0)
    return CapturedStep(model, model, (x.requires_grad_(),), {"shift": shift, "times": 2}, record)


def trained(call: Callable[..., Any], model: Model, seed: int, *, with_rows: bool = True) -> list[Any]:
    """Outputs and gradients of a step; those of parameters are added to what is there."""
    x, shift = inputs(seed)
    x.requires_grad_()
    got = call(x, shift=shift, times=2)
    assert got["times"] == 2
    assert not got["largest"].requires_grad
    loss = got["out"].square().mean() + (got["rows"].sum() if with_rows else 0)
    loss.backward()
    gradients = [each.grad for each in model.parameters()]
    return [
        got["out"],
        got["largest"],
        got["rows"],
        x.grad,
        *(None if each is None else each.clone() for each in gradients),
    ]


def assert_same(ours: list[Any], wanted: list[Any]) -> None:
    for one, other in zip(ours, wanted, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other)


def test_nothing_of_the_first_run_lives_when_the_capture_begins() -> None:
    """A leaf's node of autograd lives with it, and keeps the stream on which it was made, which is not captured."""
    model, found = Model(), list[ref[Tensor]]()
    model.register_forward_hook(lambda _, __, outputs: found.append(ref(outputs["out"])))

    def looked_at(work: Callable[[], Any]) -> tuple[Callable[[], object], Any]:
        assert found
        assert all(output() is None for output in found), "the first run's graph of autograd is there yet"
        replay, result = record(work)
        found[:] = found[:1]
        return replay, result

    x, shift = inputs(0)
    CapturedStep(model, model, (x,), {"shift": shift}, looked_at)


def test_a_replay_gives_what_the_call_gives_for_other_inputs() -> None:
    model = Model()
    with torch.no_grad():
        x, shift = inputs(0)
        call = CapturedCall(model, model, (x,), {"shift": shift, "times": 2}, record)
        kept = []
        for seed in (1, 2, 3):
            x, shift = inputs(seed)
            kept.append((call(x, shift=shift, times=2), model(x, shift=shift, times=2)))
        for ours, wanted in kept:  # each has memory of its own
            assert_same(pytree.tree_leaves(ours), pytree.tree_leaves(wanted))


def test_a_step_gives_outputs_and_gradients_of_the_call() -> None:
    model, plain = Model(), Model()
    step = captured(model)
    kept = []
    for seed in (1, 2, 3):
        kept.append((trained(step, model, seed), trained(plain, plain, seed)))  # gradients add up over the steps
        if seed == 2:
            for each in (model, plain):
                each.zero_grad()
    for ours, wanted in kept:  # each has memory of its own
        assert_same(ours, wanted)


def test_gradients_that_are_kept_do_not_change_in_the_next_step() -> None:
    model = Model()
    step = captured(model)
    sources = [each for name, each in model.named_parameters() if each.requires_grad and name != "unused"]
    x, shift = inputs(1)
    kept = torch.autograd.grad(step(x, shift=shift, times=2)["out"].sum(), sources)
    before = [each.clone() for each in kept]
    trained(step, model, 2)
    assert_same(list(kept), before)


def test_an_output_without_a_gradient_counts_as_zero() -> None:
    model, plain = Model(), Model()
    step = captured(model)
    assert_same(trained(step, model, 1, with_rows=False), trained(plain, plain, 1, with_rows=False))


def test_an_optimizer_changes_what_the_next_replay_computes_with() -> None:
    model, plain = Model(), Model()
    step = captured(model)
    optimizers = [torch.optim.SGD(each.parameters(), 0.1) for each in (model, plain)]
    for seed in (1, 2, 3):
        ours, wanted = trained(step, model, seed), trained(plain, plain, seed)
        assert_same(ours, wanted)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def test_hooks_of_parameters_are_called_once_a_step() -> None:
    model, calls = Model(), list[Tensor]()
    scale: Any = model.scale
    scale.register_post_accumulate_grad_hook(lambda each: calls.append(each.grad.clone()))
    step = captured(model)
    assert not calls
    trained(step, model, 1)
    assert len(calls) == 1


def test_gradients_of_gradients_are_refused() -> None:
    model = Model()
    out = captured(model)(inputs(1)[0], shift=inputs(1)[1], times=2)["out"]
    gradient: Any = torch.autograd.grad(out.square().sum(), [model.scale], create_graph=True)[0]
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


@pytest.mark.parametrize("again", ["late", "twice"])
def test_a_backward_whose_forward_is_overwritten_is_refused(again: str) -> None:
    model = Model()
    step = captured(model)
    x, shift = inputs(1)
    first = step(x, shift=shift, times=2)["out"].sum()
    if again == "late":
        step(x, shift=shift, times=2)
    else:
        first.backward(retain_graph=True)
    with pytest.raises(BatchesError, match="too late, or again"):
        first.backward()


CHANGES: dict[str, Callable[[Model], object]] = {
    "another module": lambda model: setattr(model, "first", nn.Linear(6, 6)),
    "moved": lambda model: setattr(model.scale, "data", model.scale.data.clone()),
    "frozen": lambda model: model.scale.requires_grad_(False),
    "another one": lambda model: setattr(model, "scale", nn.Parameter(model.scale.detach())),
    "another buffer": lambda model: setattr(model, "buffer", torch.ones(6)),
    "set to evaluation": lambda model: model.first.eval(),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("is_step", [False, True])
def test_a_module_that_was_changed_is_refused(change: str, *, is_step: bool) -> None:
    model = Model()
    x, shift = inputs(1)
    kind: Any = CapturedStep if is_step else CapturedCall
    call = kind(model, model, (x,), {"shift": shift, "times": 2}, record)
    CHANGES[change](model)
    with pytest.raises(BatchesError, match="goes on using the old ones"):
        call(x, shift=shift, times=2)


def test_a_sharded_parameter_that_was_moved_is_refused() -> None:
    """Its own rows lie in a tensor inside."""
    model = Model()
    scale: Any = model.scale
    scale._local_tensor = torch.ones(3)
    x, shift = inputs(1)
    with torch.no_grad():
        call = CapturedCall(model, model, (x,), {"shift": shift, "times": 2}, record)
        call(x, shift=shift, times=2)
        scale._local_tensor = torch.ones(3)
        with pytest.raises(BatchesError, match="goes on using the old ones"):
            call(x, shift=shift, times=2)


class Recurrent(nn.Module):
    """Its layer keeps its parameters in a list of its own, and two names mean one layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.layer = self.again = nn.RNN(4, 4)
        self.tied = nn.Linear(4, 4, bias=False)
        self.tied.weight = self.layer.get_parameter("weight_ih_l0")

    def forward(self, x: Tensor) -> Tensor:
        layer: Any = self.layer
        assert not layer._weights_have_changed(), "it would move all weights together again"
        rows = checkpoint(lambda each: self.layer(each)[0], x, use_reentrant=False)
        out: Tensor = self.tied(self.again(rows)[0])
        return out


def test_shared_and_listed_parameters_have_their_gradients() -> None:
    model, plain = Recurrent(), Recurrent()
    x = torch.randn(3, 2, 4)
    before = dict(model.named_parameters(remove_duplicate=False))
    step = CapturedStep(model, model, (x,), {}, record)
    assert all(each is before[name] for name, each in model.named_parameters(remove_duplicate=False))
    for each in (step, plain):
        each(x * 2).square().sum().backward()
    assert_same([each.grad for each in model.parameters()], [each.grad for each in plain.parameters()])
    torch.testing.assert_close(model(x), plain(x))


@pytest.mark.parametrize("elsewhere", ["a parameter of its own", "another one", "a tensor with a history"])
def test_a_tensor_that_is_not_registered_is_refused(elsewhere: str) -> None:
    model = Model()
    before = dict(model.named_parameters())
    other = torch.ones(6, requires_grad=True)
    kept = {"a parameter of its own": model.scale, "another one": other, "a tensor with a history": other * 2}
    with pytest.raises(BatchesError, match="not registered"):
        CapturedStep(model, lambda x: model(x)["out"] * kept[elsewhere], (inputs(0)[0],), {}, record)
    assert all(each is before[name] for name, each in model.named_parameters()), "the module has its own again"


@pytest.mark.parametrize("kind", [CapturedCall, CapturedStep])
@pytest.mark.parametrize("place", ["argument", "output"])
def test_objects_that_are_no_plain_values_are_refused(kind: Any, place: str) -> None:
    model = nn.Linear(6, 6)

    def call(x: Tensor, option: object = None) -> object:
        return model(x), option if place == "argument" else object()

    with pytest.raises(BatchesError, match="an argument or output is a object"):
        kind(model, call, (torch.ones(6),), {"option": object()} if place == "argument" else {}, record)


class Scaled(nn.Parameter):
    """A parameter of a kind of its own."""


def test_attributes_of_parameters_are_there_and_other_kinds_are_refused() -> None:
    model: Any = nn.Linear(6, 6)
    model.weight.factor = 3.0
    seen = set[float]()

    def call(x: Tensor) -> Tensor:
        seen.add(model.weight.factor)
        return model(x)  # type: ignore[no-any-return]

    CapturedStep(model, call, (torch.ones(6),), {}, record)
    assert seen == {3.0}
    model.weight = Scaled(torch.ones(6, 6))
    with pytest.raises(BatchesError, match="a parameter is a Scaled"):
        CapturedStep(model, model, (torch.ones(6),), {}, record)


def test_a_module_that_puts_another_buffer_in_place_has_its_own_again() -> None:
    model: Any = Model()
    before = model.buffer

    def call(x: Tensor) -> Tensor:
        model.buffer = model.buffer + 1
        return model(x)["out"]  # type: ignore[no-any-return]

    with pytest.raises(BatchesError, match="changes a parameter or buffer in place"):
        CapturedStep(model, call, (inputs(0)[0],), {}, record)
    assert model.buffer is before


@pytest.mark.parametrize("is_whole", [False, True])
def test_a_backward_inside_the_call_is_refused(*, is_whole: bool) -> None:
    """Its gradients would come to leaves of the graph's own."""
    model = Model()

    def call(x: Tensor) -> Tensor:
        out: Tensor = model(x)["out"]
        torch.autograd.backward([out.sum() if is_whole else model.first(x).sum()])
        return out

    with pytest.raises(BatchesError, match="the call has a backward inside"):
        CapturedStep(model, call, (inputs(0)[0],), {}, record)


def test_a_module_that_reduces_gradients_is_refused_also_where_it_is_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    model, outside = Model(), nn.Sequential(nn.Identity())
    monkeypatch.setattr(limits, "reduces_gradients", lambda each: each is outside)
    outside.append(model.first)
    with pytest.raises(BatchesError, match="Sequential reduces gradients as they come"):
        CapturedStep(model, lambda x: {**model(x), "more": outside(x)}, (inputs(0)[0],), {}, record)
    CapturedStep(model, model, (inputs(0)[0],), {}, record)


def test_a_call_without_gradients_is_no_step() -> None:
    model = Model().requires_grad_(False)
    with pytest.raises(BatchesError, match="no output needs a gradient"):
        CapturedStep(model, model, (inputs(0)[0],), {}, record)


@pytest.mark.parametrize("is_step", [False, True])
def test_casts_of_weights_are_the_graphs_own(*, is_step: bool) -> None:
    """Autocast would take one from before the capture, which is freed when its region ends."""
    model = Model()
    x, shift = inputs(0)
    arguments = (x,), {"shift": shift, "times": 2}
    with torch.autocast("cpu", torch.bfloat16):
        model(*arguments[0], **arguments[1])  # casts are kept now
        call: Any = (
            CapturedStep(model, model, *arguments, record)
            if is_step
            else CapturedCall(model, model, *arguments, record)
        )
        with torch.no_grad():
            model.first.weight.mul_(2)
        ours = call(*arguments[0], **arguments[1])
        later = model(*arguments[0], **arguments[1])
    with torch.autocast("cpu", torch.bfloat16):
        wanted = model(*arguments[0], **arguments[1])
    assert_same([ours["out"], ours["rows"]], [wanted["out"], wanted["rows"]])
    if not is_step:  # in the region the capture's own casts are not kept either
        assert_same([later["rows"]], [wanted["rows"]])
    assert torch.is_autocast_cache_enabled()
