"""GPUs that push into one: one after the other, in the order in which it uses what comes."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch

import crossfade
from crossfade.plan.turns import predecessors

NUM_SENDERS = 3
SIZE_BYTES = 200_000_000
NUM_EXECUTIONS = 20
CLOCKS_US = 50.0
"""How far clocks of different GPUs may be apart in a timeline; a push takes 550."""


class Worker:
    def make(self, number: int) -> Any:
        return torch.full((SIZE_BYTES // 4,), number, dtype=torch.int32, device="cuda")

    def both_ends(self, *values: Any) -> Any:
        return torch.stack([value[place] for value in values for place in (0, -1)]).cpu()


def check_one_after_the_other(share: float, *, overlap: bool) -> None:
    """In the present session: the receiver has a GPU to itself, each sender this share of another one."""
    senders = [crossfade.remote(num_gpus=share)(Worker).remote() for _ in range(NUM_SENDERS)]
    receiver = crossfade.remote(num_gpus=1)(Worker).remote()
    with crossfade.InputNode() as number:
        graph = receiver.both_ends.bind(*(each.make.bind(number) for each in senders)).compile(
            overlap=overlap, record=True
        )
    assert len(predecessors(graph.plan)) == NUM_SENDERS - 1
    for execution in range(NUM_EXECUTIONS):
        assert graph.execute(execution).get(timeout=60).tolist() == [execution] * (2 * NUM_SENDERS)
    spans = [span for span in graph.timeline().spans if span.stream == "push"]
    num_in_order = 0
    for execution in range(2, NUM_EXECUTIONS):
        pushes = sorted((span for span in spans if span.execution == execution), key=lambda span: span.label)
        assert len(pushes) == NUM_SENDERS
        num_in_order += all(later.start_us >= before.end_us - CLOCKS_US for before, later in pairwise(pushes))
    assert num_in_order >= 0.8 * (NUM_EXECUTIONS - 2)  # a host that is late by more than a push loses its turn
    graph.teardown()
