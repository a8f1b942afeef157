"""Collectives of `crossfade.peers` between processes, on shared memory in the place of GPUs."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="peers are ranks of a torch.distributed group")

from crossfade.errors import ChannelClosed, DeviceError  # noqa: E402
from crossfade.peers.collectives import all_gather, all_reduce, all_to_all, reduce_scatter  # noqa: E402
from crossfade.peers.group import PeerGroup  # noqa: E402
from crossfade.peers.opening import open_group  # noqa: E402
from tests.helpers.peer_cases import CASES, FUNCTIONS, check  # noqa: E402
from tests.helpers.peer_kills import kill_many  # noqa: E402
from tests.helpers.peer_staged_cases import CASES as STAGED  # noqa: E402
from tests.helpers.ranks import suite  # noqa: E402

TestTwoRanks = suite(CASES, 2, limit_s=100)
TestThreeRanks = suite(CASES, 3, limit_s=100)
TestTwoStagedRanks = suite(STAGED, 2, limit_s=100)
TestThreeStagedRanks = suite(STAGED, 3, limit_s=100)


def test_no_process_group() -> None:
    """Before the first test that joins one."""
    with pytest.raises(DeviceError, match=r"no process group\nhint: call torch.distributed.init_process_group"):
        open_group(device="cpu")


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_rank_alone(group: PeerGroup, name: str) -> None:
    for length in (0, 1, 5000):
        check(group, name, length, (3,))


@pytest.mark.parametrize("function", FUNCTIONS.values())
@pytest.mark.parametrize(
    ("tensor", "error", "text"),
    [
        ([1.0], TypeError, "is a list\nhint: give a torch tensor"),
        (torch.zeros(4, device="meta"), ValueError, "is on meta, and the group's device is cpu"),
        (torch.zeros(4, requires_grad=True), ValueError, "requires grad"),
        (torch.zeros(4).to_sparse(), ValueError, "is not a plain strided tensor"),
        (torch.zeros(4, dtype=torch.complex64).conj(), ValueError, "is not a plain strided tensor"),
    ],
)
def test_inputs_that_do_not_do(group: PeerGroup, function: Any, tensor: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        function(tensor, group)


def test_outs_that_do_not_do(group: PeerGroup) -> None:
    whole = torch.zeros(8)
    with pytest.raises(ValueError, match=r"out of all_reduce is torch.float32 of shape \[4\]\nhint: .* \[8\]"):
        all_reduce(whole, group, torch.zeros(4))
    with pytest.raises(ValueError, match=r"out of all_gather is torch\.int64"):
        all_gather(whole, group, torch.zeros(8, dtype=torch.int64))
    with pytest.raises(ValueError, match="all_to_all cannot write into its input"):
        all_to_all(whole, group, whole)
    with pytest.raises(ValueError, match="all_to_all cannot write into its input"):
        all_to_all(whole[:6], group, whole[2:])
    for function in (all_gather, all_reduce, reduce_scatter):
        with pytest.raises(ValueError, match="can only write into its input in place"):
            function(whole[:6], group, whole[1:7])
    with torch.no_grad():
        all_reduce(torch.zeros(4, requires_grad=True), group)


def test_what_cannot_be_summed_or_dealt(group: PeerGroup) -> None:
    for function in (all_reduce, reduce_scatter):
        with pytest.raises(TypeError, match=r"cannot sum tensors of torch.bool\nhint: one of bfloat16"):
            function(torch.zeros(4, dtype=torch.bool), group)
    for function in (all_to_all, reduce_scatter):
        with pytest.raises(ValueError, match="first dimension has to be a multiple of the number of ranks"):
            function(torch.tensor(1.0), group)


def test_lanes_streams_and_captures_that_are_not_there(group: PeerGroup) -> None:
    with pytest.raises(ValueError, match="there is no lane 1"):
        all_reduce(torch.zeros(4), group, lane=1)
    driver: Any = group.memory.driver
    driver.begin_capture(group.current_stream())
    with pytest.raises(DeviceError, match="captured on a lane that cannot be replayed"):
        all_reduce(torch.zeros(4), group)
    driver.destroy_graph(driver.end_capture(group.current_stream()))
    with pytest.raises(DeviceError, match="does not fit"):
        group.empty(5000, dtype=torch.float32)


def test_a_closed_group(group: PeerGroup) -> None:
    group.close()
    group.close()
    with pytest.raises(ChannelClosed, match="the group is closed\nhint: open a new one"):
        all_reduce(torch.zeros(4), group)


def test_groups_that_cannot_be_opened(world: None) -> None:
    for wrong in ({"buffer_bytes": 255}, {"num_lanes": 0}):
        with pytest.raises(ValueError, match="at least 256 bytes, and 1 lane"):
            open_group(device="cpu", **wrong)  # type: ignore[arg-type]
    for more in ({"heap_bytes": -1}, {"buffer_bytes": 1 << 70}, {"timeout_s": 0}, {"timeout_s": float("nan")}):
        with pytest.raises(ValueError, match=f"{next(iter(more))} (is )?(.|\\n)*hint:"):
            open_group(device="cpu", **more)
    with pytest.raises(DeviceError, match="no collectives for device 'meta'"):
        open_group(device="meta")
    with pytest.raises(DeviceError, match="this process is not in the group"):
        open_group(torch.distributed.GroupMember.NON_GROUP_MEMBER, device="cpu")


def test_a_killed_rank_is_named_and_the_others_go_on() -> None:
    assert min(kill_many(0, 16, 100).values()) >= 4
