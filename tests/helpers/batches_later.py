"""Cases of later runs of interleaved batches, where nothing is compared in advance: ranks that come to disagree, or raise; and of
works that the module waits for.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from crossfade.batches import interleave, yield_point
from crossfade.batches.carriers.copy_engines import CopyEngines
from crossfade.batches.carriers.process_groups import ProcessGroups
from crossfade.batches.coroutines.parts import Run
from crossfade.errors import BatchesError
from tests.helpers.batches_models import NEAR, same_input
from tests.helpers.batches_wrappers import GROUPS
from tests.helpers.ranks import Case

NUM_AGREED = 2


class Changing(nn.Module):
    """Does what it is told; its rows are marked, so that it knows its half."""

    def __init__(self, act: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        self.act(x)
        return x


def _raises(act: Callable[[Tensor], Any], later: Callable[[Tensor], Any], error: type[Exception], said: str) -> None:
    """Runs one thing, then another, then none at all: the error comes in the second or in the third."""
    model = Changing(act)
    handle = interleave(model, way=GROUPS, timeout_s=20)
    x = torch.arange(4.0).view(4, 1)
    for _ in range(NUM_AGREED):
        handle(x)
    model.act = later

    def two_more() -> None:
        handle(x)
        model.act = lambda x: yield_point()
        handle(x)

    with pytest.raises(error, match=said):
        two_more()


def ranks_that_disagree_later(device: str) -> None:
    rank = dist.get_rank()

    def later(x: Tensor) -> None:
        for _ in range(1 + rank):
            yield_point()

    said = rf"(?s)disagree in run {NUM_AGREED}.*rank {rank} has come to {2 * NUM_AGREED + 2 * (1 + rank)} collectives"
    _raises(lambda x: yield_point(), later, BatchesError, said)


def a_rank_that_raises_later(device: str) -> None:
    def later(x: Tensor) -> None:
        yield_point()
        if dist.get_rank():
            raise KeyError("mine")

    error, said = (KeyError, "mine") if dist.get_rank() else (BatchesError, "rank 1 has raised: KeyError: 'mine'")
    _raises(lambda x: yield_point(), later, error, said)


def a_collective_that_one_rank_has_alone(device: str) -> None:
    """It waits for the others until its group's limit; then both ranks are told what has led to it."""
    group: Any = dist.new_group(timeout=timedelta(milliseconds=500))

    def act(x: Tensor) -> None:
        dist.all_reduce(torch.ones(2), group=group)

    def later(x: Tensor) -> None:
        act(x)
        if dist.get_rank() and x[0, 0] == 0:
            act(x)

    said = "rank 1 has come to 7 collectives in all, the last one 'batch 0, allreduce of 8 bytes', rank 0 to 6"
    _raises(act, later, BatchesError, said)


def too_few_rows_on_one_rank(device: str) -> None:
    """Where both had enough before. The other one is told behind its own error."""
    rank, group = dist.get_rank(), dist.new_group(timeout=timedelta(milliseconds=500))
    handle = interleave(Changing(lambda x: dist.all_reduce(torch.ones(2), group=group)), way=GROUPS, per_shape=False)
    handle(same_input(4 + rank))
    with pytest.raises(BatchesError if rank else RuntimeError) as caught:
        handle(same_input(4 - 3 * rank))
    assert "fewer rows than 2" in "".join([str(caught.value), *getattr(caught.value, "__notes__", ())])


def stops_where_the_module_waits(device: str) -> None:
    """What it computes before it waits runs in one go, and the other part's start comes before its own wait."""
    seen = list[str]()

    def part(name: str) -> Tensor:
        one, other = same_input(), same_input(seed=6)
        works = [dist.all_reduce(each, async_op=True) for each in (one, other)]
        seen.append(f"{name} has started")
        for number, work in enumerate(works):
            work.wait()
            work.wait()
            seen.append(f"{name} has waited for {number}")
        return one + other

    run = Run(ProcessGroups(), records=True)
    outputs = run.go([lambda: part("a"), lambda: part("b")])
    assert seen == [f"{name} has {what}" for what in ("started", "waited for 0", "waited for 1") for name in "ab"]
    wanted = (same_input() + same_input(seed=6)) * dist.get_world_size()
    assert all(torch.allclose(output, wanted, atol=NEAR) for output in outputs)
    assert [(each.num_collectives, each.num_stops) for each in run.parts] == [(2, 2), (2, 2)]
    spans, _ = run.timeline()
    assert [span.part for span in spans] == [0, 0, 1, 1]
    assert all(span.end_us > span.begin_us and span.size_bytes for span in spans)


def works_that_nobody_waits_for(device: str) -> None:
    """A module may start what another one waits for, or what nobody does."""
    started = list[Any]()

    def starts() -> None:
        started.append(dist.all_reduce(same_input(), async_op=True))

    run = Run(ProcessGroups())
    run.go([starts, starts])
    assert [(each.num_collectives, each.num_stops) for each in run.parts] == [(1, 0), (1, 0)]
    for work in started:
        work.wait()


def futures_of_works(device: str) -> None:
    for carrier in (ProcessGroups(), CopyEngines(2, ProcessGroups())):
        found = list[Any]()

        def asks(found: list[Any] = found) -> None:
            found.append(dist.all_reduce(same_input().to(device), async_op=True).get_future())

        Run(carrier).go([asks, asks])
        for future in found:
            (out,) = future.wait()
            assert torch.allclose(out, same_input().to(device) * dist.get_world_size(), atol=NEAR)


WAITS: dict[str, Case] = {
    "stops_where_the_module_waits": stops_where_the_module_waits,
    "works_that_nobody_waits_for": works_that_nobody_waits_for,
    "futures_of_works": futures_of_works,
}
LATER: dict[str, Case] = {
    "ranks_that_disagree_later": ranks_that_disagree_later,
    "a_rank_that_raises_later": a_rank_that_raises_later,
    "too_few_rows_on_one_rank": too_few_rows_on_one_rank,
    "a_collective_that_one_rank_has_alone": a_collective_that_one_rank_has_alone,
}
