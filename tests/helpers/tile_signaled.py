"""Runs the kernel of `matmul_signaled` in Triton's interpreter: callbacks see whole groups, counters, captures and errors.

``TRITON_INTERPRET=1 python -m tests.helpers.tile_signaled``
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch

from crossfade.device.driver import HOST
from crossfade.errors import DeviceError
from crossfade.ops.signaled import signaling
from crossfade.ops.signaled.sides import RowGroup
from crossfade.ops.signaled.signaling import SignaledProducts
from crossfade.ops.signaled.tiles import TilePlan, plan_tiles
from tests.helpers.mended_interpreter import mend_the_interpreter
from tests.helpers.tile_worlds import SMALL, Words, by_columns, integers, poisoned, rounded


class Side:
    """The host in the place of two streams: what is enqueued is done. It notes who went on behind whom."""

    stream: Any = "communication"
    handle = 7

    def __init__(self) -> None:
        self.is_captured = False
        self.seen: list[str] = []

    def is_capturing(self) -> bool:
        return self.is_captured

    def begin(self) -> str:
        self.seen.append("begin")
        return "caller's"

    def fork(self, main: str) -> None:
        self.seen.append("fork")

    def join(self, main: str) -> None:
        assert main == "caller's"
        self.seen.append("join")

    def use(self) -> AbstractContextManager[Any]:
        return nullcontext()


def cut(rows: int, columns: int) -> TilePlan:
    return plan_tiles(rows, columns, tile_rows=16, tile_columns=32, piece_rows=32)


class Site:
    """Products of one lane, and their operands."""

    def __init__(self, kind: str, shape: tuple[int, int, int], *, has_bias: bool = False) -> None:
        m, n, k = shape
        self.words, self.side = Words(), Side()
        self.products = SignaledProducts(HOST, self.words, SMALL, lambda device, lane: self.side)  # type: ignore[arg-type]
        self.a, self.b = integers(m, k, kind, 1), by_columns(integers(k, n, kind, 2))
        self.bias = integers(1, n, kind, 3)[0] if has_bias else None
        self.out = poisoned(m, n, kind)
        wanted = self.a.float() @ self.b.float()
        self.wanted = rounded(wanted if self.bias is None else wanted + self.bias.float(), kind)
        self.told: list[RowGroup] = []

    def see(self, group: RowGroup) -> None:
        assert group.stream == "communication"
        assert group.tensor.data_ptr() == self.out[group.rows].data_ptr()
        assert torch.equal(group.tensor, self.wanted[group.rows])
        self.told.append(group)

    def run(self, on_group: Any = None, *, lane: int = 0) -> None:
        rows, columns = self.out.shape
        plan = cut(rows, columns)
        given = self.a, self.b, self.bias, self.out
        self.products.run(*given, plan, on_group or self.see, reserve_sms=0, lane=lane)

    def counters(self) -> list[torch.Tensor]:
        return [product.counters._words for product in self.products._products.values()]


def check_groups() -> int:
    """Every group once, in order, whole; again and again, eager and captured."""
    cases = [("float16", (70, 64, 24), True), ("bfloat16", (33, 40, 16), False), ("float16", (1, 50, 8), False)]
    for kind, shape, has_bias in cases:
        site = Site(kind, shape, has_bias=has_bias)
        for number in range(4):
            site.out.fill_(torch.nan)
            site.told.clear()
            site.side.is_captured = number % 2 == 1
            site.run()
            ends = [group.rows.stop for group in site.told]
            assert [group.number for group in site.told] == list(range(len(ends)))
            assert [group.rows.start for group in site.told] == [0, *ends[:-1]]
            assert ends[-1] == shape[0]
            assert torch.equal(site.out, site.wanted)
        assert site.side.seen == ["begin", "join"] * 4
        (words,) = site.counters()
        assert not bool(words[len(words) // 2 :].any())  # what is replayed finds them at 0
    return len(cases)


def check_errors() -> None:
    """What a callback raises is raised, behind the join, no further group is told of, and captured counters are put back."""
    site = Site("float16", (100, 40, 16))
    site.run()

    def fail(group: RowGroup) -> None:
        site.told.append(group)
        raise RuntimeError(f"group {group.number} is not wanted")

    for is_captured in (False, True, False):
        site.told.clear()
        site.side.is_captured = is_captured
        with pytest.raises(RuntimeError, match="group 0 is not wanted"):
            site.run(fail)
        assert len(site.told) == 1
        assert site.side.seen[-1] == "join"
        site.run()
    (words,) = site.counters()
    assert not bool(words[len(words) // 2 :].any())


def check_captures() -> None:
    """What was not prepared for this lane is refused in a capture; what was captured is kept when room is made."""
    site = Site("float16", (40, 40, 16))
    site.side.is_captured = True
    with pytest.raises(DeviceError, match=r"not prepared for this shape and lane\nhint: prepare_signaled\(\) it first"):
        site.run()
    site.side.is_captured = False
    site.run()
    site.run(lane=1)
    site.side.is_captured = True
    site.run(lane=1)
    site.side.is_captured = False
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(signaling, "MOST_PRODUCTS", 1)
        site.run(lane=2)
    assert [key.lane for key in site.products._products] == [1, 2]


def main() -> int:
    mend_the_interpreter()
    num_cases = check_groups()
    check_errors()
    check_captures()
    print(f"{num_cases} signaled products")
    return 0


if __name__ == "__main__":
    sys.exit(main())
