"""Cases of groups: ranks that are in different groups, subgroups, errors that all ranks raise, the library's own backend."""

from __future__ import annotations

import dataclasses
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import crossfade.p2p.backend
from crossfade.batches import interleave, interleaved
from crossfade.batches.carriers import buffers, process_groups
from crossfade.batches.ranks.agreement import Agreement
from crossfade.batches.runner import Runner, device_of
from crossfade.errors import BatchesError, ChannelBroken
from crossfade.peers import close_groups, steps
from tests.helpers.ranks import Case

GROUPS_WAY = "process groups"


class Summing(nn.Module):
    """Adds up over a group; refuses wide inputs."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] > 9:
            raise ValueError("too wide")
        y = x.clone()
        dist.all_reduce(y, group=self.group)
        return y


def ranks_in_different_groups(device: str) -> None:
    """A subgroup that a rank is not in, and a handle on it, before handles of all ranks."""
    last = dist.get_world_size() - 1
    some = dist.new_group(list(range(last)))
    if dist.get_rank() < last:
        handle = interleave(Summing(some), group=some, way=GROUPS_WAY, timeout_s=20)
        assert torch.equal(handle(torch.ones(4, 8)), torch.full((4, 8), float(last)))
    for _ in range(2):
        handle = interleave(Summing(), way=GROUPS_WAY, timeout_s=20)
        assert torch.equal(handle(torch.ones(4, 8)), torch.full((4, 8), last + 1.0))
    dist.barrier()


def an_error_that_all_ranks_raise(device: str) -> None:
    handle = interleave(Summing(), way=GROUPS_WAY, timeout_s=20)
    for width in (8, 10, 7, 10, 6):
        if width > 9:
            with pytest.raises(ValueError, match="too wide"):
                handle(torch.ones(4, width))
        else:
            assert torch.equal(handle(torch.ones(4, width)), torch.full((4, width), float(dist.get_world_size())))


def an_error_of_the_run_before(device: str) -> None:
    """It is not taken for what a rank says next."""
    agreement = Agreement(None, timeout_s=0.3)
    with pytest.raises(ValueError, match="too wide"), agreement.following({}):
        raise ValueError("too wide")
    dist.barrier()
    if dist.get_rank() == 0:
        with pytest.raises(BatchesError, match="have come to nothing"):
            agreement.compare("the next call")
    dist.barrier()


def an_error_of_one_rank(device: str) -> None:
    """In a run that compares two groups: all raise, and a new handle of the same module goes on."""
    pair, last = dist.new_group([0, 1]), dist.new_group([2])

    class Failing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x.clone()
            dist.all_reduce(y)
            if dist.get_rank() == 0 and x.shape[1] > 9:
                raise ValueError("too wide for this one")
            dist.all_reduce(y, group=pair if dist.get_rank() < 2 else last)
            dist.all_reduce(y)
            return y

    module = Failing()
    handle = interleave(module, way=GROUPS_WAY, timeout_s=20)
    handle(torch.ones(4, 8))
    with pytest.raises((ValueError, BatchesError), match="too wide for this one"):
        handle(torch.ones(4, 10))
    dist.barrier()
    interleave(module, way=GROUPS_WAY, timeout_s=20)(torch.ones(4, 8))


def a_group_made_in_another_thread_meanwhile(device: str) -> None:
    names = list[str]()
    with process_groups._NAMES.use("of this thread"):
        thread = threading.Thread(target=lambda: names.append(process_groups._inside._process_group_name([0], False)))
        thread.start()
        thread.join()
        names.append(process_groups._inside._process_group_name([0], True))
    assert names[0] != "of this thread" == names[1]


def two_threads_that_make_copies_in_other_orders(device: str) -> None:
    groups, rank, done = [dist.new_group() for _ in range(2)], dist.get_rank(), list[Tensor]()
    makes = threading.Event()
    before = process_groups.ProcessGroups._copy

    def late(self: Any, group: dist.ProcessGroup) -> dist.ProcessGroup:
        if group is groups[rank % 2]:  # the other one is made when this one waits for the other ranks already
            makes.set()
        else:
            assert makes.wait(20)
        return before(self, group)

    def work(group: dist.ProcessGroup) -> None:
        handle = interleave(Summing(group), group=group, way=GROUPS_WAY, timeout_s=20)
        done.append(handle(torch.ones(4, 8)))

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(process_groups.ProcessGroups, "_copy", late)
        threads = [threading.Thread(target=work, args=(group,), daemon=True) for group in groups]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
    assert len(done) == 2
    assert all(torch.equal(each, torch.full((4, 8), float(dist.get_world_size()))) for each in done)


def a_copy_of_some_ranks_is_made_by_none_but_them(device: str) -> None:
    """Where the default group is bound to a device, torch would split it off with all ranks."""
    default: Any = dist.distributed_c10d._get_default_group()
    bound, seen = torch.device("cuda", 0), list[Any]()
    before = dist.new_group

    def noted(*args: Any, **kwargs: Any) -> Any:
        seen.append(default.bound_device_id)
        default.bound_device_id = None  # gloo does not know the device
        return before(*args, **kwargs)

    some, whole = dist.new_group([0, 1]), dist.new_group()
    for group, wanted in ((some, None), (whole, bound)):
        if group is some and dist.get_rank() > 1:
            continue
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(dist, "new_group", noted)
            default.bound_device_id = bound
            interleave(Summing(group), group=group, way=GROUPS_WAY, timeout_s=20)(torch.ones(4, 8))
        assert seen == [wanted], seen
        seen.clear()
        default.bound_device_id = None


class _SummingAlone(nn.Module):
    """Rank 0 has a collective more than the others, in a group of its own."""

    def __init__(self, own: dist.ProcessGroup, *, by_name: bool) -> None:
        super().__init__()
        self.own = own
        self.by_name = by_name

    def forward(self, x: Tensor) -> Tensor:
        operators: Any = torch.ops._c10d_functional
        if dist.get_rank() == 0:
            given = {"group_name": self.own.group_name} if self.by_name else {}
            args = [] if self.by_name else [self.own.group_name]
            x = operators.wait_tensor(operators.all_reduce(x * 2, "sum", *args, **given))
        return x + 1


def a_collective_of_one_rank_alone(device: str) -> None:
    own = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    for by_name in (False, True):
        handle = interleave(_SummingAlone(own, by_name=by_name), way=GROUPS_WAY, timeout_s=20)
        wanted = 3.0 if dist.get_rank() == 0 else 2.0
        for _ in range(2):
            assert torch.equal(handle(torch.ones(4, 8)), torch.full((4, 8), wanted))


def a_handle_of_fewer_ranks_than_the_collectives(device: str) -> None:
    own = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    handle = interleave(Summing(), group=own, way=GROUPS_WAY, timeout_s=20)
    for _ in range(2):
        assert torch.equal(handle(torch.ones(4, 8)), torch.full((4, 8), float(dist.get_world_size())))


def what_can_be_captured_on_one_rank_only(device: str) -> None:
    with pytest.raises(BatchesError, match="it can be captured"):
        Runner(2, None, None, True, None, 20.0, watches=False).tuner(
            "cpu", ["float32[4]"], "", in_one_stream=False, captures=dist.get_rank() == 0
        )


def a_broken_copy_and_closed_groups(device: str) -> None:
    """A call that fails in the middle breaks its buffers, for other handles too. They are opened anew when all have closed them."""
    module, x = Summing(), torch.ones(4, 8)
    wanted = torch.full((4, 8), float(dist.get_world_size()))
    handle = interleave(module, way="copy engines", timeout_s=20)
    assert torch.equal(handle(x), wanted)

    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("no memory, on all ranks")

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(steps, "end", fail)
        with pytest.raises((torch.OutOfMemoryError, BatchesError), match="no memory"):
            handle(x)
    with pytest.raises((ChannelBroken, BatchesError)):
        interleave(module, way="copy engines", timeout_s=20)(x)
    close_groups()
    assert torch.equal(interleave(module, way="copy engines", timeout_s=20)(x), wanted)


def buffers_of_a_destroyed_group(device: str) -> None:
    """They are given back when others are opened."""
    open_before = len(buffers._OPENED)
    for _ in range(3):
        group = dist.new_group()
        handle = interleave(Summing(group), group=group, way="copy engines", timeout_s=20)
        assert torch.equal(handle(torch.ones(4, 8)), torch.full((4, 8), float(dist.get_world_size())))
        del handle
        dist.destroy_process_group(group)
        del group
    assert len(buffers._OPENED) <= open_before + 1


def where_a_call_computes(device: str) -> None:
    """On a GPU also where its arguments are none there, if the ranks communicate nowhere else."""
    module, on_gpu = nn.Linear(2, 2), dist.new_group(backend="cuda:gloo")
    assert device_of({"cuda"}, module, None) == "cuda"
    for available in (False, True):
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(torch.cuda, "is_available", lambda available=available: available)
            assert device_of(set(), module, None) == device_of({"cpu"}, None, None) == "cpu"
            assert device_of({"cpu"}, module, on_gpu) == ("cuda" if available else "cpu")


def the_own_backend(device: str) -> None:
    group = dist.new_group(backend=crossfade.p2p.backend.NAME)
    handle = interleave(Summing(group), group=group, way=GROUPS_WAY, timeout_s=20)
    for _ in range(3):
        assert torch.equal(handle(torch.ones(4, 8)), torch.full((4, 8), float(dist.get_world_size())))
    assert handle.report().counts.stops == (1, 1)


@dataclasses.dataclass
class Output:
    """What torch's pytree does not know."""

    values: Tensor


