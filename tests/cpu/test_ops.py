"""Operators of `crossfade.ops` on one rank, and what they say when something does not fit."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="operators take torch tensors")

from crossfade.errors import ChannelBroken, ChannelClosed, DeviceError  # noqa: E402
from crossfade.ops.calls.job import Layout, Once, Operator, layout_of  # noqa: E402
from crossfade.ops.operators import matmul_all_to_all, matmul_all_to_all_padded  # noqa: E402
from crossfade.peers.group import PeerGroup  # noqa: E402
from tests.helpers.ops_cases import CASES  # noqa: E402
from tests.helpers.ops_inputs import CANDIDATES, FUNCTIONS, check, make  # noqa: E402

A, B = torch.zeros(4, 3), torch.zeros(3, 2)
EVERY = pytest.mark.parametrize("function", FUNCTIONS.values(), ids=list(FUNCTIONS))
TWO_ROWS = [[2, 2], [2, 2]]


@pytest.mark.parametrize("name", [name for name in CASES if name != "counters"])
def test_a_rank_alone(world: None, name: str) -> None:
    CASES[name]("cpu")


@EVERY
@pytest.mark.parametrize(
    ("a", "b", "error", "text"),
    [
        ([1.0], B, TypeError, "a of {} is a list\nhint: give a torch tensor"),
        (A, None, TypeError, "b of {} is a NoneType\nhint: give a torch tensor"),
        (A.to("meta"), B, ValueError, "a of {} is on meta, and the group's device is cpu"),
        (A.clone().requires_grad_(), B.int(), ValueError, "a of {} is torch.float32, and b is torch.int32"),
        ([1.0], B.clone().requires_grad_(), TypeError, "a of {} is a list\nhint: give a torch tensor"),
        (A.to_sparse(), B, ValueError, "a of {} is not a plain strided tensor"),
        (A.int(), B.int(), TypeError, r"{} takes no torch.int32\nhint: one of bfloat16, float16, float32, float64"),
        (A.to(torch.float8_e4m3fn), B, TypeError, r"{} takes no torch.float8_e4m3fn\nhint: torch._scaled_mm"),
        (A, B.double(), ValueError, r"a of {} is torch.float32, and b is torch.float64\nhint: give both"),
        (A, B.t(), ValueError, r"a of {} is of shape \[4, 3\] and b of \[2, 3\]\nhint: .* \(\.\.\., K\) and \(K, N\)"),
        (A[0], B, ValueError, r"a of {} is of shape \[3\]"),
        (A, B[None], ValueError, r"b of \[1, 3, 2\]"),
        (A, torch.zeros(3, 4)[:, ::2], ValueError, r"b of {} has strides \[4, 2\].*\nhint: b.contiguous\(\)"),
        (A, torch.zeros(3, 4)[:, :2], ValueError, r"neither row-major nor the transpose of a contiguous matrix"),
    ],
)
def test_operands_that_do_not_do(
    group: PeerGroup, function: Any, a: Any, b: Any, error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text.format(function.__name__)):
        function(a, b, group)


@EVERY
def test_biases_and_outs_that_do_not_do(group: PeerGroup, function: Any) -> None:
    name = function.__name__
    for bias in (torch.zeros(3), torch.zeros(2, dtype=torch.float64), torch.zeros(1, 2)):
        with pytest.raises(ValueError, match=rf"bias of {name} is .*\nhint: it has to be torch.float32 of shape \[2\]"):
            function(A, B, group, bias=bias)
    for out in (torch.zeros(4, 3), torch.zeros(4, 2, dtype=torch.float64)):
        with pytest.raises(ValueError, match=rf"out of {name} is .*\nhint: it has to be torch.float32 of shape"):
            function(A, B, group, out=out)
    with pytest.raises(TypeError, match=f"out of {name} is a str"):
        function(A, B, group, out="here")
    memory = torch.zeros(40)
    a, b = memory[:12].view(4, 3), memory[20:26].view(3, 2)
    for place in (4, 14, 24):
        with pytest.raises(ValueError, match=f"{name} cannot write into its input"):
            function(a, b.t().contiguous().t() if place == 4 else b, group, out=memory[place : place + 8].view(4, 2))
    with pytest.raises(ValueError, match=f"{name} cannot write into its input"):
        function(a, memory[20:26].view(2, 3).t(), group, out=memory[18:26].view(4, 2))


@EVERY
@pytest.mark.parametrize("candidate", ["magic", "rounds(chunks=2)", "plain("])
def test_candidates_that_there_are_not(group: PeerGroup, function: Any, candidate: str) -> None:
    with pytest.raises(ValueError, match="\nhint: "):
        function(A, B, group, candidate=candidate)


@EVERY
def test_groups_lanes_and_captures_that_do_not_do(group: PeerGroup, function: Any) -> None:
    for candidate in CANDIDATES:
        with pytest.raises(ValueError, match="there is no lane 1"):
            function(A, B, group, lane=1, candidate=candidate)
    with pytest.raises(
        DeviceError, match=r"a row of 8000 bytes does not fit .* of 4096 bytes\nhint: .*buffer_bytes=8000"
    ):
        function(torch.zeros(4, 2000), torch.zeros(2000, 2000), group, candidate="rounds")
    driver: Any = group.memory.driver
    driver.begin_capture(group.current_stream())
    with pytest.raises(DeviceError, match="captured on a lane that cannot be replayed"):
        function(A, B, group, candidate="rounds")
    driver.destroy_graph(driver.end_capture(group.current_stream()))
    process_group, group._process_group = group._process_group, None
    with pytest.raises(DeviceError, match=r"have no group of torch.distributed.*\nhint: take 'rounds'"):
        function(A, B, group, candidate="plain")
    function(A, B, group, candidate="rounds")
    group._process_group = process_group
    group.lane().broken = "rank 1 died"
    for candidate in CANDIDATES:
        with pytest.raises(ChannelBroken, match="rank 1 died"):
            function(A, B, group, candidate=candidate)
    group.lane().broken = ""
    group.close()
    with pytest.raises(ChannelClosed, match="the group is closed"):
        function(A, B, group)


def test_an_interrupted_call_breaks_its_lane(group: PeerGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*args: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(torch, "mm", interrupt)
        with pytest.raises(KeyboardInterrupt):
            check(Operator.REDUCE_SCATTER, group, make(Operator.REDUCE_SCATTER, group, (2, 2, 2)), "rounds")
    with pytest.raises(ChannelBroken, match=r"ended half-way \(KeyboardInterrupt\)"):
        check(Operator.REDUCE_SCATTER, group, make(Operator.REDUCE_SCATTER, group, (2, 2, 2)), "rounds")


def test_work_of_the_callers_is_not_captured_by_a_way_that_captures_itself(group: PeerGroup) -> None:
    driver: Any = group.memory.driver
    seen: list[int] = []
    fill = Once(lambda: seen.append(1), group.is_capturing)
    driver.begin_capture(group.current_stream())
    fill()
    driver.destroy_graph(driver.end_capture(group.current_stream()))
    assert fill
    assert seen == []
    for _ in range(2):
        fill()
        assert seen == [1]
    assert not fill


def test_gradients_that_nobody_asks_for(group: PeerGroup) -> None:
    a, b = A.clone().requires_grad_(), B.clone().requires_grad_()
    with torch.no_grad():
        for function in FUNCTIONS.values():
            for candidate in CANDIDATES:
                assert not function(a, b, group, candidate=candidate).requires_grad


def test_gathered_rows_that_do_not_do(group: PeerGroup) -> None:
    function = FUNCTIONS[Operator.ALL_GATHER]
    with pytest.raises(ValueError, match=r"gathered of all_gather_matmul is .*\nhint: .* \[4, 3\]"):
        function(A, B, group, gathered=torch.zeros(4, 4))
    rows = torch.zeros(6, 3)
    with pytest.raises(ValueError, match="all_gather_matmul can only write into its input in place"):
        function(rows[1:5], B, group, gathered=rows[:4])
    with pytest.raises(ValueError, match="gathered of all_gather_matmul is not contiguous"):
        function(A, B, group, gathered=torch.zeros(3, 4).t())
    memory = torch.zeros(16)
    with pytest.raises(ValueError, match="all_gather_matmul with gathered cannot write into its input\nhint: "):
        function(A, B, group, gathered=memory[:12].view(4, 3), out=memory[8:].view(4, 2))


@pytest.mark.parametrize(
    ("counts", "text"),
    [
        ([[2, 2]], r"counts of matmul_all_to_all are \[\[2, 2\]\]\nhint: 1 rows of 1 counts"),
        (TWO_ROWS, "hint: 1 rows of 1 counts that are not negative"),
        ([[-4]], "hint: 1 rows of 1 counts that are not negative"),
        ([[3]], r"a of matmul_all_to_all has 4 rows, and counts\[0\] are 3 in all\nhint: counts\[p\]\[q\] rows go"),
    ],
)
def test_counts_that_do_not_do(group: PeerGroup, counts: list[list[int]], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        matmul_all_to_all(A, B, group, counts)


def test_counts_on_the_device_that_do_not_do(group: PeerGroup) -> None:
    for counts in (torch.zeros(2, dtype=torch.int64), torch.zeros(1)):
        with pytest.raises(ValueError, match=r"counts of matmul_all_to_all is .*\nhint: integers of shape \[1\]"):
            matmul_all_to_all_padded(A, B, group, counts)


def test_layouts() -> None:
    assert layout_of("x", B) is Layout.ROWS
    assert layout_of("x", torch.zeros(2, 3).t()) is Layout.COLUMNS
    assert layout_of("x", torch.zeros(2, 1).t()) is Layout.ROWS
