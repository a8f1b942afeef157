"""Linear layers whose weight is split over the ranks, under Megatron's names.

W ranks; a whole layer is y = x weight^T + bias, with x (..., I), weight (O, I) and bias (O,).

====================  ===========  =======  ==============  ==========  ==========================================================
layer                 weight       bias     x               y           how
====================  ===========  =======  ==============  ==========  ==========================================================
ColumnParallelLinear  (O / W, I)   (O / W)  (..., I)        (..., O/W)  product; its gradient `matmul_all_reduce`
  sequence_parallel                         (S / W, ..., I) (S, ...)    `all_gather_matmul`; its gradient `matmul_reduce_scatter`
RowParallelLinear     (O, I / W)   (O)      (..., I / W)    (..., O)    `matmul_all_reduce`; its gradient a product
  sequence_parallel                         (S, ..., I / W) (S / W, ..) `matmul_reduce_scatter`; its gradient `all_gather_matmul`
====================  ===========  =======  ==============  ==========  ==========================================================

Rank r has rows or columns r / W to (r + 1) / W of the whole weight; the bias of a row-parallel layer is on all ranks, and gets its
whole gradient on all. With one seed on all ranks the shards are those of `torch.nn.Linear` with that seed. Under autocast, operands
are cast as those of `torch.nn.Linear` are. Needs torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self, TypedDict, Unpack

import torch
from torch import Tensor, nn

from crossfade.ops.choice.candidate import Candidate
from crossfade.ops.layers.regions import gather, split
from crossfade.ops.operators import all_gather_matmul, matmul_all_reduce, matmul_reduce_scatter, replicated_matmul
from crossfade.peers.groups import group_of, ranks_of

if TYPE_CHECKING:
    from crossfade.peers.group import PeerGroup
    from crossfade.peers.groups import GroupLike


class _Options(TypedDict, total=False):
    """What both layers take; see there."""

    bias: bool
    sequence_parallel: bool
    sequence_dim: int
    lane: int
    candidate: Candidate | str | None
    backward_candidate: Candidate | str | None
    device: torch.device | str | None
    dtype: torch.dtype | None


@dataclass(frozen=True)
class _Where:
    """What a layer gives its operators. A copy of the layer shares the group."""

    group: GroupLike
    lane: int
    candidate: Candidate | str | None
    backward_candidate: Candidate | str | None

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self


class _ParallelLinear(nn.Module):
    """What both layers have; see there for the arguments."""

    weight: nn.Parameter
    bias: nn.Parameter | None
    split_dim: int
    """The dimension of the weight that is split."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        group: GroupLike,
        *,
        bias: bool = True,
        sequence_parallel: bool = False,
        sequence_dim: int = 0,
        lane: int = 0,
        candidate: Candidate | str | None = None,
        backward_candidate: Candidate | str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.sequence_parallel, self.sequence_dim = sequence_parallel, sequence_dim
        self._where = _Where(group, lane, candidate, backward_candidate)
        shape = [out_features, in_features]
        name = ("out_features", "in_features")[self.split_dim]
        _, num_ranks = self._ranks = ranks_of(group)
        if shape[self.split_dim] % num_ranks:
            raise ValueError(
                f"{name} of {type(self).__name__} is {shape[self.split_dim]}, which {num_ranks} ranks cannot share\n"
                f"hint: take a multiple of {num_ranks}, or pad it"
            )
        shape[self.split_dim] //= num_ranks
        self.weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        own_bias = torch.empty(shape[0], device=device, dtype=dtype) if bias else None
        self.register_parameter("bias", None if own_bias is None else nn.Parameter(own_bias))
        self.reset_parameters()

    @property
    def group(self) -> PeerGroup:
        """The ranks; of a process group it is opened now, if it was not, which is collective."""
        return group_of(self._where.group, self.weight)

    def reset_parameters(self) -> None:
        """Draws the whole layer as `torch.nn.Linear` does, and keeps this rank's shard: equal seeds give equal wholes."""
        if self.weight.is_meta:
            return
        options: dict[str, Any] = {"device": self.weight.device, "dtype": self.weight.dtype}
        self._take(nn.Linear(self.in_features, self.out_features, bias=self.bias is not None, **options))

    @torch.no_grad()
    def _take(self, linear: nn.Linear) -> None:
        weight, bias = self._shards(linear)
        self.weight.copy_(weight)
        if self.bias is not None and bias is not None:
            self.bias.copy_(bias)

    def _shards(self, linear: nn.Linear) -> tuple[Tensor, Tensor | None]:
        """This rank's part of a whole layer."""
        rank, num_ranks = self._ranks
        weight = linear.weight.chunk(num_ranks, self.split_dim)[rank]
        bias: Tensor | None = linear.bias
        if bias is not None and self.split_dim == 0:
            bias = bias.chunk(num_ranks)[rank]
        return weight, bias

    @classmethod
    def from_linear(cls, linear: nn.Linear, group: GroupLike = None, **options: Any) -> Self:
        """This rank's shard of a whole layer, which all ranks have."""
        weight, bias = linear.weight, linear.bias
        options |= {"bias": bias is not None, "device": "meta", "dtype": weight.dtype}
        layer = cls(linear.in_features, linear.out_features, group, **options)
        own, own_bias = layer._shards(linear)
        layer.weight = _parameter(own, weight)
        if own_bias is not None:
            layer.bias = _parameter(own_bias, bias)
        return layer.train(linear.training)

    def _operands(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """x, weight^T and bias, in autocast's type where that is on."""
        weight, bias = self.weight, self.bias
        kind = x.device.type
        if not torch.is_autocast_enabled(kind):
            return x, weight.t(), bias
        dtype = torch.get_autocast_dtype(kind)
        return _cast(x, dtype), _cast(weight, dtype).t(), None if bias is None else _cast(bias, dtype)

    def _how(self) -> dict[str, Any]:
        return {"lane": self._where.lane, "backward_candidate": self._where.backward_candidate}

    def _sequence_first(self, x: Tensor) -> Tensor:
        if x.dim() < 2 or not -x.dim() <= self.sequence_dim < x.dim() or self.sequence_dim % x.dim() == x.dim() - 1:
            raise ValueError(
                f"the input of {type(self).__name__} is of shape {list(x.shape)}, and its sequence is to be dimension "
                f"{self.sequence_dim}\nhint: sequence_dim=... says which one it is; the last one are the features"
            )
        return x.movedim(self.sequence_dim, 0)

    def extra_repr(self) -> str:
        """The arguments."""
        said = f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
        said += f", rank {self._ranks[0]} of {self._ranks[1]}"
        return said + (f", sequence_parallel, sequence_dim={self.sequence_dim}" if self.sequence_parallel else "")


class ColumnParallelLinear(_ParallelLinear):
    """This rank's part of the outputs of a linear layer.

    Args:
        in_features: I.
        out_features: O, of all ranks.
        group: the ranks, as for the operators.
        bias: whether there is one.
        sequence_parallel: each rank has a part of the input's sequence.
        gather_output: all ranks get all outputs.
        sequence_dim: of the input; the first dimension costs no copy of the input.
        save_gathered: with sequence_parallel: keep the whole sequence for the gradient of the weight, or gather it again.
        lane: which lane of the group.
        candidate: how the operator is done; see `all_gather_matmul`.
        backward_candidate: how the gradient's operator is done.
        device: where the weight is; as for `torch.nn.Linear`.
        dtype: of the weight; as for `torch.nn.Linear`.

    Raises:
        ValueError: the ranks cannot share the outputs.
    """

    split_dim = 0

    def __init__(
        self,
        in_features: int,
        out_features: int,
        group: GroupLike = None,
        *,
        gather_output: bool = False,
        save_gathered: bool = True,
        **options: Unpack[_Options],
    ) -> None:
        super().__init__(in_features, out_features, group, **options)
        self.gather_output = gather_output
        self.save_gathered = save_gathered

    def forward(self, x: Tensor) -> Tensor:
        """(..., I) to (..., O / W); with sequence_parallel (S / W, ..., I) to (S, ..., O / W). All O with gather_output."""
        where = self._where
        x, weight, bias = self._operands(x)
        if self.sequence_parallel:
            rows = self._sequence_first(x)
            how = {**self._how(), "candidate": where.candidate, "save_gathered": self.save_gathered}
            out = all_gather_matmul(rows, weight, where.group, bias=bias, **how)
            out = out.view(self._ranks[1] * len(rows), *rows.shape[1:-1], weight.shape[1])
            out = out.movedim(0, self.sequence_dim)
        else:
            out = replicated_matmul(x, weight, where.group, bias=bias, **self._how())
        return gather(out, where.group, -1, lane=where.lane) if self.gather_output else out


class RowParallelLinear(_ParallelLinear):
    """This rank's part of the inputs of a linear layer; the outputs are summed over the ranks.

    Args:
        in_features: I, of all ranks.
        out_features: O.
        group: the ranks, as for the operators.
        bias: whether there is one.
        sequence_parallel: each rank gets a part of the output's sequence.
        input_is_parallel: each rank has its part of the inputs, such as a column-parallel layer gives; or else all of them.
        sequence_dim: of the output; the first dimension costs no copy.
        lane: which lane of the group.
        candidate: how the operator is done; see `matmul_reduce_scatter` and `matmul_all_reduce`.
        backward_candidate: how the gradient's operator is done, where it has one.
        device: where the weight is; as for `torch.nn.Linear`.
        dtype: of the weight; as for `torch.nn.Linear`.

    Raises:
        ValueError: the ranks cannot share the inputs.
    """

    split_dim = 1

    def __init__(
        self,
        in_features: int,
        out_features: int,
        group: GroupLike = None,
        *,
        input_is_parallel: bool = True,
        **options: Unpack[_Options],
    ) -> None:
        super().__init__(in_features, out_features, group, **options)
        self.input_is_parallel = input_is_parallel

    def forward(self, x: Tensor) -> Tensor:
        """(..., I / W) to (..., O); with sequence_parallel (S, ..., I / W) to (S / W, ..., O). All I without input_is_parallel."""
        where = self._where
        x, weight, bias = self._operands(x)
        if not self.input_is_parallel:
            x = split(x, where.group, -1, lane=where.lane)
        if not self.sequence_parallel:
            return matmul_all_reduce(x, weight, where.group, bias=bias, lane=where.lane, candidate=where.candidate)
        rows = self._sequence_first(x)
        num_ranks = self._ranks[1]
        if len(rows) % num_ranks:
            raise ValueError(
                f"the sequence in an input of shape {list(x.shape)} is {len(rows)} long, which {num_ranks} ranks cannot share\n"
                f"hint: pad it to a multiple of {num_ranks}, or leave sequence_parallel out"
            )
        out = matmul_reduce_scatter(rows, weight, where.group, bias=bias, candidate=where.candidate, **self._how())
        out = out.view(len(rows) // num_ranks, *rows.shape[1:-1], weight.shape[1])
        return out.movedim(0, self.sequence_dim)


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """As autocast does: float64 stays what it is."""
    return tensor if tensor.dtype is torch.float64 else tensor.to(dtype)


def _parameter(shard: Tensor, whole: Tensor) -> nn.Parameter:
    """Memory of its own, so that the whole can go."""
    return nn.Parameter(shard.detach().clone(memory_format=torch.contiguous_format), requires_grad=whole.requires_grad)
