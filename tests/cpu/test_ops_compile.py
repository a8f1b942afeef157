"""Operators under torch.compile, on CPU tensors: between processes and on one rank, held against the same program without it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="operators take torch tensors")

from crossfade.ops.gradients import compiled  # noqa: E402
from crossfade.peers.group import PeerGroup  # noqa: E402
from crossfade.peers.groups import find_group  # noqa: E402
from crossfade.peers.keys import GroupKey  # noqa: E402
from crossfade.peers.opening import open_group  # noqa: E402
from tests.helpers.ops_compile_cases import CASES, SIZES, hold  # noqa: E402
from tests.helpers.ops_gradients import OPERATORS, inputs_for  # noqa: E402
from tests.helpers.ranks import suite  # noqa: E402

LIMIT_S = 180.0

TestCompiled = suite(CASES, 2, limit_s=LIMIT_S)


@pytest.fixture
def group(world: None) -> Iterator[PeerGroup]:
    group = open_group(device="cpu", buffer_bytes=1 << 16)
    yield group
    group.close()


@pytest.mark.timeout(LIMIT_S)
@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("layout", ["rows", "columns"])
def test_torch_finds_nothing_wrong_with_the_operators(group: PeerGroup, name: str, layout: str) -> None:
    """`torch.library.opcheck`: schema, shapes without values, gradients, symbolic lengths."""
    inputs = inputs_for(name, group, SIZES, "float32", layout=layout, has_bias=True, lead=(2,))
    a, b, bias = inputs.a[0], inputs.b[0], inputs.bias
    assert bias is not None
    own: dict[str, list[Any]] = {"all_gather_matmul": [True], "matmul_all_to_all": [[len(a.flatten(0, -2))]]}
    where = [group.key, 0, None, "rounds"]
    for needs in (False, True):
        operands = [each.clone(memory_format=torch.preserve_format).requires_grad_(needs) for each in (a, b, bias[0])]
        operator = getattr(torch.ops.crossfade, name).default
        torch.library.opcheck(operator, (*operands, *where, *own.get(name, [])))
    if name == "all_gather_matmul":
        operator = torch.ops.crossfade.all_gather_matmul.default
        torch.library.opcheck(operator, (a, b, None, *where, False))
    grad = torch.ones(*a.shape[:-1], SIZES[1]) if name in ("matmul_all_reduce", "replicated_matmul") else None
    grad = torch.ones(len(a.flatten(0, -2)), SIZES[1]) if grad is None else grad
    for wanted in ([True, True, True], [False, True, False], [True, False, False]):
        arguments = name, grad, a if wanted[1] else None, b if wanted[0] else None, list(a.shape), layout == "columns"
        more = *arguments, wanted, *where, None, True
        torch.library.opcheck(compiled.OPERATORS.matmul_gradients.default, more)


def test_shapes_that_do_not_fit_are_found_while_compiling(group: PeerGroup) -> None:
    def step(a: Any, b: Any) -> Any:
        return torch.ops.crossfade.matmul_all_reduce(a, b, None, group.key, 0, None, None)

    made = torch.compile(step, fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match=r"a of matmul_all_reduce is of shape .*hint: they have to be"):
        made(torch.ones(4, 3), torch.ones(2, 5))


def test_torch_finds_nothing_wrong_with_exchanges(group: PeerGroup) -> None:
    torch.library.opcheck(torch.ops.crossfade.all_to_all.default, (torch.arange(1), group.key, 0))
    for operator in (torch.ops.crossfade.split.default, torch.ops.crossfade.gather.default):
        torch.library.opcheck(operator, (torch.randn(2, 3, requires_grad=True), group.key, 1, 0))


@pytest.mark.timeout(LIMIT_S)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's, about itself
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_by_inductor(group: PeerGroup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    inputs = inputs_for("all_gather_matmul", group, SIZES, "float32", layout="columns", has_bias=True)
    with torch._inductor.config.patch({"cpp.vec_isa_ok": False, "cpp_cache_precompile_headers": False}):
        hold("all_gather_matmul", group, inputs, (True, True, True), "inductor")


def test_keys_of_groups(world: None) -> None:
    first, second = open_group(device="cpu"), open_group(device="cpu")
    assert find_group(first.key) is first
    assert find_group(second.key) is second
    key = GroupKey.parse(first.key)
    assert (key.rank, key.num_ranks) == (0, 1)
    assert GroupKey.parse(str(key)) == key
    assert GroupKey.parse(second.key).name != key.name
    first.close()
    second.close()
    with pytest.raises(ValueError, match=r"'2' is no group's key\nhint: PeerGroup.key"):
        GroupKey.parse("2")
