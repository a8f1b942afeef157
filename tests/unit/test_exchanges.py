"""Which groups a process looks at before it may wait for a device."""

from __future__ import annotations

from typing import Any

from crossfade.engines.exchanges import Exchanges


class Group:
    def __init__(self) -> None:
        self.is_over = False
        self.num_looks = 0

    def enqueue_all(self) -> None:
        self.num_looks += 1


def test_all_groups_are_looked_at_as_long_as_they_do_something() -> None:
    exchanges: Any = Exchanges()  # groups here are stand-ins
    first, second, third = Group(), Group(), Group()
    exchanges.enqueue_all()
    exchanges.add(first)
    exchanges.enqueue_all()
    exchanges.add(second)
    exchanges.enqueue_all()
    first.is_over = True
    exchanges.forget_over()
    exchanges.add(third)
    exchanges.enqueue_all()
    assert [group.num_looks for group in (first, second, third)] == [2, 2, 1]
    third.is_over = second.is_over = True
    exchanges.forget_over()
    exchanges.enqueue_all()
    assert [group.num_looks for group in (first, second, third)] == [2, 2, 1]
