"""Which layers of a model are split, and how: plans under the names that users of DTensor know. Needs no torch.

A style is a name, an object of this file, or one of `torch.distributed.tensor.parallel`. Layouts are torch's placements: `Shard`
of the dimension that is the sequence, or of the last one, which are the features; and `Replicate`.

==================  ===================  ==========================  ============================
style               input                output                      other layouts
==================  ===================  ==========================  ============================
ColwiseParallel     Replicate            Shard(-1)                   input Shard(sequence), output Replicate
RowwiseParallel     Shard(-1)            Replicate                   input Replicate, output Shard(sequence)
SequenceParallel    Shard(sequence)      Shard(sequence)
==================  ===================  ==========================  ============================

All tensors are local: nothing here makes a DTensor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ColwiseParallel:
    """A linear layer whose outputs are split: `crossfade.ops.ColumnParallelLinear`.

    Attributes:
        input_layouts: of the input; None for Replicate. Shard(d): each rank has a part of dimension d, the sequence.
        output_layouts: of the output; None for Shard(-1). Replicate: all ranks get all outputs.
    """

    input_layouts: Any = None
    output_layouts: Any = None

    def options(self) -> dict[str, Any]:
        """What the layer is made with.

        Raises:
            ValueError: there is no such layer.
        """
        sequence, output = _dim(self.input_layouts, None), _dim(self.output_layouts, -1)
        if sequence == -1 or output not in (-1, None):
            raise _refused(self, "its input is Replicate or Shard(sequence), and its output Shard(-1) or Replicate")
        return {**_sequence(sequence), "gather_output": output is None}


@dataclass(frozen=True)
class RowwiseParallel:
    """A linear layer whose inputs are split: `crossfade.ops.RowParallelLinear`.

    Attributes:
        input_layouts: of the input; None for Shard(-1). Replicate: all ranks have all inputs.
        output_layouts: of the output; None for Replicate. Shard(d): each rank gets a part of dimension d, the sequence.
    """

    input_layouts: Any = None
    output_layouts: Any = None

    def options(self) -> dict[str, Any]:
        """What the layer is made with.

        Raises:
            ValueError: there is no such layer.
        """
        inputs, sequence = _dim(self.input_layouts, -1), _dim(self.output_layouts, None)
        if sequence == -1 or inputs not in (-1, None):
            raise _refused(self, "its input is Shard(-1) or Replicate, and its output Replicate or Shard(sequence)")
        return {**_sequence(sequence), "input_is_parallel": inputs == -1}


@dataclass(frozen=True)
class SequenceParallel:
    """A module, such as a norm, that works on a part of the sequence with the same parameters on all ranks: they stay whole, and
    their gradients are summed over the ranks.

    Attributes:
        sequence_dim: for readers; the module does not need it.
    """

    sequence_dim: int = 1


Style = ColwiseParallel | RowwiseParallel | SequenceParallel

NAMES = ("colwise", "rowwise", "colwise_rep", "rowwise_rep", "sequence_parallel")
"""Styles by name; ``_rep``: with all outputs, or all inputs, on all ranks."""


class _Sequence:
    """A placement: the sequence is split."""

    def __init__(self, dim: int) -> None:
        self.dim = dim

    def __repr__(self) -> str:
        return f"Shard({self.dim})"

    def is_replicate(self) -> bool:
        return False

    def is_shard(self) -> bool:
        return True


class _Replicate:
    """A placement: all ranks have it."""

    def __repr__(self) -> str:
        return "Replicate()"

    def is_replicate(self) -> bool:
        return True


def style_of(given: Any, *, sequence_dim: int | None) -> Style:
    """The style that is meant."""
    if isinstance(given, Style):
        return given
    if isinstance(given, str):
        return _named(given, sequence_dim)
    if isinstance(given, type) and given.__name__ in ("ColwiseParallel", "RowwiseParallel", "SequenceParallel"):
        return style_of(given(), sequence_dim=sequence_dim)
    name = type(given).__name__
    if type(given).__module__.startswith("torch.distributed.tensor"):
        if name in ("ColwiseParallel", "RowwiseParallel"):
            style = ColwiseParallel if name.startswith("Col") else RowwiseParallel
            return style(given.input_layouts[0], given.output_layouts[0])
        if name == "SequenceParallel":
            return SequenceParallel(given.sequence_sharding[0].dim)
        if name.startswith("Prepare"):
            raise TypeError(
                f"the plan has a {name}, which is for modules that take DTensors\nhint: give the linear layers in it "
                "input_layouts=Shard(sequence); crossfade.ops.layers.regions has gather and split for other places"
            )
    raise TypeError(
        f"a style in the plan is of type {name}\nhint: one of {', '.join(NAMES)}, or a ColwiseParallel, RowwiseParallel or "
        "SequenceParallel"
    )


def _named(name: str, sequence_dim: int | None) -> Style:
    outside = None if sequence_dim is None else _Sequence(sequence_dim)
    match name:
        case "colwise":
            return ColwiseParallel(outside)
        case "rowwise":
            return RowwiseParallel(None, outside)
        case "colwise_rep":
            return ColwiseParallel(outside, _Replicate())
        case "rowwise_rep":
            return RowwiseParallel(_Replicate(), outside)
        case "sequence_parallel":
            return SequenceParallel(1 if sequence_dim is None else sequence_dim)
    raise ValueError(f"there is no style '{name}'\nhint: one of {', '.join(NAMES)}")


def _dim(placement: Any, default: int | None) -> int | None:
    """The dimension that a placement splits; None for none."""
    if placement is None:
        return default
    placement = placement[0] if isinstance(placement, tuple) else placement
    if placement.is_replicate():
        return None
    if not placement.is_shard():
        raise ValueError(f"a layer's layout is {placement!r}\nhint: Shard or Replicate")
    return int(placement.dim)


def _sequence(dim: int | None) -> dict[str, Any]:
    return {"sequence_parallel": False} if dim is None else {"sequence_parallel": True, "sequence_dim": dim}


def _refused(style: Style, hint: str) -> ValueError:
    return ValueError(f"there is no layer for {style}\nhint: {hint}")
