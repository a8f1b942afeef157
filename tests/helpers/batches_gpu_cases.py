"""Cases of interleaved batches on GPUs, by NCCL and by copy engines, eager and captured."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from crossfade.batches import interleave, interleaved
from crossfade.batches.carriers import buffers
from crossfade.batches.choice import calibration
from crossfade.batches.choice.calibration import MOST_STEPS
from crossfade.errors import BatchesError
from tests.helpers.batches_captured import whole_steps_captured
from tests.helpers.batches_cases import meet
from tests.helpers.batches_first_calls import outputs_that_do_not_join, sharded_modules_in_whole_steps
from tests.helpers.batches_gpu_state import STATES, Wide
from tests.helpers.batches_later import futures_of_works
from tests.helpers.batches_models import NEAR, all_sum, assert_near, gradients, random_model, same_input, train
from tests.helpers.batches_watch import WATCHES
from tests.helpers.batches_wrappers import GROUPS, Gathering, Tensors, fsdp2, quiet
from tests.helpers.ranks import Case

COPIES = "copy engines"


def random_models(device: str, first: int = 0, number: int = 16) -> None:
    for index in range(first, first + number):
        model, x = random_model(index).to(device), same_input(4 + index % 5, index).to(device)
        wanted = train(model, model, x)
        for way in (GROUPS, COPIES):
            handle = interleave(model, num_batches=2 + index % 2, way=way)
            for _ in range(3):
                try:
                    assert_near(train(handle, model, x), wanted)
                except AssertionError as error:
                    raise AssertionError(f"random model {index}, {way}: {error}\n{model}") from error


def long_steps(device: str) -> None:
    model = Wide(2048, device)
    for way, max_ctas in ((GROUPS, None), (GROUPS, 8), (COPIES, None)):
        handle = interleave(model, way=way, max_ctas=max_ctas)
        for seed in range(6):
            x = torch.randn(4096, 2048, generator=torch.Generator().manual_seed(seed)).to(device)
            assert_near(train(handle, model, x), train(model, model, x), 1e-3)


def replayed(device: str) -> None:
    """Copies of an eager step come again at the same addresses, so they are replayed; the input is another one each time."""
    model, handles = Wide(512, device), list[Any]()
    handle = interleave(model, way=COPIES)
    with torch.no_grad():
        for seed in range(10):
            x = torch.randn(1024, 512, generator=torch.Generator().manual_seed(seed)).to(device)
            assert torch.allclose(handle(x), model(x), atol=1e-4), seed
    for opened in buffers._OPENED:
        handles += [each for name, each in opened.peers.belongings.items() if "batches.carriers" in name]
    assert all(any(graph is not None for graph in each._graphs.values()) for each in handles)
    assert len(handles) >= 2


def freed(device: str) -> None:
    """Memory goes back to the device between two steps, and other memory may come to the same addresses."""
    model = Wide(512, device)
    handle = interleave(model, way=COPIES)
    with torch.no_grad():
        for seed in range(12):
            x = torch.randn(1024, 512, generator=torch.Generator().manual_seed(seed)).to(device)
            assert torch.allclose(handle(x), model(x), atol=1e-4), seed
            if seed % 3 == 2:
                del x
                torch.cuda.synchronize()
                torch.cuda.empty_cache()


def captured(device: str) -> None:
    model = Wide(512, device)
    with torch.no_grad():
        for way in (GROUPS, COPIES, None, "one batch"):
            handle = interleave(model, way=way, capture=True)
            outputs = list[tuple[Tensor, Tensor]]()
            for seed in range(MOST_STEPS + 2 if way is None else 4):
                x = torch.randn(256, 512, generator=torch.Generator().manual_seed(seed)).to(device)
                outputs.append((handle(x), model(x)))
            for ours, wanted in outputs:
                assert torch.allclose(ours, wanted, atol=1e-4), way
            report = handle.report()
            if way is None:
                assert len(report.measured_ms) == 6, report
            else:
                assert report.is_settled
                assert report.way == f"{way}, captured"


def close_ways_are_timed_again(device: str) -> None:
    """Every way is close here, and a GPU soon warm: all ranks come to one choice in one step, eager and captured, training too."""
    model, plain = Wide(512, device), Wide(512, device)
    plain.load_state_dict(model.state_dict())
    with pytest.MonkeyPatch.context() as patched:
        for share in ("CLOSE", "CLOSE_ON_HOST"):
            patched.setattr(calibration, share, 1e9)
        for name, taken_ms in (("WARM_MS", 120.0), ("_ROW_MS", 6.0)):
            patched.setattr(calibration, name, taken_ms)
        for capture, trains in ((False, False), (True, False), (True, True)):
            handle, num_steps, is_settled = interleave(model, capture=capture), 0, False
            while not is_settled:
                x = torch.randn(256, 512, generator=torch.Generator().manual_seed(num_steps)).to(device)
                if trains:
                    assert_near(train(handle, model, x), train(plain, plain, x), 1e-3)
                else:
                    with torch.no_grad():
                        assert torch.allclose(handle(x), model(x), atol=1e-4), (capture, num_steps)
                num_steps, is_settled = num_steps + 1, handle.report().is_settled
            assert num_steps > MOST_STEPS + 1
            told = [None] * dist.get_world_size()
            dist.all_gather_object(told, (handle.report().way, num_steps))
            assert len(set(told)) == 1, told


def captured_training(device: str) -> None:
    """Gradients add up over two steps, an optimizer changes the weights, and what is in the way is told."""
    for way in (GROUPS, COPIES, "one batch", None):
        ours, plain = Wide(512, device), Wide(512, device)
        plain.load_state_dict(ours.state_dict())
        handle = interleave(ours, way=way, capture=True)
        optimizers = [torch.optim.SGD(each.parameters(), 0.05) for each in (ours, plain)]
        for seed in range(MOST_STEPS + 4 if way is None else 6):
            x = torch.randn(256, 512, generator=torch.Generator().manual_seed(seed)).to(device)
            losses = [call(x).square().mean() for call in (handle, plain)]
            for loss in losses:
                loss.backward()
            assert torch.allclose(losses[0], losses[1], rtol=1e-3), (way, seed)
            if seed % 2:
                for one, other in zip(ours.parameters(), plain.parameters(), strict=True):
                    assert one.grad is not None
                    assert other.grad is not None
                    assert torch.allclose(one.grad, other.grad, rtol=1e-2, atol=1e-5), (way, seed)
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
        report = handle.report()
        if way is None:
            assert len(report.measured_ms) == 6, report
        else:
            assert report.is_settled
            assert report.way == f"{way}, captured", report
            first = handle(torch.ones(256, 512, device=device)).sum()
            handle(torch.zeros(256, 512, device=device)).sum().backward()
            with pytest.raises(BatchesError, match="too late"):
                first.backward()


def measured(device: str) -> None:
    model = Wide(1024, device)
    for mode in (torch.no_grad, torch.inference_mode):
        handle = interleave(model)
        with mode():
            for seed in range(MOST_STEPS + 2):
                x = torch.randn(2048, 1024, generator=torch.Generator().manual_seed(seed)).to(device)
                assert torch.allclose(handle(x), model(x), atol=1e-4)
        report = handle.report()
        assert set(report.measured_ms) == {"one batch", GROUPS, COPIES}
        ways = [None] * dist.get_world_size()
        dist.all_gather_object(ways, report.way)
        assert len(set(ways)) == 1


def recorded(device: str) -> None:
    model, x = Wide(2048, device), torch.randn(4096, 2048, device=device)
    for way in (GROUPS, COPIES):
        handle = interleave(model, way=way)
        with torch.no_grad():
            for _ in range(3):
                handle(x)
        report = handle.report()
        assert report.communication_ms is not None
        assert report.hidden_ms is not None
        assert len(report.timeline) == 16
        assert 0 < report.hidden_ms <= report.communication_ms


def ddp(device: str) -> None:
    inner = Gathering().to(device)
    del inner.unused
    model = DistributedDataParallel(inner, device_ids=[torch.cuda.current_device()])
    x = same_input(seed=dist.get_rank()).to(device)
    with quiet():
        for way in (GROUPS, COPIES):
            handle = interleave(model, way=way)
            for _ in range(3):
                assert_near(train(handle, model, x), train(model, model, x))


def dtensor_parallel(device: str) -> None:
    x = same_input().to(device)
    plain, model = Tensors().to(device), Tensors().to(device)
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel(), "q": ColwiseParallel(), "o": RowwiseParallel()}
    parallelize_module(model, mesh, plan)
    for way in (GROUPS, COPIES):
        handle = interleave(model, way=way)
        for _ in range(2):
            assert_near(train(handle, model, x), train(plain, plain, x))
        with torch.no_grad():
            assert torch.allclose(handle(x), plain(x), atol=NEAR)


def whole_steps(device: str) -> None:
    model = random_model(7).to(device)
    batches = [same_input(4, 1).to(device), same_input(2, 2).to(device)]
    steps = interleaved()
    for _ in range(MOST_STEPS + 2):
        with steps as run:
            for batch in batches:
                run(lambda x: model(x).square().mean(), batch, weight=len(batch))
            loss = run.backward()  # type: ignore[no-untyped-call,unused-ignore]
        ours = gradients(model)
        whole = sum(model(each).square().mean() * (len(each) / 6.0) for each in batches)
        assert isinstance(whole, Tensor)
        whole.backward()  # type: ignore[no-untyped-call,unused-ignore]
        assert_near((loss, ours), (whole.detach(), gradients(model)))
    assert len(steps.report().measured_ms) == 3


def captured_whole_steps(device: str) -> None:
    whole_steps_captured(device, ("one batch", GROUPS, COPIES, None))


class Syncing(nn.Module):
    """What a graph cannot hold: a value that the CPU waits for."""

    def forward(self, x: Tensor) -> Tensor:
        return all_sum(x * (1.0 if x.sum().item() > 0 else 2.0))


def what_cannot_be_captured(device: str) -> None:
    model, x = Syncing(), torch.ones(8, 16, device=device)
    with torch.no_grad():
        handle = interleave(model, capture=True)
        for _ in range(MOST_STEPS + 2):
            assert torch.allclose(handle(x), model(x))
        report = handle.report()
    assert report.measured_ms
    assert "captured" not in report.way
    assert any("is left out" in note for note in report.notes)
    drawn = list[Tensor]()
    for _ in range(2):  # torch's generator is in no capture any more
        torch.cuda.manual_seed(3)
        drawn.append(torch.rand(4, device=device))
    assert torch.equal(*drawn)


class Dropping(nn.Module):
    """Its own rows, dropped, behind a sum over the ranks."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(x + 0.0 * all_sum(x.detach()))


