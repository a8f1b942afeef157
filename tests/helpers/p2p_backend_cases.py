"""Cases of the backend ``crossfade`` of torch.distributed that all ranks of a group run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as torch_schedules

import crossfade.p2p.backend
from crossfade.p2p.backend import CrossfadeGroup
from tests.helpers.ranks import Case


@contextmanager
def new_group() -> Iterator[CrossfadeGroup]:
    group: Any = dist.new_group(backend=crossfade.p2p.backend.NAME)
    assert isinstance(group, CrossfadeGroup)
    yield group
    dist.destroy_process_group(group)


def tags_in_reverse(device: str) -> None:
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    there, back = (rank + 1) % num_ranks, (rank - 1) % num_ranks
    with new_group() as group:
        assert dist.get_backend(group) == "crossfade"
        works = [dist.isend(torch.full((9,), float(k), device=device), there, group, tag=k) for k in range(8)]
        for k in reversed(range(8)):
            target = torch.zeros(9, device=device)
            dist.recv(target, back, group, tag=k)
            assert target.eq(k).all()
        for work in works:
            assert work is not None
            work.wait()
            assert work.exception() is None


def a_batch(device: str) -> None:
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    with new_group() as group:
        for length in (5, 300_000):
            received = [torch.zeros(length, device=device) for _ in range(num_ranks)]
            sent = torch.full((length,), float(rank), device=device)
            ops = [
                dist.P2POp(op, tensor, peer, group)
                for peer in range(num_ranks)
                if peer != rank
                for op, tensor in ((dist.irecv, received[peer]), (dist.isend, sent))
            ]
            for work in dist.batch_isend_irecv(ops):
                work.wait()
            assert all(each.eq(peer).all() for peer, each in enumerate(received) if peer != rank)


def from_any_rank(device: str) -> None:
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    with new_group() as group:
        if rank:
            dist.send(torch.full((3,), float(rank), device=device), 0, group, tag=4)
            return
        came = set()
        for _ in range(num_ranks - 1):
            target = torch.zeros(3, device=device)
            src = dist.recv(target, None, group, tag=4)
            assert target.eq(src).all()
            came.add(src)
        assert came == set(range(1, num_ranks))


def collectives(device: str) -> None:
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    with new_group() as group:
        x = torch.full((4,), float(rank), device=device)
        dist.all_reduce(x, group=group)
        assert x.eq(sum(range(num_ranks))).all()
        rows = [torch.zeros(2, device=device) for _ in range(num_ranks)]
        dist.all_gather(rows, torch.full((2,), float(rank), device=device), group=group)
        assert [row[0].item() for row in rows] == list(range(num_ranks))
        y = torch.full((2,), float(rank), device=device)
        dist.broadcast(y, 1, group=group)
        assert y.eq(1).all()
        dist.barrier(group=group)
        total = funcol.all_reduce(torch.ones(3, device=device), "sum", group)
        assert torch.equal(total + 0, torch.full((3,), float(num_ranks), device=device))
        mesh = DeviceMesh.from_group(group, device)
        gathered = funcol.all_gather_tensor(torch.full((1,), float(rank), device=device), 0, mesh)
        assert gathered.tolist() == list(range(num_ranks))
        said: list[Any] = [None] * num_ranks
        dist.all_gather_object(said, {"rank": rank}, group=group)
        assert said[-1] == {"rank": num_ranks - 1}


_WIDTH, _BATCH, _NUM_MICROBATCHES, _NUM_STEPS = 16, 16, 8, 6


def _parts(num_parts: int, device: str) -> list[nn.Module]:
    torch.manual_seed(7)
    return [nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.Tanh()).to(device) for _ in range(num_parts)]


def _losses(schedule_name: str, group: Any, device: str) -> list[float]:
    """The losses of a few training steps of a pipeline with the group."""
    rank, num_ranks = dist.get_rank(group), dist.get_world_size(group)
    kind = getattr(torch_schedules, schedule_name)
    is_multi = issubclass(kind, torch_schedules.PipelineScheduleMulti)
    num_stages = 2 * num_ranks if is_multi else num_ranks
    is_v = schedule_name in ("ScheduleZBVZeroBubble", "ScheduleDualPipeV")
    places = [rank, 2 * num_ranks - 1 - rank] if is_v else list(range(rank, num_stages, num_ranks))
    parts = _parts(num_stages, device)
    stages = [PipelineStage(parts[place], place, num_stages, torch.device(device), group=group) for place in places]
    schedule = kind(stages if is_multi else stages[0], _NUM_MICROBATCHES, loss_fn=nn.functional.mse_loss)
    parameters = [parameter for place in places for parameter in parts[place].parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    generator = torch.Generator().manual_seed(3)
    losses: list[float] = []
    for _ in range(_NUM_STEPS):
        x, y = (torch.randn(_BATCH, _WIDTH, generator=generator).to(device) for _ in range(2))
        of_step: list[torch.Tensor] = []
        inputs = (x,) if 0 in places else ()
        has_last = num_stages - 1 in places
        schedule.step(*inputs, **({"target": y, "losses": of_step} if has_last else {}))
        optimizer.step()
        optimizer.zero_grad()
        losses.extend(loss.item() for loss in of_step)
    return losses


def the_whole_world(device: str) -> None:
    """As the backend of `init_process_group`, alone or in a list; the world before comes back."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    store: Any = dist.distributed_c10d._get_default_store()
    dist.destroy_process_group()
    for backend in ("crossfade", "cuda:crossfade,cpu:gloo", "gloo"):
        prefix = dist.PrefixStore(backend, store)  # type: ignore[attr-defined,unused-ignore]
        dist.init_process_group(backend, store=prefix, rank=rank, world_size=num_ranks)
        place = "cpu" if backend == "gloo" else device  # gloo sends no other tensors
        work = dist.isend(torch.full((3,), float(rank), device=place), (rank + 1) % num_ranks)
        target = torch.zeros(3, device=place)
        dist.recv(target, (rank - 1) % num_ranks)
        assert work is not None
        work.wait()
        assert target.eq((rank - 1) % num_ranks).all()
        part = dist.new_group([0, 1])
        if rank < 2:
            assert type(part) is type(dist.group.WORLD)
            dist.all_reduce(target, group=part)
        if backend != "gloo":
            assert isinstance(dist.group.WORLD, CrossfadeGroup)
            dist.destroy_process_group()


