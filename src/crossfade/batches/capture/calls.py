"""Calls as CUDA graphs: inputs are copied into a graph's own, it is replayed, and copies of its outputs are given.

A call with gradients is two graphs in one memory, of its forward and of its backward::

    forward    copy inputs, replay the forward                       -> copies of the outputs
    backward   copy the outputs' gradients, replay the backward      -> copies of the gradients of inputs and parameters

torch's autograd knows the pair as one function of the inputs and the parameters, so hooks of parameters, gradients that are added
up over several steps, and what stands before and behind the module are as ever. (`torch.cuda.make_graphed_callables` makes such
pairs too, but takes tensors alone, in order, runs the module three times more, and gives its own memory as gradients: what a
parameter holds of one step would change in the next.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from crossfade.batches.capture.held import WITHOUT_CAPTURE, Held, leaf_of, put_in, sources_of
from crossfade.batches.capture.limits import without_reducers
from crossfade.batches.tensors import PLAIN, leaves_of_call
from crossfade.errors import BatchesError
from crossfade.peers.replays import stop_recording

Record = Callable[[Callable[[], Any]], tuple[Callable[[], object], Any]]
"""Records what a function enqueues, in memory that all records of a recorder share. Gives what repeats it, and its result, which is
filled again each time."""


class Graphs:
    """Records CUDA graphs that are replayed in the order in which they were captured."""

    def __init__(self) -> None:
        self._pool: Any = torch.cuda.graph_pool_handle()

    def __call__(self, work: Callable[[], Any]) -> tuple[Callable[[], object], Any]:
        graph, caller = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        torch.cuda.synchronize()
        try:
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                result = work()
        except BaseException:
            torch.cuda.set_stream(caller)  # torch leaves its own one current where the end of the capture fails
            stop_recording(torch.cuda.current_device(), self._pool)
            raise
        return graph.replay, result


@contextmanager
def _own_casts() -> Iterator[None]:
    """Autocast takes no cast of a weight from before, which is freed where autocast's region ends, and keeps none."""
    was_cached = torch.is_autocast_cache_enabled()
    torch.clear_autocast_cache()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(was_cached)


class _Captured:
    """A call of a module, captured for arguments of one signature.

    Args:
        module: whose call it is.
        call: of the arguments; it has run before, so that nothing is made for the first time in the capture.
        record: what captures; by default CUDA graphs do.
    """

    def __init__(
        self,
        module: nn.Module,
        call: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        record: Record | None = None,
    ) -> None:
        self._held = Held(module)
        self._inputs, (own_args, own_kwargs) = _copies(args, kwargs)
        with _own_casts(), self._held.unchanged(self._inputs):
            self._capture(module, partial(call, *own_args, **own_kwargs), record or Graphs())

    def _capture(self, module: nn.Module, call: Callable[[], Any], record: Record) -> None:
        raise NotImplementedError


class CapturedCall(_Captured):
    """One call without gradients. It keeps no state."""

    def _capture(self, module: nn.Module, call: Callable[[], Any], record: Record) -> None:
        self._replay, output = record(call)
        _check_leaves(output)
        self._outputs, self._spec = pytree.tree_flatten(output)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._held.check()
        _fill(self._inputs, leaves_of_call(args, kwargs))
        self._replay()
        return _nested([each.clone() if isinstance(each, Tensor) else each for each in self._outputs], self._spec)