def captured_random_numbers(device: str) -> None:
    """Each replay has others, and its backward those of its forward, also when another capture has failed since then."""
    handle, x, masks = (
        interleave(Dropping(), way=GROUPS, capture=True),
        torch.ones(8, 64, device=device),
        list[Tensor](),
    )
    x.requires_grad_()
    for number in range(6):
        if number == 4:
            with torch.no_grad():
                failing = interleave(Syncing(), way="one batch", capture=True)
                failing(x)
            assert failing.report().way == "one batch"
        out = handle(x)
        masks.append(out.detach() != 0)
        out.sum().backward()
        assert x.grad is not None
        assert torch.equal(x.grad != 0, masks[-1])
        x.grad = None
    assert handle.report().way == f"{GROUPS}, captured"
    assert len({tuple(mask.flatten().tolist()) for mask in masks}) == len(masks)


SHARED: dict[str, Case] = {
    "random_models": random_models,
    "long_steps": long_steps,
    "replayed": replayed,
    "freed": freed,
    "measured": measured,
    "close_ways_are_timed_again": close_ways_are_timed_again,
    **WATCHES,
    "recorded": recorded,
    "ddp": ddp,
    "sharded_modules_in_whole_steps": sharded_modules_in_whole_steps,
    "outputs_that_do_not_join": outputs_that_do_not_join,
    "futures_of_works": futures_of_works,
    **STATES,
    "whole_steps": whole_steps,
    "what_cannot_be_captured": what_cannot_be_captured,
    "meet": meet,
}
"""Also of ranks that share a GPU, by gloo."""

BY_NCCL: dict[str, Case] = {
    "captured": captured,
    "captured_training": captured_training,
    "captured_whole_steps": captured_whole_steps,
    "captured_random_numbers": captured_random_numbers,
    "fsdp2": fsdp2,
    "dtensor_parallel": dtensor_parallel,
}
"""What takes NCCL: graphs, and functional collectives (those of gloo end the process with tensors on a GPU, torch 2.11)."""

CASES = {**SHARED, **BY_NCCL}
