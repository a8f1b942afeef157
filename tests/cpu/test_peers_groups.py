"""Which group a call means: one of torch.distributed, opened on first use, or one that was opened before."""

from __future__ import annotations

import gc
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from weakref import ref

import pytest

pytest.importorskip("torch", reason="groups are torch.distributed's")

import torch
import torch.distributed as dist

import crossfade
from crossfade import ops, peers
from crossfade.batches.carriers.buffers import open_buffers
from crossfade.errors import ChannelClosed, DeviceError
from crossfade.peers import group, groups
from crossfade.peers.groups import find_group, key_of
from tests.helpers.device_pair import run_workers
from tests.helpers.ranks import join_world


def ones(*shape: int) -> torch.Tensor:
    return torch.ones(*shape)


def values(tensor: torch.Tensor) -> list[float]:
    """Those that occur."""
    return sorted(set(tensor.flatten().tolist()))


# Of one rank


@pytest.fixture
def world(tmp_path: Path) -> Iterator[Path]:
    join_world(0, 1, str(tmp_path / "store"))
    yield tmp_path
    peers.close_groups()
    if dist.is_initialized():
        dist.destroy_process_group()


def test_without_a_process_group_the_error_says_what_to_call() -> None:
    hint = r"no process group\nhint: call torch.distributed.init_process_group"
    with pytest.raises(DeviceError, match=hint):
        peers.all_reduce(ones(2))
    with pytest.raises(DeviceError, match=hint):
        ops.matmul_all_reduce(ones(2, 2), ones(2, 2))


def test_the_first_call_opens_and_all_others_find_it(world: Path) -> None:
    assert peers.all_reduce(ones(2)).tolist() == [1, 1]
    group = peers.group_of(None, "cpu")
    assert group is peers.group_of(dist.group.WORLD, ones(1)) is peers.group_of(group)
    assert ops.matmul_reduce_scatter(ones(4, 2), ones(2, 3), candidate="rounds").tolist() == [[2] * 3] * 4
    assert (group.lane().statistics().num_calls, group.lane().is_replayable) == (2, True)
    with pytest.raises(ValueError, match=r"no lane 1\nhint: open_group\(num_lanes"):
        peers.all_gather(ones(2), lane=1)


def test_a_group_that_was_opened_is_the_one_that_its_process_group_means(world: Path) -> None:
    own = peers.open_group(device="cpu", buffer_bytes=1 << 16, num_lanes=2)
    peers.open_group(device="cpu").close()
    assert peers.group_of(None, "cpu") is own
    assert peers.all_gather(ones(3), lane=1).tolist() == [1, 1, 1]
    own.close()
    assert peers.all_gather(ones(3)).tolist() == [1, 1, 1]
    assert peers.group_of(None, "cpu") is not own


def test_a_closed_group_is_refused_as_before(world: Path) -> None:
    own = peers.open_group(device="cpu")
    own.close()
    with pytest.raises(ChannelClosed, match="the group is closed"):
        ops.matmul_all_reduce(ones(2, 2), ones(2, 2), own)


@pytest.mark.parametrize(
    ("group", "tensor", "text"), [("gloo", ones(2), "the group is a str"), (None, [1.0], "a list")]
)
def test_what_is_no_group_and_no_tensor(world: Path, group: Any, tensor: Any, text: str) -> None:
    with pytest.raises(TypeError, match=f"{text}\nhint: "):
        peers.all_reduce(tensor, group)


def test_closing_is_for_all_and_the_next_call_opens_again(world: Path) -> None:
    peers.all_reduce(ones(2))
    first = peers.group_of(None, "cpu")
    peers.close_groups()
    peers.close_groups()
    with pytest.raises(ChannelClosed):
        first.lane()
    assert peers.all_reduce(ones(2)).tolist() == [1, 1]


def test_layers_and_models_take_no_group_either(world: Path) -> None:
    up = ops.ColumnParallelLinear(4, 6, sequence_parallel=True)
    down = ops.RowParallelLinear(6, 4, sequence_parallel=True)
    x = torch.randn(5, 2, 4, requires_grad=True)
    down(up(x)).sum().backward()
    whole = torch.nn.functional.linear(torch.nn.functional.linear(x, up.weight, up.bias), down.weight, down.bias)
    assert torch.allclose(down(up(x)), whole, atol=1e-5)
    model = ops.parallelize(torch.nn.ModuleDict({"up": torch.nn.Linear(4, 6)}), {"up": "colwise"})
    assert "rank 0 of 1" in str(model["up"])  # type: ignore[index]
    assert up.group is peers.group_of(None, "cpu")
    assert torch.equal(ops.regions.gather(ops.regions.split(x)), x)


def test_what_is_compiled_means_the_process_group_and_not_what_was_opened(world: Path) -> None:
    weight = torch.randn(3, 4)

    def step(x: torch.Tensor) -> torch.Tensor:
        return ops.matmul_all_reduce(x, weight.t()).relu()

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    x = torch.randn(2, 4)
    assert torch.allclose(compiled(x), step(x))
    peers.close_groups()
    assert torch.allclose(compiled(x), step(x))
    assert find_group(key_of(None), "cpu") is peers.group_of(None, "cpu")


def test_a_shape_is_prepared_on_the_default_group(world: Path) -> None:
    chosen = ops.prepare("matmul_all_reduce", m=4, n=4, k=4, dtype="float32")
    assert ops.tuner_of().choose(ops.Shape("matmul_all_reduce", 4, 4, 4, "float32", "nt", 1)) == chosen


