"""Which parameters and buffers a stage has: those that its graph uses, and one copy of each that stages share.

Torch leaves names of tied parameters in stages that do not use them, and copies one name of several. So this is put in order
afterwards: what no graph of a stage uses is removed, names of one parameter in a stage are one object again, the first stage that
uses a parameter has the module's own, and every later one a copy.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from torch import fx, nn

from crossfade.pipelines.shared import SharedParameter

__all__ = ["tidy_parameters"]


def tidy_parameters(module: nn.Module, stages: Sequence[nn.Module]) -> tuple[SharedParameter, ...]:
    """Puts the parameters and buffers of stages in order.

    Args:
        module: the one that was split.
        stages: its stages, which are changed.

    Returns:
        The parameters that several stages use.
    """
    own = dict(module.named_parameters(remove_duplicate=False))
    users: defaultdict[int, dict[int, list[str]]] = defaultdict(dict)
    for index, stage in enumerate(stages):
        used = set(_used_names(stage))
        for name in [
            *dict(stage.named_parameters(remove_duplicate=False)),
            *dict(stage.named_buffers(remove_duplicate=False)),
        ]:
            if name not in used:
                _delete(stage, name)
            elif _name_in_whole(name) in own:
                users[id(own[_name_in_whole(name)])].setdefault(index, []).append(name)
    parameters = {id(parameter): parameter for parameter in own.values()}
    for key, places in users.items():
        original = parameters[key]
        for number, (index, names) in enumerate(sorted(places.items())):
            copy = nn.Parameter(original.detach().clone(), original.requires_grad) if number else original
            for name in names:
                _set(stages[index], name, copy)
    return tuple({index: names[0] for index, names in sorted(p.items())} for p in users.values() if len(p) > 1)


def _used_names(stage: nn.Module) -> Iterator[str]:
    """What the graph of a stage, or of a module in it, takes as an attribute."""
    for scope, module in stage.named_modules(remove_duplicate=False):
        graph = getattr(module, "graph", None)
        for node in graph.nodes if isinstance(graph, fx.Graph) else ():
            if node.op == "get_attr":
                yield f"{scope}.{node.target}" if scope else str(node.target)


def _name_in_whole(name: str) -> str:
    """A name in a stage as the module that was split has it: a module's second call is there as ``layer@1``."""
    return ".".join(part.partition("@")[0] for part in name.split("."))


def _owner(stage: nn.Module, name: str) -> tuple[nn.Module, str]:
    scope, _, last = name.rpartition(".")
    return stage.get_submodule(scope), last


def _delete(stage: nn.Module, name: str) -> None:
    owner, last = _owner(stage, name)
    delattr(owner, last)


def _set(stage: nn.Module, name: str, parameter: nn.Parameter) -> None:
    owner, last = _owner(stage, name)
    setattr(owner, last, parameter)
