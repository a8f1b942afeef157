"""Cases of groups: ranks that are in different groups, subgroups, errors that all ranks raise, the library's own backend."""

from __future__ import annotations

import dataclasses
import threading

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import crossfade.p2p.backend
from crossfade.batches import interleave, interleaved
from crossfade.batches.carriers import process_groups
from crossfade.batches.ranks.agreement import Agreement
from crossfade.errors import BatchesError
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
    with process_groups._named("of this thread"):
        thread = threading.Thread(target=lambda: names.append(process_groups._inside._process_group_name([0], False)))
        thread.start()
        thread.join()
        names.append(process_groups._inside._process_group_name([0], True))
    assert names[0] != "of this thread" == names[1]


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
        the_own_backend,
        what_cannot_be_joined,
    )
}
