"""What graphs of a module's calls go on using, and the module with leaves of autograd of a graph's own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import ref

from torch import Tensor, nn

from crossfade.batches.tensors import local_of
from crossfade.errors import BatchesError

WITHOUT_CAPTURE = "do without capture"


class Held:
    """What a module's graphs go on using: its modules, parameters and buffers, where these lie, and which modules train."""

    def __init__(self, module: nn.Module) -> None:
        self._modules = list(module.modules())
        self._children = [(own, list(own.values())) for each in self._modules if (own := each._modules)]
        self._training = [each.training for each in self._modules]
        owners: list[dict[str, Any]] = [own for each in self._modules for own in (each._parameters, each._buffers)]
        self._tensors = [(own, name, each) for own in owners for name, each in own.items() if each is not None]
        # Compared before each replay: to ask a tensor for what it may not have takes a microsecond.
        self._whole = [each for _, _, each in self._tensors if local_of(each) is each]
        self._sharded = [each for _, _, each in self._tensors if local_of(each) is not each]
        self._places = self._places_now()
        self._needs_gradient = [each.requires_grad for _, _, each in self._tensors]
        self._buffers = list(module.buffers())

    def check(self) -> None:
        """Raises where something else is there now."""
        if (
            all([list(own.values()) == children for own, children in self._children])
            and all([own.get(name) is each for own, name, each in self._tensors])
            and self._places_now() == self._places
            and [each.requires_grad for _, _, each in self._tensors] == self._needs_gradient
            and [each.training for each in self._modules] == self._training
        ):
            return
        raise BatchesError(
            "a module, parameter or buffer inside is another one, lies elsewhere or needs a gradient now and did not (or the other "
            "way round), or a module was set to training or evaluation",
            hint="a captured call goes on using the old ones: make a new handle after changing them",
        )

    def _places_now(self) -> list[int]:
        """Where parameters and buffers lie."""
        return [each.data_ptr() for each in self._whole] + [local_of(each).data_ptr() for each in self._sharded]

    @contextmanager
    def unchanged(self, inputs: Sequence[Any]) -> Iterator[None]:
        """Raises where the body has changed its own copy of an input in place, or a buffer, which then has what it had before."""
        own = [each for each in inputs if isinstance(each, Tensor)]
        buffers = [local_of(each) for each in self._buffers]
        versions, kept = [_version(each) for each in (*own, *buffers)], [each.clone() for each in buffers]
        changed = []
        try:
            yield
        finally:
            counted = [_version(each) for each in (*own, *buffers)]
            for each, before in zip(buffers, kept, strict=True):
                if not _is_same(each, before):  # a batch norm's kernels do not count what they write as a change
                    changed.append("a buffer")
                    each.data.copy_(before)  # graphs of autograd's from before know the buffer, and would see a change
            for owner, name, each in self._tensors:
                if owner.get(name) is not each:
                    changed.append("a parameter or buffer")
                    owner[name] = each
        # What is captured has not run: of a buffer too there is the count only.
        if counted != versions:
            changed.append("an argument" if counted[: len(own)] != versions[: len(own)] else "a buffer")
        if changed:
            raise BatchesError(f"the module changes {changed[0]} in place", hint=WITHOUT_CAPTURE)


def _is_same(one: Tensor, other: Tensor) -> bool:
    return bool(((one == other) | (one.isnan() & other.isnan())).all())


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


@contextmanager
def put_in(module: nn.Module, instead: Mapping[int, nn.Parameter]) -> Iterator[None]:
    """A module has other parameters meanwhile: by the `id` of its own."""
    places = [
        (each, name, own)
        for each in module.modules()
        for name, own in each.named_parameters(recurse=False, remove_duplicate=False)
    ]
    # These keep a list of theirs, and would move all weights together again where references to them are not what they were.
    recurrent: list[Any] = [each for each in module.modules() if isinstance(each, nn.RNNBase)]
    references = [each._flat_weight_refs for each in recurrent]
    try:
        for each, name, own in places:
            setattr(each, name, instead[id(own)])
        for each in recurrent:
            each._flat_weight_refs = [weight if weight is None else ref(weight) for weight in each._flat_weights]
        yield
    finally:
        for each, name, own in places:
            setattr(each, name, own)
        for each, refs in zip(recurrent, references, strict=True):
            each._flat_weight_refs = refs


def leaf_of(parameter: nn.Parameter) -> nn.Parameter:
    """One of its own for autograd, in the same memory."""
    leaf = nn.Parameter(parameter.detach(), parameter.requires_grad)
    if type(leaf) is not type(parameter):
        raise BatchesError(f"a parameter is a {type(parameter).__name__}", hint=WITHOUT_CAPTURE)
    leaf.__dict__.update(parameter.__dict__)
    return leaf


def sources_of(ends: Sequence[Tensor]) -> dict[int, Tensor]:
    """The leaves of autograd's graph behind these, by `id`."""
    found = {id(each): each for each in ends if each.grad_fn is None}
    seen, waiting = set[Any](), [each.grad_fn for each in ends if each.grad_fn is not None]
    while waiting:
        node: Any = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if (variable := getattr(node, "variable", None)) is not None:
            found[id(variable)] = variable
        waiting += [each for each, _ in node.next_functions if each is not None]
    return found
