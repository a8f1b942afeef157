"""`crossfade.pipelines.split` in one process: stages compute what the module does, refusals, memory limits, the command."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="modules of torch")

import torch
from torch import Tensor, nn

from crossfade.cli import pipeline as cli
from crossfade.cli.exits import UsersMistake
from crossfade.errors import GraphError
from crossfade.pipelines import SCHEDULES, Split, split
from crossfade.pipelines.shared import sync_shared_gradients
from crossfade.pipelines.stages import with_contiguous_gradient
from tests.helpers.command_line import crossfade_command
from tests.helpers.pipeline_cases import PROBLEMS, SIZE, seeded
from tests.helpers.warm import TORCH_AND_COMPILERS

Gradients = dict[str, Tensor]


def run_stages(cut: Split, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """What comes out of the last stage, through all of them."""
    values = inputs
    for module in cut.modules:
        found = module(*values)
        values = found if isinstance(found, tuple) else (found,)
    return values


@pytest.mark.parametrize("num_stages", [1, 3, 5])
@pytest.mark.parametrize("name", PROBLEMS)
def test_stages_one_after_another_are_the_module(name: str, num_stages: int) -> None:
    problem = PROBLEMS[name]
    module, inputs, target = seeded(problem)
    inputs, target = tuple(each[:SIZE] for each in inputs), target[:SIZE]
    state = {key: value.clone() for key, value in module.state_dict().items()}
    torch.manual_seed(9)
    cut = split(module, inputs, num_stages, num_passes=1)
    drawn = torch.rand(1)
    torch.manual_seed(9)
    assert torch.equal(drawn, torch.rand(1))
    assert all(torch.equal(value, state[key]) for key, value in module.state_dict().items())
    assert all(each.grad is None for each in module.parameters())
    outputs = run_stages(cut, inputs)
    problem.loss(outputs if len(outputs) > 1 else outputs[0], target).backward()  # type: ignore[no-untyped-call,unused-ignore]
    whole, _, _ = seeded(problem)
    wanted = whole(*inputs)
    torch.testing.assert_close(outputs if len(outputs) > 1 else outputs[0], wanted)
    problem.loss(wanted, target).backward()  # type: ignore[no-untyped-call,unused-ignore]
    found = gradients_of(cut)
    for parameter_name, parameter in whole.named_parameters():
        torch.testing.assert_close(found.get(parameter_name), parameter.grad)


def gradients_of(cut: Split) -> Gradients:
    """All gradients by their names in the module; those of copies are summed, under the name of the first."""
    names = {(stage, name): next(iter(each.values())) for each in cut.shared for stage, name in each.items()}
    found: Gradients = {}
    for index, module in enumerate(cut.modules):
        for name, parameter in module.named_parameters():
            if parameter.grad is None:
                assert not parameter.requires_grad
                continue
            key = names.get((index, name), name)
            found[key] = found[key] + parameter.grad if key in found else parameter.grad
    return found


def test_a_shared_parameter_is_copied_once_for_each_later_stage_and_told() -> None:
    module, inputs, _ = seeded(PROBLEMS["transformer"])
    cut = split(module, inputs[0][:SIZE], 3, num_passes=1)
    assert cut.shared == ({0: "embedding.weight", 2: "head.weight"},)
    assert "stage 0 (embedding.weight), stage 2 (head.weight)" in str(cut)
    assert cut.modules[0].get_parameter("embedding.weight") is module.get_parameter("embedding.weight")
    copy = cut.modules[2].get_parameter("head.weight")
    assert copy is not module.get_parameter("head.weight")
    assert torch.equal(copy, module.get_parameter("head.weight"))
    held = sum(each.parameter_bytes for each in cut.stages)
    own = sum(each.numel() * 4 for each in module.parameters())
    assert held == own + copy.numel() * 4


class Twice(nn.Module):
    """One layer that runs several times, a keyword, an unused input, an input that is returned, one value returned twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.other = nn.Linear(6, 6)

    def forward(self, unused: Tensor, x: Tensor, *, shift: Tensor) -> tuple[Tensor, ...]:
        y = torch.tanh(self.layer(x))
        z = torch.tanh(self.other(y) + shift)
        z = torch.tanh(self.layer(z))
        return z, x, y, z


