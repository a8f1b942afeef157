"""Tagged transfers between two hosts, which are namespaces of this one; and where some ranks are near and others far."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="ranks of a torch.distributed group")

from tests.helpers.p2p_cases import HOSTS
from tests.helpers.ranks import suite
from tests.helpers.two_hosts import LIMIT_S, said_on_two_hosts

TestSomeFar = suite(HOSTS, 3, limit_s=100)


@pytest.mark.timeout(LIMIT_S + 40)
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_two_hosts(num_ranks: int) -> None:
    for rank, answers in said_on_two_hosts("cases", num_ranks).items():
        assert answers, rank
        for name, answer in answers.items():
            assert answer == "ok", f"rank {rank}, {name}: {answer}"
