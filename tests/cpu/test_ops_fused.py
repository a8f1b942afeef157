"""The candidate ``fused``: what it asks of torch's fused operators, which only GPUs have; here plain products stand for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="operators take torch tensors")

import torch
import torch.distributed as dist

from crossfade.errors import DeviceError
from crossfade.ops.algorithms import fused, plain
from crossfade.ops.calls.job import Job, Operator, Shape
from crossfade.ops.choice.candidate import Candidate, candidates_for
from crossfade.ops.choice.figures import H200
from crossfade.ops.choice.model import Model
from crossfade.peers.group import PeerGroup
from crossfade.peers.opening import open_group

RS, AG = Operator.REDUCE_SCATTER, Operator.ALL_GATHER


class Torch:
    """torch's operators of one rank, and its shared memory, which only grows."""

    def __init__(self) -> None:
        self.size_bytes = -1
        self.called: list[tuple[Any, ...]] = []

    def function(self, name: str) -> Callable[..., Any]:
        return self.scatter if name == "fused_matmul_reduce_scatter" else self.gather

    def share(self, name: Any, size_bytes: int) -> object:
        self.size_bytes = max(size_bytes, self.size_bytes)
        return object()

    def scatter(self, a: Any, b: Any, kind: str, dim: int, name: str) -> Any:
        assert self.size_bytes >= 2 * len(a) * b.shape[1] * a.itemsize
        self.called.append((kind, dim, name))
        return a @ b

    def gather(self, a: Any, bs: list[Any], dim: int, name: str, *, return_A: bool = True) -> Any:
        assert self.size_bytes >= a.nbytes
        self.called.append((return_A, dim, name))
        return (a.clone() if return_A else None), [a @ b for b in bs]


@pytest.fixture
def group(world: None) -> Iterator[PeerGroup]:
    group = open_group(device="cpu", buffer_bytes=4096, num_lanes=2)
    yield group
    group.close()


@pytest.fixture
def there(group: PeerGroup, monkeypatch: pytest.MonkeyPatch) -> Torch:
    """torch, as it is on GPUs."""
    found = Torch()
    monkeypatch.setattr(fused, "_function", found.function)
    monkeypatch.setattr(fused, "_share", found.share)
    monkeypatch.setattr(group, "device_type", "cuda")
    monkeypatch.setattr(PeerGroup, "is_capturing", lambda self: False)
    monkeypatch.setattr(PeerGroup, "do", lambda self, action: action())
    return found


def job(group: PeerGroup, rows: int = 6, *, is_new_out: bool = True, **more: Any) -> Job:
    torch.manual_seed(rows)
    a, b = torch.randn(rows, 5), torch.randn(4, 5).t()
    return Job("the operator", group, more.pop("lane", 0), a, b, more.pop("bias", None), torch.zeros(rows, 4), is_new_out=is_new_out, **more)  # fmt: skip  # noqa: E501


def test_a_new_output_takes_what_torch_gave(there: Torch, group: PeerGroup) -> None:
    for is_new_out in (True, False):
        for way in (fused.reduce_scatter, fused.all_gather):
            each = job(group, is_new_out=is_new_out)
            address = each.out.data_ptr()
            way(each)
            assert torch.equal(each.out, each.a @ each.b)
            assert (each.out.data_ptr() == address) is not is_new_out
    world = dist.group.WORLD
    assert world is not None
    name = world.group_name
    assert there.called == [("sum", 0, name), (True, 0, name)] * 2


def test_rows_that_are_wanted_and_a_bias(there: Torch, group: PeerGroup) -> None:
    bias, gathered = torch.randn(4), torch.zeros(3000, 5)
    each = job(group, 3000, bias=bias, gathered=gathered)
    fused.all_gather(each)
    assert torch.equal(each.out, each.a @ each.b + bias)
    assert torch.equal(gathered, each.a)
    fused.all_gather(job(group, 3000))
    assert [call[0] for call in there.called] == [True, False]  # so many rows are never gathered by multicast


def test_what_torch_cannot_do_is_plain(there: Torch, group: PeerGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Job] = []
    monkeypatch.setattr(plain, "reduce_scatter", asked.append)
    monkeypatch.setattr(plain, "all_gather", asked.append)
    fused.reduce_scatter(job(group, has_bias=True))
    fused.reduce_scatter(job(group, lane=1))
    fused.all_gather(job(group, lane=1))
    assert len(asked) == 3
    assert there.called == []


def test_memory_cannot_grow_in_a_capture(there: Torch, group: PeerGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    fused.reduce_scatter(job(group))
    monkeypatch.setattr(PeerGroup, "is_capturing", lambda self: True)
    fused.reduce_scatter(job(group, 4))
    with pytest.raises(
        DeviceError, match=r"'fused' has to share 256 bytes first, which cannot be captured\nhint: call it once"
    ):
        fused.reduce_scatter(job(group, 8))


def test_a_cpu_has_none(group: PeerGroup) -> None:
    with pytest.raises(DeviceError, match="there is no fused matmul_reduce_scatter of torch's for cpu"):
        fused.reduce_scatter(job(group))


def test_where_it_is_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    def offered(
        operator: Operator, m: int = 64, *, device: str = "cuda", process_group: Any = "group", ranks: int = 4
    ) -> bool:
        shape = Shape(operator, m, 16, 16, "bfloat16", "nn", ranks)
        lane = SimpleNamespace(slot_bytes=1 << 20)
        where: Any = SimpleNamespace(
            num_ranks=ranks, process_group=process_group, device_type=device, is_staged=False, lane=lambda: lane
        )
        assert fused.is_offered(shape, where) is (Candidate("fused") in candidates_for(shape, where))
        return fused.is_offered(shape, where)

    assert offered(RS)
    assert offered(AG)
    assert not offered(Operator.ALL_REDUCE)
    assert not offered(Operator.ALL_TO_ALL)
    assert not offered(RS, 66)
    assert not offered(RS, device="cpu")
    assert not offered(RS, process_group=None)
    assert not offered(RS, ranks=1)
    monkeypatch.setattr(fused, "_function", lambda name: None)
    assert not offered(RS)


def test_the_model_knows_nothing_of_it() -> None:
    assert Model(H200).predict(Shape(RS, 64, 16, 16, "bfloat16", "nn", 4), Candidate("fused")) is None