def test_layers_that_run_twice_keywords_and_odd_outputs() -> None:
    torch.manual_seed(1)
    module, x = Twice(), torch.randn(3, 6)
    cut = split(module, (torch.zeros(1), x), 3, kwargs={"shift": torch.ones(6)}, num_passes=1)
    values = cut.modules[0](torch.zeros(1), x, shift=torch.ones(6))
    for stage in cut.modules[1:]:
        values = stage(*values)
    wanted = module(torch.zeros(1), x, shift=torch.ones(6))
    torch.testing.assert_close(values, wanted)
    sum(each.square().sum() for each in values).backward()
    found = gradients_of(cut)
    again = Twice()
    again.load_state_dict(module.state_dict())
    sum(each.square().sum() for each in again(torch.zeros(1), x, shift=torch.ones(6))).backward()
    for name, parameter in again.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad)


class InPlace(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = x * 2
        y.relu_()
        z = y + 1
        z.mul_(3)
        return z - y


def test_no_cut_comes_before_a_write_into_what_would_cross() -> None:
    x = torch.randn(4, 5)
    cut = split(InPlace(), x, 3, num_passes=1)
    torch.testing.assert_close(run_stages(cut, (x,))[0], InPlace()(x))
    with pytest.raises(GraphError, match="the module can be cut in 2 places"):
        split(InPlace(), x, 4, num_passes=1)


class ReturnsNames(nn.Module):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"x": x + 1}


class Decides(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 1 if x.sum() > 0 else x


REFUSED: list[tuple[str, Callable[[], object], str, str]] = [
    ("a dict", lambda: split(ReturnsNames(), torch.ones(2), 1), "returns a dict", "returns its tensors in a tuple"),
    ("a number", lambda: split(nn.Flatten(), (torch.ones(2, 2), 3), 1), "an example input is a int: 3", "in a module"),
    ("a decision", lambda: split(Decides(), torch.ones(2), 1), "cannot be traced and cut", "torch.export.export"),
    ("no stage", lambda: sync_shared_gradients((), ()), "no stage was given", "the stages of this rank"),
    ("too many", lambda: split(nn.Linear(2, 2), torch.ones(2, 2), 9), "9 stages need 8 cuts", "fewer stages"),
    ("none", lambda: split(nn.Linear(2, 2), torch.ones(2, 2), 0), "num_stages=0", "at least 1"),
    (
        "no target",
        lambda: split(nn.Linear(2, 2), torch.ones(2, 2), 1, loss_fn=nn.functional.mse_loss),
        "loss_fn is given, and target is missing",
        "target=",
    ),
    (
        "no loss",
        lambda: split(nn.Linear(2, 2), torch.ones(2, 2), 1, target=torch.ones(2)),
        "target is given, and loss_fn is missing",
        "loss_fn=",
    ),
    (
        "too small",
        lambda: split(
            nn.Sequential(nn.Linear(50, 50), nn.Linear(50, 50)), torch.ones(2, 50), 2, memory_limit_bytes=5000
        ),
        "no 2 stages keep within 5,000 bytes each: the largest would have at least ",
        "more stages",
    ),
]


@pytest.mark.parametrize(("build", "says", "hint"), [each[1:] for each in REFUSED], ids=[each[0] for each in REFUSED])
def test_what_cannot_be_split_is_refused_with_the_reason(build: Callable[[], object], says: str, hint: str) -> None:
    with pytest.raises(GraphError) as caught:
        build()
    message, _, told = str(caught.value).partition("\nhint: ")
    assert says in message
    assert hint in told


def test_a_function_is_no_module() -> None:
    function: Any = torch.relu
    with pytest.raises(TypeError, match=r"^split is given <built-in .*\nhint: it takes a torch\.nn\.Module"):
        split(function, torch.ones(2, 2), num_stages=2)


def test_a_memory_limit_moves_the_cut() -> None:
    layers = [nn.Linear(64, 64) for _ in range(6)]
    module, x = nn.Sequential(nn.Linear(64, 3000), nn.Linear(3000, 64), *layers), torch.randn(2, 64)
    size = 2 * sum(each.numel() * 4 for each in module[0].parameters())
    cut = split(module, x, 2, memory_limit_bytes=int(1.2 * size), num_passes=1)
    assert repr(cut) == "Split(num_stages=2, device='cpu')"
    assert all(stage.held_bytes < 1.2 * size for stage in cut.stages)


MODELS = """
import torch
from torch import nn

def make():
    print("made")
    return nn.Sequential(*[nn.Linear(16, 16) for _ in range(6)]), (torch.randn(4, 16),)
"""


def test_the_command_shows_the_split_and_all_schedules(tmp_path: Path) -> None:
    (tmp_path / "models.py").write_text(MODELS)
    numbers = ("--stages", "4", "--microbatches", "8", "--ranks", "2")
    done = crossfade_command("pipeline", "models:make", *numbers, folder=tmp_path, imported=TORCH_AND_COMPILERS)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0] == "made"
    assert lines[1].split()[:3] == ["stage", "from", "to"]
    rows = {line.split()[0]: line.split() for line in lines if line}
    assert [rows[name][1] for name in SCHEDULES if name not in ("GPipe", "1F1B")] == ["2"] * (len(SCHEDULES) - 2)
    assert "GPipe: GPipe has one stage on each rank, not 4 on 2; cut it into 2 stages" in lines