SCHEDULES = (
    "ScheduleGPipe",
    "Schedule1F1B",
    "ScheduleInterleaved1F1B",
    "ScheduleInterleavedZeroBubble",
    "ScheduleZBVZeroBubble",
    "ScheduleDualPipeV",
)


def pipelines(device: str) -> None:
    """Every schedule of the installed torch trains to the same losses as over torch's own group, bit for bit."""
    others = dist.new_group()
    is_comparable = device == "cpu" or "nccl" in dist.get_backend(others)  # gloo sends no CUDA tensors
    with new_group() as group:
        for name in SCHEDULES:
            if not hasattr(torch_schedules, name):
                continue
            got = _losses(name, group, device)
            if is_comparable:
                assert got == _losses(name, others, device), name
            else:
                assert got == pytest.approx(_losses(name, group, "cpu"), rel=1e-3), name
            if dist.get_rank() == (0 if "V" in name else dist.get_world_size() - 1):
                assert len(got) == _NUM_STEPS * _NUM_MICROBATCHES, name
    dist.destroy_process_group(others)


def options(device: str) -> None:
    """Arguments of the communicator; a wrong one is refused on all ranks."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    given: Any = {"transport": "staged", "buffer_bytes": 1 << 20}
    group: Any = dist.new_group(backend="crossfade", pg_options=given)
    value, target = torch.full((100_000,), float(rank), device=device), torch.zeros(100_000, device=device)
    works = [dist.isend(value, (rank + 1) % num_ranks, group), dist.irecv(target, (rank - 1) % num_ranks, group)]
    for work in works:
        assert work is not None
        work.wait()
    assert target.eq((rank - 1) % num_ranks).all()
    assert group.p2p.statistics().num_copied_first == 1
    dist.destroy_process_group(group)
    wrong: Any = {"transport": "pigeons"}
    with pytest.raises(ValueError, match=r"the transport is 'pigeons'\nhint: it is one of auto, copy, staged, tcp"):
        dist.new_group(backend="crossfade", pg_options=wrong)


CASES: dict[str, Case] = {
    case.__name__: case
    for case in (tags_in_reverse, a_batch, from_any_rank, collectives, pipelines, options, the_whole_world)
}
