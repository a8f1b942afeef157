"""Tagged transfers between two hosts, which are namespaces of this one; and where some ranks are near and others far."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("torch", reason="ranks of a torch.distributed group")

from tests.helpers.p2p_cases import HOSTS
from tests.helpers.programs import python
from tests.helpers.ranks import suite
from tests.helpers.two_hosts import LIMIT_S, NOT_ALLOWED

TestSomeFar = suite(HOSTS, 3, limit_s=100)


@pytest.mark.timeout(LIMIT_S + 40)
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_two_hosts(num_ranks: int) -> None:
    ran = python("-m", "tests.helpers.two_hosts", str(num_ranks), timeout_s=LIMIT_S + 20)
    if ran.returncode == NOT_ALLOWED:
        pytest.skip(f"no namespaces here: {ran.stderr.strip()}; TestSomeFar goes the same way over loopback")
    assert ran.returncode == 0, ran.stderr
    said = json.loads(ran.stdout.splitlines()[-1])
    assert len(said) == num_ranks
    for rank, answers in said.items():
        assert answers, rank
        for name, answer in answers.items():
            assert answer == "ok", f"rank {rank}, {name}: {answer}"
