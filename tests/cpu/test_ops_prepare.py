"""`crossfade.ops.prepare`, and captures right behind it, between processes and on one rank, on CPU tensors."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="operators take torch tensors")

from crossfade.ops.ahead import prepare  # noqa: E402
from crossfade.ops.calls.job import (  # noqa: E402
    Operator,
    Shape,
)
from crossfade.ops.choice.candidate import Candidate  # noqa: E402
from crossfade.ops.tuning import TunableOperator  # noqa: E402
from crossfade.peers.opening import open_group  # noqa: E402
from tests.helpers.ops_prepare_cases import CASES  # noqa: E402
from tests.helpers.ranks import suite  # noqa: E402

TestPrepared = suite(CASES, 2, limit_s=60)


@pytest.mark.parametrize("name", CASES)
def test_a_rank_alone(world: None, name: str) -> None:
    CASES[name]("cpu")


def test_what_cannot_be_prepared(world: None) -> None:
    group = open_group(device="cpu")
    with pytest.raises(ValueError, match="no operator 'mm'\nhint: one of matmul_reduce_scatter, "):
        prepare(torch.mm, group, m=1, n=1, k=1)
    with pytest.raises(ValueError, match="int8"):
        prepare("matmul_all_reduce", group, m=1, n=1, k=1, dtype=torch.int8)
    with pytest.raises(ValueError, match="tn"):
        prepare("matmul_all_reduce", group, m=1, n=1, k=1, layout="tn")
    with pytest.raises(ValueError, match="there is no candidate 'magic'"):
        prepare("matmul_all_reduce", group, m=1, n=1, k=1, candidate="magic")
    group.num_ranks = 2
    with pytest.raises(ValueError, match="m of all_gather_matmul is 3\nhint: the rows of all 2 ranks"):
        prepare("all_gather_matmul", group, m=3, n=1, k=1)
    group.close()


def test_what_a_tuner_sets_up_is_not_done(world: None) -> None:
    """A rank that lacks memory says so before another one waits for it."""
    for operator in Operator:
        group = open_group(device="cpu")
        shape = Shape(operator, 6, 4, 2, "float32", "nt", 1)
        run = TunableOperator(operator, group).runner(shape, Candidate("rounds"))
        assert group.lane().statistics().num_calls == 0
        run()
        assert group.lane().statistics().num_calls == 1
        group.close()
