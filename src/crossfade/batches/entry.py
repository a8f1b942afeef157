"""The public functions. Importing this file imports neither torch nor greenlet; calling them does."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from crossfade.errors import MissingDependency

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed import ProcessGroup

    from crossfade.batches.handle import Interleaved
    from crossfade.batches.steps import InterleavedSteps

_PARTS = "crossfade.batches.coroutines.parts"


def interleave(
    module: nn.Module,
    num_batches: int = 2,
    *,
    split: Callable[..., Any] | None = None,
    join: Callable[..., Any] | None = None,
    group: ProcessGroup | None = None,
    way: str | None = None,
    capture: bool = False,
    per_shape: bool = True,
    max_ctas: int | None = None,
    timeout_s: float | None = None,
) -> Interleaved:
    """A handle that is called like the module, and hides communication of one part of a batch behind another part's computation.

    The first calls of each kind (shapes, types, training or not) measure the ways, at most 12 calls; on GPUs those that are close,
    or bound by their launches, are compared again for 12 to 15 seconds of calls. Then all ranks settle on the fastest, and on the
    whole batch where no other wins by 2 % (1 % of those that were compared once more). Where launches decide, ways are measured
    again, in at most 12 calls, when the host has become slower or faster. All ranks of the group call it equally often.

    Args:
        module: any; it is not changed. Its collectives are those of torch.distributed, functional ones and DTensor's included;
            `yield_point` stands for others.
        num_batches: parts of a batch.
        split: called with a call's args, its kwargs and the number of parts; gives the parts, each (args, kwargs, rows). By default
            tensors are split along their first dimension.
        join: called with the parts' outputs and numbers of rows; gives the output. By default tensors are joined along their first
            dimension, and single numbers are averaged by rows.
        group: the ranks that call it; None for the default group.
        way: ``"one batch"``, ``"process groups"`` or ``"copy engines"``: nothing is measured, and this is done.
        capture: also measure CUDA graphs. The module must do the same work in each call of one kind; a call with gradients has its
            backward before the next call.
        per_shape: measure again when shapes change. False: ranks may have inputs of different shapes.
        max_ctas: the most blocks of NCCL's kernels in interleaved calls; None for NCCL's choice.
        timeout_s: how long ranks wait for each other where they compare; None for as long as collectives of the group may take.

    Raises:
        MissingDependency: torch or greenlet is not installed.
        TypeError: there is no module, or a function or the group is something else.
        ValueError: an argument makes no sense.
    """
    _require_torch()
    from torch import nn

    from crossfade.batches.choice.calibration import Moves
    from crossfade.batches.handle import Interleaved
    from crossfade.batches.runner import Runner
    from crossfade.batches.tensors import join_outputs, split_batch

    if not isinstance(module, nn.Module):
        raise TypeError(
            f"interleave is given {module!r}\nhint: it takes a torch.nn.Module; crossfade.interleaved() takes functions"
        )
    if not hasattr(num_batches, "__index__") or num_batches < 2:
        raise ValueError(f"num_batches is {num_batches!r}\nhint: a whole number, 2 or more")
    for name, function in (("split", split), ("join", join)):
        if function is not None and not callable(function):
            raise TypeError(f"{name} is {function!r}\nhint: a function, or None")
    _refuse_other_groups(group)
    if capture and not per_shape:
        raise ValueError("capture=True and per_shape=False\nhint: a graph has fixed shapes: leave one of them out")
    runner = Runner(num_batches, group, Moves.of(way), capture, max_ctas, timeout_s, watches=per_shape)
    return Interleaved(module, runner, split or split_batch, join or join_outputs, per_shape=per_shape)


def interleaved(
    *,
    group: ProcessGroup | None = None,
    way: str | None = None,
    capture: nn.Module | Sequence[nn.Module] | None = None,
    per_shape: bool = True,
    max_ctas: int | None = None,
    timeout_s: float | None = None,
) -> InterleavedSteps:
    """Training steps of several batches that take turns at collectives. Keep it, and enter it once a step::

        steps = crossfade.interleaved()
        for first, second in batches:
            with steps as run:
                run(loss_of, first, weight=len(first))
                run(loss_of, second, weight=len(second))
                loss = run.backward()

    The arguments are those of `interleave`; ``"one batch"`` here means one batch after the other.

    ``capture`` is the module, or the modules, of which the functions use parameters and buffers: CUDA graphs of the batches and of
    their backward are measured too. On all ranks the functions must be the same ones in each step (the same objects), do the same
    work, and use no other tensors than those and their arguments, nor numbers that change; `backward` of the step is the only one.

    Raises:
        MissingDependency: torch or greenlet is not installed.
        TypeError: the group is something else.
        ValueError: an argument makes no sense.
    """
    _require_torch()
    from torch import nn

    from crossfade.batches.choice.calibration import Moves
    from crossfade.batches.steps import InterleavedSteps

    _refuse_other_groups(group)

    captured = [capture] if isinstance(capture, nn.Module) else capture or []
    if not isinstance(captured, list | tuple) or not all(isinstance(each, nn.Module) for each in captured):
        raise ValueError(
            f"capture is {capture!r}\nhint: give the module, or a list of the modules, that the functions use"
        )
    if captured and not per_shape:
        raise ValueError("capture and per_shape=False\nhint: a graph has fixed shapes: leave one of them out")
    return InterleavedSteps(group, Moves.of(way), per_shape, max_ctas, timeout_s, captured)


def yield_point() -> None:
    """The other batch may run here, up to its own next collective or `yield_point`. For communication that is not torch's.

    All ranks and all batches have to come here equally often. Outside an interleaved run it does nothing.
    """
    parts = sys.modules.get(_PARTS)
    part = parts.current_part() if parts is not None else None
    if part is not None:
        part.on_yield_point()


def _refuse_other_groups(group: object) -> None:
    from torch.distributed import ProcessGroup

    if group is not None and not isinstance(group, ProcessGroup):
        raise TypeError(
            f"the group is {group!r}\nhint: one of torch.distributed that this rank is in, or None for the default group"
        )


def _require_torch() -> None:
    try:
        import torch  # noqa: F401
    except ImportError:
        raise MissingDependency("torch", extra="batches", needed_for="interleaving batches") from None