def test_a_mistake_is_one_message_and_exit_code_2(tmp_path: Path) -> None:
    (tmp_path / "models.py").write_text(MODELS)
    done = crossfade_command(
        "pipeline",
        "models:make",
        "--stages",
        "50",
        "--microbatches",
        "8",
        folder=tmp_path,
        imported=TORCH_AND_COMPILERS,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error: the module of models:make cannot be cut: 50 stages need 49 cuts")
    assert done.stderr.splitlines()[-1] == "hint: ask for fewer stages"


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (nn.Identity(), "returned a Identity, not a module and"),
        ((3, torch.ones(2)), "a int first, which is no torch.nn"),
    ],
)
def test_a_function_that_returns_something_else_is_a_mistake(
    made: object, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli, "call_target", lambda *_, **__: made)
    with pytest.raises(UsersMistake, match=says):
        cli.show_pipeline("models:f", num_stages=2, num_microbatches=4, num_ranks=None, device="")


class Raises(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise KeyError("odd")


@pytest.mark.parametrize(
    ("module", "device", "says"),
    [
        (Raises(), "", r"the module of models:f raised KeyError: 'odd'\n  at .*test_pipelines.py, line .*\nhint: "),
        (nn.Identity(), "nowhere", r"there is no device 'nowhere': .*\nhint: "),
        (nn.Identity(), "cuda:99", r"there is no device 'cuda:99': .*\nhint: "),
    ],
)
def test_a_module_that_raises_or_a_device_that_is_not_there_is_a_mistake(
    module: nn.Module, device: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli, "call_target", lambda *_, **__: (module, (torch.ones(2, 2),)))
    with pytest.raises(UsersMistake, match=says):
        cli.show_pipeline("models:f", num_stages=2, num_microbatches=4, num_ranks=None, device=device)


def test_a_gradient_that_crosses_is_contiguous() -> None:
    value, rows = torch.randn(3, 4, requires_grad=True), torch.randn(4, 3)
    (plain,) = torch.autograd.grad((value * 1).t(), value, rows)
    (sent,) = torch.autograd.grad(with_contiguous_gradient(value).t(), value, rows)
    assert not torch.autograd.grad(value.t(), value, rows)[0].is_contiguous()
    assert sent.is_contiguous()
    assert torch.equal(sent, plain)