def test_a_staged_group_is_meant_only_where_there_is_no_other(world: Path) -> None:
    with ExitStack() as undo:
        staged = peers.open_group(device="cpu", is_staged=True)
        undo.callback(staged.close)
        assert peers.group_of(None, "cpu") is staged
        direct = peers.open_group(device="cpu")
        undo.callback(direct.close)
        assert peers.group_of(None, "cpu") is direct


def test_nothing_keeps_a_group_that_was_closed(world: Path) -> None:
    peers.all_reduce(ones(2))
    place = id(dist.group.WORLD)
    assert len(group._OF[place]) == 1
    peers.close_groups()
    gc.collect()
    assert not group._OF[place]
    dist.destroy_process_group()
    assert place not in group._OF


class Summing(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(x)
        return x


def _interleaved(**options: Any) -> Any:
    module = crossfade.interleave(Summing(), **options)
    module(ones(4, 2))
    return module


@pytest.mark.parametrize(
    "use",
    [
        lambda: peers.all_reduce(ones(2)),
        lambda: ops.matmul_all_reduce(ones(2, 2), ones(2, 2)),
        _interleaved,
        lambda: _interleaved(way="copy engines"),
        lambda: _interleaved(group=dist.group.WORLD),
    ],
)
def test_a_process_group_ends_when_it_is_destroyed(world: Path, use: Callable[[], object]) -> None:
    """Threads of one that outlives that end the process with SIGABRT where they free a tensor while the interpreter ends."""
    used = use()
    process_group = ref(dist.group.WORLD)
    dist.destroy_process_group()
    assert process_group() is None
    del used


def test_a_destroyed_group_to_which_somebody_has_a_reference(world: Path) -> None:
    kept = dist.group.WORLD
    module, group = _interleaved(), peers.group_of(None, "cpu")
    assert group.process_group is kept
    dist.destroy_process_group()
    assert group.process_group is None
    join_world(0, 1, str(world / "second"))
    with pytest.raises(crossfade.BatchesError, match="destroyed\nhint: interleave the module again"):
        module(ones(6, 2))
    with pytest.raises(DeviceError, match="or it is destroyed"):
        ops.matmul_all_reduce(ones(2, 2), ones(2, 2), group, candidate="plain")


# Between two


def _rank(peers_of_test: Any, rank: int, folder: str) -> dict[str, Any]:
    """Groups that come and go, as a program makes them."""
    told: dict[str, Any] = {}
    join_world(rank, 2, f"{folder}/first")
    told["sum"] = peers.all_reduce(torch.full((3,), rank + 1.0)).tolist()
    a, b = torch.full((4, 2), rank + 1.0), ones(2, 3)
    told["product"] = values(ops.matmul_all_reduce(a, b))
    alone, pair = dist.new_group([rank]), None
    for each in range(2):
        made = dist.new_group([each])
        alone = made if each == rank else alone
    pair = dist.new_group([0, 1])
    told["alone"] = peers.all_reduce(torch.full((1,), rank + 1.0), alone).tolist()
    told["pair"] = values(ops.all_gather_matmul(a, b, pair))
    first = peers.group_of(None, "cpu")
    told["apart"] = len({first, peers.group_of(alone, "cpu"), peers.group_of(pair, "cpu")})
    dist.destroy_process_group()
    join_world(rank, 2, f"{folder}/second")
    told["again"] = peers.all_reduce(torch.full((3,), rank + 1.0)).tolist()
    try:
        first.lane()
    except ChannelClosed:
        told["old"] = "closed"
    told["left"] = len(groups._OPENED)
    dist.destroy_process_group()
    return told


def test_groups_that_come_and_go_between_two_ranks(tmp_path: Path) -> None:
    wanted = {
        "sum": [3, 3, 3],
        "product": [6],
        "pair": [2, 4],
        "apart": 3,
        "again": [3, 3, 3],
        "old": "closed",
        "left": 2,  # the new one, and that of one rank, whose rank has opened no other one
    }
    for rank, told in enumerate(run_workers([_rank] * 2, [(rank, str(tmp_path)) for rank in range(2)])):
        assert told.pop("alone") == [rank + 1]
        assert told == wanted


def _slow(rank: int, folder: str) -> None:
    join_world(rank, 2, f"{folder}/store")
    x = torch.full((1 << 16,), rank + 1.0)
    peers.all_reduce(x)
    if not rank:
        child = os.fork()
        if not child:
            sys.exit()  # runs what is done at exit, and leaves the group alone
        os.waitpid(child, 0)
    for _ in range(20):
        assert peers.all_reduce(x)[0] == 3
    dist.destroy_process_group()


def _in_two_groups(rank: int, folder: str) -> None:
    """The middle one of three ranks opens last what it shares with one, and the other one batches' buffers."""
    join_world(rank, 3, f"{folder}/store")
    pairs = [dist.new_group([0, 1]), dist.new_group([1, 2])]
    if rank < 2:
        peers.all_reduce(ones(4), pairs[0])
        open_buffers(pairs[0], torch.device("cpu"), 2)
    if rank:
        peers.all_reduce(ones(4), pairs[1])
    dist.destroy_process_group()


@pytest.mark.parametrize(("work", "num_ranks"), [(_slow, 2), (_in_two_groups, 3)])
def test_ranks_end_without_a_word(tmp_path: Path, work: Callable[[int, str], None], num_ranks: int) -> None:
    """Nobody closes anything: the process that is done first waits for the other one's last call."""
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=work, args=(rank, str(tmp_path))) for rank in range(num_ranks)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(30)
    assert [process.exitcode for process in processes] == [0] * num_ranks