class Wrapping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Summing()

    def forward(self, x: Tensor) -> Output:
        return Output(self.inner(x))


def what_cannot_be_joined(device: str) -> None:
    for num_rows in (4, 5):
        with pytest.raises(BatchesError, match="different objects of type Output"):
            interleave(Wrapping(), way=GROUPS_WAY, timeout_s=20)(torch.ones(num_rows, 8))
    with interleaved(way=GROUPS_WAY) as run:
        run(lambda: torch.ones((), requires_grad=True), weight=0)
        with pytest.raises(BatchesError, match="0 in all"):
            run.backward()


GROUPS: dict[str, Case] = {
    each.__name__: each
    for each in (
        ranks_in_different_groups,
        an_error_that_all_ranks_raise,
        an_error_of_the_run_before,
        an_error_of_one_rank,
        a_group_made_in_another_thread_meanwhile,
        two_threads_that_make_copies_in_other_orders,
        a_copy_of_some_ranks_is_made_by_none_but_them,
        a_collective_of_one_rank_alone,
        a_handle_of_fewer_ranks_than_the_collectives,
        what_can_be_captured_on_one_rank_only,
        a_broken_copy_and_closed_groups,
        buffers_of_a_destroyed_group,
        where_a_call_computes,
        the_own_backend,
        what_cannot_be_joined,
    )
}
