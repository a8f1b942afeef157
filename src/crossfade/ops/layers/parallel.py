"""Puts layers that are split over the ranks into a model, by a plan."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn

from crossfade.ops.choice.candidate import Candidate
from crossfade.ops.layers.linear import ColumnParallelLinear, RowParallelLinear
from crossfade.ops.layers.plans import ColwiseParallel, SequenceParallel, Style, style_of
from crossfade.peers import collectives

if TYPE_CHECKING:
    from crossfade.peers.groups import GroupLike


def parallelize(
    module: nn.Module,
    plan: Mapping[str, Any] | Any,
    group: GroupLike = None,
    *,
    sequence_parallel: bool = False,
    sequence_dim: int = 1,
    lane: int = 0,
    candidate: Candidate | str | None = None,
    backward_candidate: Candidate | str | None = None,
) -> nn.Module:
    """Replaces linear layers by this rank's shards of them. All ranks have the same whole model before, and give the same plan.

    Everything is checked first: where this raises, the model is as it was. Parameters of replaced layers are new, so an optimizer
    is made afterwards. A model takes its number of heads (and with ``sequence_parallel`` the length of the sequence) from what its
    layers give, as in ``q.view(*q.shape[:-1], -1, head_size)``.

    Args:
        module: the whole model, changed in place.
        plan: patterns of module paths, and a style for each (see `crossfade.ops.layers.plans`). ``*`` in a pattern stands for one
            name, or a part of one, as in ``layers.*.mlp.up``. Or one style, for a module that is a layer itself.
        group: the ranks, as for the operators.
        sequence_parallel: for styles given by name: each rank has a part of the sequence between the layers.
        sequence_dim: which dimension that is.
        lane: which lane of the group.
        candidate: how the operators are done; None for what was tuned, or else for what the model finds best.
        backward_candidate: how those of the gradients are done.

    Returns:
        The module; of a layer by itself the shard.

    Raises:
        ValueError: the plan has an unknown style, a pattern that matches nothing, or two that match one module; or a layer cannot
            be split.
        TypeError: what is to be split is no linear layer.
    """
    options: dict[str, Any] = {"lane": lane, "candidate": candidate, "backward_candidate": backward_candidate}
    dim = sequence_dim if sequence_parallel else None
    if not isinstance(plan, Mapping):
        plan = {"": plan}
    styles = {pattern: style_of(style, sequence_dim=dim) for pattern, style in plan.items()}
    chosen = _match(module, styles)
    _check_shared(module, chosen)
    made = _make(chosen, group, options)
    for whole in {id(whole): whole for _, whole, style in chosen if isinstance(style, SequenceParallel)}.values():
        for parameter in whole.parameters():
            if parameter.requires_grad:
                parameter.register_hook(partial(_sum, group, lane))  # type: ignore[no-untyped-call]
    for path, whole, _ in chosen:
        if not path:
            return made[id(whole)]
        parent, _, name = path.rpartition(".")
        setattr(module.get_submodule(parent), name, made[id(whole)])
    return module


_Choice: TypeAlias = tuple[str, nn.Module, Style]
"""A module that the plan names: its path, itself, and its style."""


def _match(module: nn.Module, styles: Mapping[str, Style]) -> list[_Choice]:
    """All that patterns match, in the order of the model."""
    modules = dict(module.named_modules(remove_duplicate=False))
    by_path: dict[str, str] = {}
    for pattern in styles:
        found = [path for path in modules if _matches(path, pattern)]
        if not found:
            raise ValueError(f"no module matches '{pattern}'\nhint: {_like(pattern, list(modules))}")
        for path in found:
            if path in by_path:
                raise ValueError(
                    f"'{path}' is matched by '{by_path[path]}' and by '{pattern}'\nhint: one style for each module"
                )
            by_path[path] = pattern
    return [(path, whole, styles[by_path[path]]) for path, whole in modules.items() if path in by_path]


def _matches(path: str, pattern: str) -> bool:
    if not path:
        return not pattern  # the module itself
    names, parts = path.split("."), pattern.split(".")
    return len(names) == len(parts) and all(map(fnmatchcase, names, parts))


def _like(pattern: str, paths: list[str]) -> str:
    """What there is that ends as the pattern does, or else how patterns are read."""
    last = pattern.rpartition(".")[2]
    alike = [path for path in paths if path and fnmatchcase(path.rpartition(".")[2], last)]
    if alike and last != "*":
        return f"there is {', '.join(repr(path) for path in alike[:3])}; * stands for one name between dots"
    return f"paths are those of named_modules(), such as {paths[-1]!r}; * stands for one name between dots"


def _check_shared(module: nn.Module, chosen: Iterable[_Choice]) -> None:
    """A weight that a layer shares with another module would come apart."""
    users: dict[int, set[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        users.setdefault(id(parameter), set()).add(name.rpartition(".")[0])
    for path, whole, style in chosen:
        if isinstance(style, SequenceParallel):
            continue
        for parameter in whole.parameters(recurse=False):
            others = {user for user in users[id(parameter)] if module.get_submodule(user) is not whole}
            if others:
                raise ValueError(
                    f"'{path}' shares a parameter with '{min(others)}', which would be split from it\n"
                    "hint: untie them, or leave it out of the plan"
                )


def _make(chosen: Iterable[_Choice], group: GroupLike, options: Mapping[str, Any]) -> dict[int, nn.Module]:
    """What each module is replaced by; once, where it has several paths."""
    made: dict[int, nn.Module] = {}
    styles: dict[int, Style] = {}
    for path, whole, style in chosen:
        if styles.setdefault(id(whole), style) != style:
            raise ValueError(f"'{path}' has another style where it has another path\nhint: give one style to both")
        if id(whole) not in made:
            made[id(whole)] = _replacement(path, whole, style, group, options)
    return made


def _replacement(path: str, whole: nn.Module, style: Style, group: GroupLike, options: Mapping[str, Any]) -> nn.Module:
    if isinstance(style, SequenceParallel):
        return whole
    if type(whole) is not nn.Linear:
        raise TypeError(
            f"'{path}' is a {type(whole).__name__}, and {type(style).__name__} is for torch.nn.Linear\n"
            "hint: leave it out of the plan: it stays whole on all ranks"
        )
    layer = ColumnParallelLinear if isinstance(style, ColwiseParallel) else RowParallelLinear
    try:
        return layer.from_linear(whole, group, **style.options(), **options)
    except ValueError as error:
        raise ValueError(f"'{path}': {error}") from None


def _sum(group: GroupLike, lane: int, grad: Tensor) -> Tensor:
    """Behind the backward pass of the module, before the gradient is added to what is there."""
    with torch.no_grad():
        return collectives.all_reduce(grad.detach(), group, lane=lane)
