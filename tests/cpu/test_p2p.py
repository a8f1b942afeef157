"""Tagged transfers between the ranks of a torch.distributed group, on shared memory in the place of GPUs."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="ranks of a torch.distributed group")

from crossfade.errors import DeviceError  # noqa: E402
from crossfade.p2p import P2P  # noqa: E402
from tests.helpers.p2p_cases import CASES, FAR, RANDOM, STAGED  # noqa: E402
from tests.helpers.peer_kills import kill_many  # noqa: E402
from tests.helpers.ranks import suite  # noqa: E402


def test_no_process_group() -> None:
    with pytest.raises(DeviceError, match=r"no process group\nhint: call torch.distributed.init_process_group"):
        P2P(device="cpu")


TestTwoRanks = suite({**CASES, **RANDOM}, 2, limit_s=100)
TestThreeRanks = suite({**CASES, **RANDOM}, 3, limit_s=100)
TestTwoRanksStaged = suite(STAGED, 2, limit_s=100)
TestThreeRanksStaged = suite(STAGED, 3, limit_s=100)
TestTwoRanksFar = suite(FAR, 2, limit_s=100)
TestThreeRanksFar = suite(FAR, 3, limit_s=100)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("what", "num"), [("p2p", 8), ("p2p_staged", 4), ("p2p_far", 4)])
def test_a_rank_that_is_killed_at_any_moment(what: str, num: int) -> None:
    assert min(kill_many(0, num, 100, what).values()) >= num // 4


@pytest.fixture
def alone(world: None) -> Iterator[P2P]:
    with P2P(device="cpu") as p2p:
        yield p2p


@pytest.mark.parametrize(
    ("tensor", "options", "error", "text"),
    [
        ([1.0], {}, TypeError, "isend was given a list\nhint: it takes one torch tensor"),
        (torch.zeros(4, device="meta"), {}, TypeError, "a tensor on meta\nhint"),
        (torch.zeros(4).to_sparse(), {}, TypeError, "torch.sparse_coo tensor of torch.float32\nhint"),
        (
            torch.zeros(2, dtype=torch.complex64).conj(),
            {},
            ValueError,
            "conjugate or negative view\nhint: resolve_conj",
        ),
        (torch.zeros(2, dtype=torch.complex64).conj().imag, {}, ValueError, "conjugate or negative view\nhint"),
        (torch.zeros([1] * 17), {}, ValueError, "a tensor of 17 dimensions\nhint: flatten it; 16 are possible"),
        (torch.zeros(4), {"dst": 1}, ValueError, r"given \[1\] as ranks\nhint: the ranks are 0 to 0"),
        (torch.zeros(4), {"dst": [0, 0]}, ValueError, r"given \[0, 0\] as ranks\nhint"),
        (torch.zeros(4), {"dst": []}, ValueError, r"given \[\] as ranks\nhint"),
        (
            torch.zeros(4),
            {"dst": 0.0},
            TypeError,
            r"the ranks \[0.0\] and the tag 0\nhint: ranks and tags are integers",
        ),
        (torch.zeros(4), {"tag": "a"}, TypeError, r"the ranks \[0\] and the tag 'a'\nhint"),
        (torch.zeros(4), {"tag": 1 << 63}, ValueError, "given the tag 9223372036854775808\nhint"),
    ],
)
def test_what_cannot_be_sent(
    alone: P2P, tensor: Any, options: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        alone.isend(tensor, **{"dst": 0, **options})


def test_ranks_and_tags_may_be_numpy_integers(alone: P2P) -> None:
    np = pytest.importorskip("numpy")
    alone.isend(torch.ones(2), [np.int64(0)], np.int64(7))
    target = torch.zeros(2)
    alone.irecv(target, np.int64(0), 7).wait()
    assert target.tolist() == [1.0, 1.0]


def test_an_interrupted_receive_takes_nothing_of_the_next_one(alone: P2P) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(KeyboardInterrupt):
            alone.recv_any(0, tag=1)
    finally:
        signal.signal(signal.SIGALRM, before)
    alone.isend(torch.ones(3), 0, tag=1)
    assert alone.recv_any(0, tag=1, timeout=10).eq(1).all()


def test_a_value_that_comes_with_the_interrupt_is_for_the_next_receive(
    alone: P2P, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait = alone._await

    def interrupted(*args: Any) -> None:
        wait(*args)
        raise KeyboardInterrupt

    alone.isend(torch.ones(3), 0, tag=1)
    alone.isend(torch.zeros(3), 0, tag=1)
    with monkeypatch.context() as patch:
        patch.setattr(alone, "_await", interrupted)
        with pytest.raises(KeyboardInterrupt):
            alone.recv_any(0, tag=1)
    assert alone.recv_any(0, tag=1, timeout=10).eq(1).all()
    assert alone.recv_any(0, tag=1, timeout=10).eq(0).all()


def test_a_value_that_comes_with_the_interrupt_is_for_the_receive_that_waits_already(
    alone: P2P, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait, target, later = alone._await, torch.zeros(3), list[Any]()

    def interrupted(*args: Any) -> None:
        wait(*args)
        later.append(alone.irecv(target, 0, tag=1))
        raise KeyboardInterrupt

    alone.isend(torch.ones(3), 0, tag=1)
    with monkeypatch.context() as patch:
        patch.setattr(alone, "_await", interrupted)
        with pytest.raises(KeyboardInterrupt):
            alone.recv_any(0, tag=1)
    later[0].wait(timeout=10)
    assert target.eq(1).all()


@pytest.mark.parametrize("options", [{"buffer_bytes": -1}, {"timeout_s": 0}])
def test_options_that_make_no_sense(world: None, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"buffer_bytes is .* and timeout_s .*\nhint"):
        P2P(device="cpu", **options)


def test_a_device_that_is_none(world: None) -> None:
    with pytest.raises(DeviceError, match="no point-to-point for device 'meta'\nhint: take a CUDA device or 'cpu'"):
        P2P(device="meta")


def test_a_tensor_of_empty_outlives_the_communicator(world: None) -> None:
    with P2P(device="cpu") as p2p:
        tensor = p2p.empty(1000, dtype=torch.float32).fill_(3)
    assert tensor.eq(3).all()
