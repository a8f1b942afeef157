"""What every rank does in the tests of split layers and models: trained for a few steps beside the unsplit ones, which all have."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor import parallel as torch_parallel
from torch.nn import functional

from crossfade.ops import (
    ColumnParallelLinear,
    ColwiseParallel,
    RowParallelLinear,
    RowwiseParallel,
    SequenceParallel,
    regions,
)
from crossfade.ops.layers.linear import _ParallelLinear
from crossfade.ops.layers.parallel import parallelize
from crossfade.peers.group import PeerGroup
from tests.helpers.ops_gradients import FEW, go_back
from tests.helpers.ops_inputs import device_of, opened

WIDTH, INNER, BATCH, LENGTH, HEAD = 24, 48, 3, 12, 2
STEPS = 4
NEAR = 1e-9


def data(group: PeerGroup, *shape: int, seed: int = 0) -> torch.Tensor:
    source = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=source, dtype=torch.float64).to(device_of(group))


def assert_near(got: torch.Tensor, wanted: torch.Tensor, what: str) -> None:
    torch.testing.assert_close(got, wanted, msg=lambda text: f"{what}: {text}", rtol=NEAR, atol=NEAR)


class Mlp(nn.Module):
    """Up, gelu, down."""

    def __init__(self, up: nn.Module, down: nn.Module) -> None:
        super().__init__()
        self.up, self.down = up, down

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down(functional.gelu(self.up(x)))
        return y


def whole_mlp(group: PeerGroup, *, bias: bool) -> Mlp:
    options: dict[str, Any] = {"bias": bias, "device": device_of(group), "dtype": torch.float64}
    return Mlp(nn.Linear(WIDTH, INNER, **options), nn.Linear(INNER, WIDTH, **options))


def split_mlp(group: PeerGroup, *, bias: bool, sequence_dim: int | None, candidate: str | None) -> Mlp:
    options: dict[str, Any] = {"bias": bias, "device": device_of(group), "dtype": torch.float64}
    options |= {"candidate": candidate, "backward_candidate": candidate}
    options |= {"sequence_parallel": sequence_dim is not None, "sequence_dim": sequence_dim or 0}
    return Mlp(ColumnParallelLinear(WIDTH, INNER, group, **options), RowParallelLinear(INNER, WIDTH, group, **options))


def mlps(device: str) -> None:
    """From one seed, a split MLP is the unsplit one, and stays it while both are trained."""
    with opened(device) as group:
        for candidate, bias, dim in product((*FEW, None), (False, True), (None, 0, 1)):
            torch.manual_seed(7)
            whole = whole_mlp(group, bias=bias)
            torch.manual_seed(7)
            part = split_mlp(group, bias=bias, sequence_dim=dim, candidate=candidate)
            assert list(part.state_dict()) == list(whole.state_dict())
            train(group, whole, part, dim, f"{candidate}, bias {bias}, sequence {dim}")


def train(group: PeerGroup, whole: nn.Module, part: nn.Module, dim: int | None, what: str) -> None:
    """Losses and parameters of a few steps of Adam."""
    pairs = list(counterparts(whole, part))
    optimizers = [torch.optim.Adam(module.parameters(), lr=1e-2) for module in (whole, part)]
    for step in range(STEPS):
        x, target = (data(group, 2 * LENGTH, LENGTH, WIDTH, seed=seed) for seed in (step, 50 + step))
        expected = functional.mse_loss(whole(x), target)
        own = x if dim is None else regions.split(x, group, dim)
        out = part(own)
        loss = functional.mse_loss(out if dim is None else regions.gather(out, group, dim), target)
        assert_near(loss, expected, f"{what}: loss of step {step}")
        for optimizer, value in zip(optimizers, (expected, loss), strict=True):
            optimizer.zero_grad()
            go_back(value)
            optimizer.step()
        for name, theirs, mine, cut in pairs:
            assert theirs.grad is not None
            assert mine.grad is not None, f"{what}: {name}"
            assert_near(mine.grad, cut(theirs.grad), f"{what}: gradient of {name} in step {step}")
            assert_near(mine.detach(), cut(theirs.detach()), f"{what}: {name} behind step {step}")


Cut = Callable[[torch.Tensor], torch.Tensor]


def counterparts(whole: nn.Module, part: nn.Module) -> Iterator[tuple[str, nn.Parameter, nn.Parameter, Cut]]:
    """Each parameter of both, and how the whole one is cut."""
    layers = dict(part.named_modules())
    theirs = dict(whole.named_parameters())
    for name, mine in part.named_parameters():
        path, _, kind = name.rpartition(".")
        yield name, theirs[name], mine, cut_of(layers[path], kind)


def cut_of(layer: nn.Module, kind: str) -> Cut:
    if not isinstance(layer, _ParallelLinear) or (kind == "bias" and layer.split_dim == 1):
        return lambda whole: whole
    group, dim = layer.group, layer.split_dim
    return lambda whole: whole.chunk(group.num_ranks, dim)[group.rank]


class Attention(nn.Module):
    """Grouped queries, rotary positions left out; as many heads as there are in the tensors."""

    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__()
        self.q_proj = nn.Linear(WIDTH, WIDTH, bias=True, **options)
        self.k_proj = nn.Linear(WIDTH, WIDTH, bias=True, **options)
        self.v_proj = nn.Linear(WIDTH, WIDTH, bias=True, **options)
        self.o_proj = nn.Linear(WIDTH, WIDTH, bias=False, **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (each(x) for each in (self.q_proj, self.k_proj, self.v_proj))
        q, k, v = (each.view(*each.shape[:-1], -1, HEAD).transpose(1, 2) for each in (q, k, v))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        y: torch.Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return y


class Gated(nn.Module):
    """Llama's MLP."""

    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(WIDTH, INNER, bias=False, **options)
        self.up_proj = nn.Linear(WIDTH, INNER, bias=False, **options)
        self.down_proj = nn.Linear(INNER, WIDTH, bias=True, **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return y


class Block(nn.Module):
    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(WIDTH, **options)
        self.self_attn = Attention(options)
        self.post_attention_layernorm = nn.LayerNorm(WIDTH, **options)
        self.mlp = Gated(options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        y: torch.Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return y


class Model(nn.Module):
    """Two blocks, and a head."""

    def __init__(self, group: PeerGroup) -> None:
        super().__init__()
        options: dict[str, Any] = {"device": device_of(group), "dtype": torch.float64}
        self.layers = nn.ModuleList([Block(options) for _ in range(2)])
        self.head = nn.Linear(WIDTH, WIDTH, bias=False, **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        y: torch.Tensor = self.head(x)
        return y


NAMED = {
    "layers.*.self_attn.[qkv]_proj": "colwise",
    "layers.*.self_attn.o_proj": "rowwise",
    "layers.*.mlp.gate_proj": "colwise",
    "layers.*.mlp.up_proj": "colwise",
    "layers.*.mlp.down_proj": "rowwise",
}
NORMS = {"layers.*.*_layernorm": "sequence_parallel"}


def objects(source: Any) -> dict[str, Any]:
    """The same with the sequence split between the layers, by the objects of this library or of torch."""
    up, down = source.ColwiseParallel, source.RowwiseParallel
    return {
        "layers.*.input_layernorm": source.SequenceParallel(),
        "layers.*.post_attention_layernorm": source.SequenceParallel(sequence_dim=1),
        "layers.*.self_attn.q_proj": up(input_layouts=Shard(1)),
        "layers.*.self_attn.k_proj": up(input_layouts=Shard(1), output_layouts=Shard(-1)),
        "layers.*.self_attn.v_proj": up(input_layouts=Shard(1)),
        "layers.*.self_attn.o_proj": down(output_layouts=Shard(1)),
        "layers.*.mlp.gate_proj": up(input_layouts=Shard(1)),
        "layers.*.mlp.up_proj": up(input_layouts=Shard(1)),
        "layers.*.mlp.down_proj": down(input_layouts=Shard(-1), output_layouts=Shard(1)),
        "head": up(input_layouts=Shard(1), output_layouts=Replicate()),
    }


class _Own:
    ColwiseParallel, RowwiseParallel, SequenceParallel = ColwiseParallel, RowwiseParallel, SequenceParallel


def models(device: str) -> None:
    """A model of the Llama kind, split by every sort of plan, is trained as the unsplit one is."""
    with opened(device) as group:
        plans: list[tuple[dict[str, Any], bool, bool]] = [
            (NAMED, False, False),
            ({**NAMED, "head": "colwise_rep"}, False, False),
            ({**NAMED, "head": "rowwise_rep"}, False, False),
            ({**NAMED, "layers.*.mlp.up_proj": ColwiseParallel}, False, False),
            ({**NAMED, **NORMS, "head": "colwise_rep"}, True, True),
            (objects(_Own), False, True),
            (objects(torch_parallel), False, True),
        ]
        for plan, by_sequence, is_split in plans:
            for candidate in (None, "rounds(rounds=2)"):
                torch.manual_seed(9)
                whole = Model(group)
                part = copy.deepcopy(whole)
                options: dict[str, Any] = {"candidate": candidate, "backward_candidate": candidate}
                assert parallelize(part, plan, group, sequence_parallel=by_sequence, **options) is part
                train_model(group, whole, part, is_split, f"{list(plan.items())[-1]}, {candidate}")


def train_model(group: PeerGroup, whole: nn.Module, part: nn.Module, is_split: bool, what: str) -> None:
    pairs = list(counterparts(whole, part))
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9) for module in (whole, part)]
    for step in range(STEPS - 1):
        x, target = data(group, BATCH, LENGTH, WIDTH, seed=step), data(group, BATCH, LENGTH, WIDTH, seed=50 + step)
        own = regions.split(x, group, 1) if is_split else x
        losses = [functional.mse_loss(model(each), target) for model, each in ((whole, x), (part, own))]
        assert_near(losses[1], losses[0], f"{what}: loss of step {step}")
        for optimizer, loss in zip(optimizers, losses, strict=True):
            optimizer.zero_grad()
            go_back(loss)
            optimizer.step()
    for name, theirs, mine, cut in pairs:
        assert_near(mine.detach(), cut(theirs.detach()), f"{what}: {name}")


def layers(device: str) -> None:
    """Shards of whole layers: memory, names, modes, copies, other inputs, what is frozen."""
    with opened(device) as group:
        where = device_of(group)
        whole = nn.Linear(WIDTH, INNER, device=where, dtype=torch.float64).eval()
        whole.weight.requires_grad_(False)
        for kind, own in ((ColumnParallelLinear, INNER // group.num_ranks), (RowParallelLinear, INNER)):
            layer = kind.from_linear(whole, group, candidate="plain")
            assert not layer.training
            assert not layer.weight.requires_grad
            assert layer.bias is not None
            assert layer.bias.requires_grad
            assert layer.bias.shape == (own,)
            assert layer.weight.is_contiguous()
            assert layer.weight.untyped_storage().nbytes() == whole.weight.nbytes // group.num_ranks
            assert list(layer.state_dict()) == ["weight", "bias"]
            assert f"out_features={INNER}, bias=True, rank {group.rank} of {group.num_ranks}" in repr(layer)
            again = copy.deepcopy(layer)
            assert again.group is group
            assert torch.equal(again.weight, layer.weight)
            bare = kind(WIDTH, INNER, group, bias=False, device="meta", dtype=torch.float64)
            assert bare.bias is None
            torch.manual_seed(3)
            bare.to_empty(device=where).reset_parameters()
            torch.manual_seed(3)
            drawn = nn.Linear(WIDTH, INNER, bias=False, device=where, dtype=torch.float64)
            assert torch.equal(bare.weight, drawn.weight.chunk(group.num_ranks, kind.split_dim)[group.rank])
        x = data(group, 5, WIDTH).requires_grad_()
        whole = nn.Linear(WIDTH, INNER, device=where, dtype=torch.float64)
        wanted = whole(x)
        column = ColumnParallelLinear.from_linear(whole, group, gather_output=True)
        row = RowParallelLinear.from_linear(whole, group, input_is_parallel=False)
        weights = data(group, 5, INNER, seed=1)
        (expected,) = torch.autograd.grad((wanted * weights).sum(), x)
        for layer in (column, row):
            out = layer(x)
            assert_near(out, wanted, repr(layer))
            (grad,) = torch.autograd.grad((out * weights).sum(), x)
            assert_near(grad, expected, repr(layer))


def autocast(device: str) -> None:
    """float32 layers compute in bfloat16 under autocast, forward and backward, and their weights' gradients are float32.

    float64 layers stay as they are, as `torch.nn.Linear` does.
    """
    with opened(device) as group, torch.autocast(device, dtype=torch.bfloat16):
        options: dict[str, Any] = {"sequence_parallel": True, "device": device_of(group)}
        up = ColumnParallelLinear(WIDTH, INNER, group, **options)
        down = RowParallelLinear(INNER, WIDTH, group, **options)
        x = data(group, 4, WIDTH).float().requires_grad_()
        inner = up(x)
        out = down(functional.gelu(inner))
        assert (inner.dtype, out.dtype, tuple(out.shape)) == (torch.bfloat16, torch.bfloat16, (4, WIDTH))
        go_back(out.float().sum())
        assert x.grad is not None
        assert up.weight.grad is not None
        assert x.grad.dtype == up.weight.grad.dtype == torch.float32
        exact, wide = x.detach().double(), nn.Linear(WIDTH, INNER, device=device_of(group), dtype=torch.float64)
        assert_near(ColumnParallelLinear.from_linear(wide, group, gather_output=True)(exact), wide(exact), "float64")


def edges(device: str) -> None:
    """`split` and `gather`, along every dimension, are each other's gradient."""
    with opened(device) as group:
        whole = data(group, 12, 24, 12)
        for dim in (0, 1, 2, -1):
            x = whole.clone().requires_grad_()
            own = regions.split(x, group, dim)
            assert torch.equal(own, whole.chunk(group.num_ranks, dim)[group.rank])
            back = regions.gather(own * 2, group, dim)
            assert torch.equal(back, 2 * whole)
            assert back.is_contiguous()
            go_back((back * whole).sum())
            assert x.grad is not None
            assert torch.equal(x.grad, 2 * whole)
        with pytest.raises(
            ValueError, match=r"dimension 1 of a tensor of shape \[4, 13\] cannot be shared out\nhint: "
        ):
            regions.split(torch.zeros(4, 13, device=device_of(group)), group, 1)


def refusals(device: str) -> None:
    """What cannot be split says why."""
    with opened(device) as group:
        options: dict[str, Any] = {"device": device_of(group), "dtype": torch.float64}
        num = group.num_ranks
        for kind, name, sizes in (
            (ColumnParallelLinear, "out_features", (WIDTH, INNER + 1)),
            (RowParallelLinear, "in_features", (INNER + 1, WIDTH)),
        ):
            with pytest.raises(
                ValueError, match=rf"{name} of {kind.__name__} is 49, which {num} ranks cannot share\nhint: "
            ):
                kind(*sizes, group)
            for dim, shape in ((1, (4, 8)), (0, (8,)), (3, (4, 4, 8)), (-1, (4, 4, 8))):
                layer = kind(8 * num, 8 * num, group, sequence_parallel=True, sequence_dim=dim, **options)
                with pytest.raises(ValueError, match=rf"its sequence is to be dimension {dim}\nhint: sequence_dim"):
                    layer(torch.zeros(*shape, **options))
        row = RowParallelLinear(8 * num, 8, group, sequence_parallel=True, **options)
        with pytest.raises(ValueError, match=rf"is 13 long, which {num} ranks cannot share\nhint: pad it"):
            row(torch.zeros(13, 2, 8, **options))


def refused_plans(device: str) -> None:
    """What cannot be split says why, and the model is as it was."""
    with opened(device) as group:
        options: dict[str, Any] = {"device": device_of(group), "dtype": torch.float64}
        model = Model(group)
        model.tied = nn.Linear(WIDTH, WIDTH, bias=False, **options)
        model.tied.weight = model.head.weight
        model.odd = nn.Linear(WIDTH, WIDTH + 1, **options)
        model.bias = nn.Bilinear(2, 2, 2)
        before = dict(model.named_modules())
        prepare = torch_parallel.PrepareModuleOutput(output_layouts=Shard(1), desired_output_layouts=Shard(1))
        good = {"layers.0.mlp.up_proj": "colwise"}
        refused: list[tuple[Any, type[Exception], str]] = [
            ({"layers.*.up_proj": "colwise"}, ValueError, r"matches 'layers.\*.up_proj'\nhint: there is 'layers.0.mlp.up_proj'"),
            ({"blocks.*": "colwise"}, ValueError, r"no module matches 'blocks.\*'\nhint: paths are those of named_modules"),
            ({"layers.0.mlp.*_proj": "rowwise"}, ValueError, "'layers.0.mlp.up_proj' is matched by '.*' and by '.*'\nhint: one"),
            ({"head": "colwize"}, ValueError, "there is no style 'colwize'\nhint: one of colwise, rowwise"),
            ({"head": 3}, TypeError, "a style in the plan is of type int\nhint: one of colwise"),
            ({"head": prepare}, TypeError, "a PrepareModuleOutput, .*\nhint: "),
            ({"head": "colwise"}, ValueError, "'head' shares a parameter with 'tied', .*\nhint: untie"),
            ({"odd": "colwise"}, ValueError, "'odd': out_features of ColumnParallelLinear is 25, .*\nhint: take a multiple"),
            ({"bias": "colwise"}, TypeError, "'bias' is a Bilinear, and ColwiseParallel is for torch.nn.Linear\nhint: "),
            ({"odd": ColwiseParallel(Shard(-1))}, ValueError, r"'odd': there is no layer for ColwiseParallel.*\nhint: its input"),
            ({"odd": RowwiseParallel(Shard(1))}, ValueError, r"'odd': there is no layer for RowwiseParallel.*\nhint: its input"),
            ({"odd": RowwiseParallel(Partial())}, ValueError, r"'odd': a layer's layout is Partial.*\nhint: Shard or Replicate"),
        ]  # fmt: skip
        for plan, error, text in refused:
            with pytest.raises(error, match=text):
                parallelize(model, {**good, **plan}, group)
            assert dict(model.named_modules()) == before, text
        twice = nn.ModuleDict({"a": model.odd, "b": model.odd})
        with pytest.raises(ValueError, match=r"'b' has another style where it has another path\nhint: "):
            parallelize(twice, {"a": SequenceParallel(), "b": RowwiseParallel()}, group)
        parallelize(twice, {"*": "rowwise"}, group)
        assert twice["a"] is twice["b"]
        alone = parallelize(model.odd, "rowwise", group)
        assert isinstance(alone, RowParallelLinear)


CASES: dict[str, Callable[[str], None]] = {
    each.__name__: each for each in (mlps, models, layers, autocast, edges, refusals, refused_plans)
}
