"""What a part has of its own on a GPU: random numbers, casts; and batches that are not there yet."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from crossfade.batches import interleave, interleaved
from crossfade.batches.choice.calibration import MOST_STEPS
from tests.helpers.batches_models import all_sum, assert_near, gradients, train
from tests.helpers.batches_wrappers import GROUPS
from tests.helpers.ranks import Case

COPIES = "copy engines"


def random_numbers(device: str) -> None:
    """Dropout has numbers of its part's own, which follow from the seed."""
    model = nn.Sequential(nn.Linear(64, 64, device=device), nn.Dropout(0.5))
    x = torch.ones(8, 64, device=device)
    handle = interleave(model, way=GROUPS)
    outputs = []
    for _ in range(2):
        torch.manual_seed(3)
        outputs.append((handle(x), torch.rand(4, device=device)))
    assert torch.equal(outputs[0][0], outputs[1][0])
    assert torch.equal(outputs[0][1], outputs[1][1])
    assert not torch.equal(outputs[0][0][:4], outputs[0][0][4:])
    masks = list[Tensor]()
    for on_cpu in (
        1,
        2,
    ):  # ranks that share activations have one seed on their GPUs, and may have drawn others on the CPU
        torch.manual_seed(on_cpu)
        torch.cuda.manual_seed(3)
        masks += [handle(x) != 0, handle(x) != 0]
    assert torch.equal(masks[0], masks[2])
    assert torch.equal(masks[1], masks[3])
    assert not torch.equal(masks[0], masks[1])


class Wide(nn.Module):
    """Long enough on the GPU that a missing wait would show."""

    def __init__(self, width: int, device: str) -> None:
        super().__init__()
        torch.manual_seed(dist.get_rank())
        self.layers = nn.ModuleList([nn.Linear(width, width, device=device) for _ in range(8)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(x + all_sum(layer(x)))
        return x


class Cast(Wide):
    """Weights of float32, which autocast casts and keeps, and sums in bfloat16."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, torch.bfloat16):
            for _ in range(2):
                x = super().forward(x)
        return x.float()


def casts(device: str) -> None:
    """Each part makes its own: another part's may not be there yet, on its stream. They are new in each step."""
    model = Cast(1024, device)
    for way in (GROUPS, COPIES):
        handle = interleave(model, way=way)
        for seed in range(6):
            with torch.no_grad():
                for layer in model.layers:
                    layer.weight.mul_(-1.0)  # type: ignore[operator]
            x = torch.randn(2048, 1024, generator=torch.Generator().manual_seed(seed)).to(device)
            assert_near(train(handle, model, x), train(model, model, x), 0.05)
            with torch.no_grad():
                output = handle(x)
                assert not output.requires_grad
                assert torch.allclose(output, model(x), atol=0.05)


class Moving(nn.Module):
    """Takes its input to the GPU itself, as DDP does."""

    def __init__(self, device: str) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.device = device
        self.layer = nn.Linear(16, 16, device=device)

    def forward(self, x: Tensor) -> Tensor:
        return all_sum(self.layer(x.to(self.device)))


def batches_on_the_cpu(device: str) -> None:
    model, x = Moving(device), torch.randn(8, 16, generator=torch.Generator().manual_seed(1))
    handle, steps = interleave(model), interleaved()
    for _ in range(MOST_STEPS + 2):
        assert_near(train(handle, model, x), train(model, model, x), 1e-5)
        with steps as run:
            for half in x.chunk(2):
                run(lambda each: model(each).square().mean(), half)
            loss = run.backward()  # type: ignore[no-untyped-call,unused-ignore]
        ours = gradients(model)
        wanted = model(x).square().mean()
        wanted.backward()
        assert_near((loss, ours), (wanted.detach(), gradients(model)), 1e-5)
    assert len(handle.report().measured_ms) == 3


STATES: dict[str, Case] = {each.__name__: each for each in (random_numbers, casts, batches_on_the_cpu)}
