"""Random graphs with collectives between processes, held against the same graph in one thread."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import crossfade
from crossfade.collective import allreduce

torch = pytest.importorskip("torch", reason="collectives need torch")

from tests.helpers.collective_bench import Bench, both_benches  # noqa: E402
from tests.helpers.collective_makers import NUM_ACTORS  # noqa: E402
from tests.helpers.counts import num  # noqa: E402

both = both_benches


@dataclass(frozen=True)
class Draw:
    """A graph with collectives: each step is a call on one actor or a collective of some, of values that they have."""

    steps: tuple[tuple[str, tuple[int, ...], tuple[int, ...], str], ...]
    dtype: str
    transport: str
    is_by_copy: bool
    overlap: bool
    max_inflight: int


@st.composite
def draws(draw: st.DrawFn) -> Draw:
    kinds = ("add", "fail", "allreduce", "allgather", "reducescatter", "broadcast", "buckets")
    step = st.tuples(
        st.sampled_from(kinds),
        st.permutations(range(NUM_ACTORS)).flatmap(lambda p: st.integers(2, NUM_ACTORS).map(lambda n: tuple(p[:n]))),
        st.lists(st.integers(0, 99), min_size=4, max_size=4).map(tuple),
        st.sampled_from(("sum", "min", "max")),
    )
    return Draw(
        tuple(draw(st.lists(step, min_size=1, max_size=6))),
        draw(st.sampled_from(("int64", "float32"))),
        draw(st.sampled_from(("auto", "gloo"))),
        draw(st.booleans()),
        draw(st.booleans()),
        draw(st.integers(1, 4)),
    )


def build_random(drawn: Draw, actors: list[Any], inp: Any) -> list[Any]:
    """The leaves of the graph. All values are of 6 numbers, or are cut or repeated to that by the next call."""
    values: list[list[Any]] = [[actor.make.bind(inp, (6,), drawn.dtype)] for actor in actors]
    used: set[Any] = set()

    def take(rank: int, choice: int) -> Any:
        node = values[rank][choice % len(values[rank])]
        used.add(node)
        return node

    for kind, ranks, choices, op in drawn.steps:
        if kind == "add":
            other = take(ranks[1], choices[1]).with_tensor_transport(drawn.transport)
            made = {ranks[0]: [actors[ranks[0]].add.bind(take(ranks[0], choices[0]), other)]}
        elif kind == "fail":
            made = {ranks[0]: [actors[ranks[0]].fail_for.bind(inp, choices[0] % 5)]}
        elif kind == "buckets":
            rows = allreduce.bind([[take(r, choices[0]), take(r, choices[1])] for r in ranks], op=op)
            made = dict(zip(ranks, rows, strict=True))
        else:
            nodes = [take(rank, choice) for rank, choice in zip(ranks, choices, strict=False)]
            options = {"op": op} if "reduce" in kind else {}
            outputs = getattr(crossfade.collective, kind).bind(nodes, **options)
            made = {rank: [output] for rank, output in zip(ranks, outputs, strict=True)}
        for rank, nodes in made.items():
            values[rank] += nodes
    return [node for each in values for node in each if node not in used]


def comparable(value: Any) -> Any:
    """What must be the same on both engines: the value, or the error's type and what the method raised."""
    if isinstance(value, crossfade.TaskError):
        return type(value).__name__, repr(value.cause).replace("Maker", "")
    return value


@pytest.mark.timeout(num(600, 3600))
@settings(max_examples=num(30, 1_200))
@given(drawn=draws())
def test_pl4_random_graphs_with_collectives_give_the_same_in_one_thread(both: tuple[Bench, Bench], drawn: Draw) -> None:
    """Small integers, in floats too, so sums are exact in any order."""
    inline, local = both
    results = [
        bench.run(
            lambda actors, inp: build_random(drawn, actors, inp),
            range(3),
            overlap=drawn.overlap,
            max_inflight=max(3, drawn.max_inflight),
        )
        for bench in (inline, replace(local, is_by_copy=drawn.is_by_copy))
    ]
    for rows in zip(*results, strict=True):
        for one, other in zip(*rows, strict=True):
            wanted, found = comparable(one), comparable(other)
            assert type(wanted) is type(found), (one, other)
            if isinstance(wanted, torch.Tensor):
                assert torch.equal(wanted, found)
            elif wanted != found:  # where several inputs are errors, which one is told depends on what comes first
                kinds = {type(each.cause) for each in (one, other)}
                assert kinds <= {KeyError, ValueError}, (
                    one,
                    other,
                )  # of calls, and of tensors that do not fit together
