"""One GPU: tensors in calls, constructors and constants come back to it, whatever they are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")

import crossfade  # noqa: E402

pytestmark = pytest.mark.timeout(300)


class Keeper:
    """Says of what it was given where it lies, what it is and what is in it."""

    def __init__(self, *given: Any) -> None:
        self._given = given

    def given(self) -> Any:
        return self.facts(None, *self._given)

    def same(self, *values: Any) -> Any:
        return values

    def facts(self, _: Any, *values: Any) -> Any:
        return [_facts(value) for value in values]

    def trained(self, module: Any) -> Any:
        module(torch.ones(1, 4, device="cuda")).sum().backward()
        return module[0].weight is module[1].weight, [str(p.device) for p in module.parameters() if p.grad is not None]


def _facts(tensor: Any) -> tuple[Any, ...]:
    raw = tensor.detach().contiguous().view(-1).view(torch.uint8).tolist() if tensor.numel() else []
    size_bytes = tensor.untyped_storage().nbytes()
    return (
        type(tensor).__name__,
        str(tensor.device),
        str(tensor.dtype),
        tensor.shape,
        tensor.requires_grad,
        size_bytes,
        raw,
    )


@pytest.fixture(params=["inline", "local"])
def engine(request: pytest.FixtureRequest) -> Iterator[str]:
    crossfade.init(engine=request.param, num_gpus=1)
    yield request.param
    crossfade.shutdown()


def test_tensors_of_every_kind_come_back_to_their_gpu(engine: str) -> None:
    names = "bool int8 bfloat16 float32 complex64 uint16 uint32 uint64 float8_e4m3fn float8_e5m2"
    large = torch.arange(10_000.0, device="cuda")
    tensors = [(torch.arange(6, device="cuda") % 2).to(getattr(torch, name)) for name in names.split()]
    tensors += [large[:1], large.reshape(100, 100)[:3, :2].T, torch.empty(0, 3, device="cuda"), torch.ones(2)]
    tensors += [torch.nn.Parameter(torch.ones(3, device="cuda")), torch.ones(2, device="cuda", requires_grad=True) * 2]
    wanted = [(*_facts(tensor)[:5], tensor.nbytes, _facts(tensor)[6]) for tensor in tensors]
    keeper = crossfade.remote(Keeper).options(num_gpus=1).remote(*tensors)
    assert keeper.given.remote().get() == wanted
    assert keeper.facts.remote(None, *tensors).get() == wanted
    assert [_facts(tensor) for tensor in keeper.same.remote(*tensors).get()] == wanted
    graph = keeper.facts.bind(crossfade.InputNode(), *tensors).compile()
    assert graph.execute(None).get() == wanted


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")  # of torch 2.11, which is asked not to check
def test_modules_on_a_gpu_stay_there_and_tied(engine: str) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)).to("cuda")
    module[1].weight = module[0].weight
    keeper = crossfade.remote(Keeper).options(num_gpus=1).remote()
    assert keeper.trained.remote(module).get() == (True, ["cuda:0"] * 3)
    sparse = torch.eye(3, device="cuda").to_sparse()
    assert keeper.same.remote(sparse).get()[0].device == sparse.device