class CapturedStep(_Captured):
    """One call with gradients, and its backward. As `CapturedCall`, and:

    - the backward of a call comes before the next call, and once: what it needs of its forward is in the graphs' memory;
    - all outputs that are tensors count, and gradients of gradients are not to be had.
    """

    def _capture(self, module: nn.Module, call: Callable[[], Any], record: Record) -> None:
        self.number = 0  # of the last call; 0 where its backward has run
        self._num_calls = 0
        self._parameters = list(module.parameters())
        # Leaves of their own: a parameter's own node of autograd may be of a step before, and of a stream that is not captured.
        leaves = {id(each): leaf_of(each) for each in self._parameters}
        given = [each for each in self._inputs if isinstance(each, Tensor)]
        self._wanted = [each.requires_grad for each in (*given, *leaves.values())]
        sources = [each for each in (*given, *leaves.values()) if each.requires_grad]

        def backward(ends: Sequence[Tensor], gradients: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
            return torch.autograd.grad(ends, sources, gradients, allow_unused=True)

        with put_in(module, leaves), without_reducers():
            _warm_up(call, backward, sources)
            self._forward, output = record(call)
            _check_leaves(output)
            ends = _ends_of(output)
            if not set(sources_of(ends)) <= {id(each) for each in sources}:
                raise BatchesError(
                    "the module has a parameter that is not registered in it, or a tensor with a history",
                    hint=f"register it, or {WITHOUT_CAPTURE}",
                )
            self._gradients = [torch.zeros_like(each) for each in ends]
            self._backward, self._found = record(lambda: backward(ends, self._gradients))
        outputs, self._spec = pytree.tree_flatten(output)
        self.needs_gradient = [each.requires_grad for each in outputs if isinstance(each, Tensor)]
        self._outputs = [each.detach() if isinstance(each, Tensor) else each for each in outputs]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._held.check()
        leaves = leaves_of_call(args, kwargs)
        given = [each for each in leaves if isinstance(each, Tensor)]
        tensors = iter(_Replayed.apply(self, leaves, *given, *self._parameters))  # type: ignore[no-untyped-call]
        return _nested([next(tensors) if isinstance(each, Tensor) else each for each in self._outputs], self._spec)

    def forward(self, leaves: Sequence[Any]) -> list[Tensor]:
        """Copies of the outputs that are tensors, for the leaves of the arguments."""
        _fill(self._inputs, leaves)
        self._forward()
        self._num_calls += 1
        self.number = self._num_calls
        return [each.clone() for each in self._outputs if isinstance(each, Tensor)]

    def backward(self, number: int, gradients: Sequence[Tensor]) -> list[Tensor | None]:
        """Copies of the gradients of tensors and parameters, for those of all outputs that are tensors."""
        if number != self.number:
            raise _too_late()
        self.number = 0
        _fill(self._gradients, [each for each, needs in zip(gradients, self.needs_gradient, strict=True) if needs])
        self._backward()
        found = iter(self._found)
        return [_copy(next(found)) if is_wanted else None for is_wanted in self._wanted]


def _check_no_gradient(sources: Sequence[Tensor]) -> None:
    if any(each.grad is not None for each in sources):
        raise BatchesError("the call has a backward inside", hint=WITHOUT_CAPTURE)


def _warm_up(
    call: Callable[[], Any],
    backward: Callable[[Sequence[Tensor], Sequence[Tensor]], object],
    sources: Sequence[Tensor],
) -> None:
    """Libraries load what a backward needs, as they have for a forward.

    Nothing of this graph of autograd's is left behind: a leaf goes on using the node that it has while one lives, whose stream is
    the caller's. That stream would wait for the captured one, which ends the capture.
    """
    ends = _ends_of(call())
    _check_no_gradient(sources)
    backward(ends, [torch.ones_like(each) for each in ends])


def _too_late() -> BatchesError:
    """What a backward raises that has no graph."""
    return BatchesError(
        "the backward of a captured call comes too late, or again",
        hint=f"call backward once before the next call, on all outputs together, or {WITHOUT_CAPTURE}",
    )


def _ends_of(output: Any) -> list[Tensor]:
    """The outputs that need a gradient."""
    ends = [each for each in pytree.tree_leaves(output) if isinstance(each, Tensor) and each.requires_grad]
    if not ends:
        raise BatchesError("no output needs a gradient", hint="call it under torch.no_grad()")
    return ends


class _Replayed(torch.autograd.Function):
    """A captured step to autograd: of the tensors among the arguments, and of the parameters."""

    @staticmethod
    def forward(ctx: Any, step: CapturedStep, leaves: Sequence[Any], *_: Tensor) -> tuple[Tensor, ...]:
        outputs = step.forward(leaves)
        ctx.step, ctx.number = step, step.number
        ctx.mark_non_differentiable(
            *(out for out, needs in zip(outputs, step.needs_gradient, strict=True) if not needs)
        )
        return tuple(outputs)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        step, ctx.step = ctx.step, None  # an output that is kept does not keep the graphs
        if step is None:
            raise _too_late()
        return (None, None, *step.backward(ctx.number, gradients))


def _copies(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], Any]:
    """The leaves of arguments, tensors as copies that are leaves of autograd; and the arguments made of them.

    Copies are no inference tensors, which do not count how often they are changed.
    """
    _check_leaves((args, kwargs))
    leaves, spec = pytree.tree_flatten((args, kwargs))
    with torch.inference_mode(mode=False), torch.no_grad():
        own = [
            leaf.clone().detach().requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf
            for leaf in leaves
        ]
    return own, pytree.tree_unflatten(own, spec)


def _nested(leaves: list[Any], spec: pytree.TreeSpec) -> Any:
    """As `pytree.tree_unflatten`, and quicker where there is one leaf by itself."""
    return leaves[0] if spec.is_leaf() else pytree.tree_unflatten(leaves, spec)


def _check_leaves(value: Any) -> None:
    """A graph keeps what is no tensor as a constant, so it must be something of which `kind_of` tells one from another."""
    for leaf in pytree.tree_leaves(value):
        if not isinstance(leaf, Tensor) and type(leaf) not in PLAIN:
            raise BatchesError(
                f"an argument or output is a {type(leaf).__name__}",
                hint="captured calls have tensors, numbers and texts",
            )


def _fill(own: Sequence[Any], given: Sequence[Any]) -> None:
    """Copies into tensors of a graph, where no gradients are recorded."""
    for mine, each in zip(own, given, strict=True):
        if isinstance(mine, Tensor):
            mine.copy_(each)


def _copy(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.clone()
