"""Two hosts between which the link goes down."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="ranks of a torch.distributed group")

from tests.helpers.two_hosts import LIMIT_S, said_on_two_hosts


@pytest.mark.timeout(LIMIT_S + 40)
def test_a_link_that_goes_down() -> None:
    for rank, answer in said_on_two_hosts("cut", 2).items():
        text = f"rank {1 - int(rank)} (of another host) died, or cannot be reached any more: "
        assert answer["said"].startswith(text)
        assert answer["taken_s"] < 25
