"""`split`: a module that can be traced becomes stages for `torch.distributed.pipelining`, cut where measurements say."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch import fx, nn
from torch.distributed import ProcessGroup
from torch.distributed.pipelining import Pipe, pipeline
from torch.utils import _pytree as pytree

from crossfade.errors import GraphError
from crossfade.pipelines.agreement import decided_by_first, gathered
from crossfade.pipelines.cuts import stages_of
from crossfade.pipelines.cutting import Look, Wish, find_cuts
from crossfade.pipelines.graph import TracedGraph, module_of
from crossfade.pipelines.measure_stages import RunnableStage, StageTimes, mean_times, measure_stages
from crossfade.pipelines.predict import Prediction, predict
from crossfade.pipelines.report import StageReport, format_stages
from crossfade.pipelines.shared import SharedParameter, sync_shared_gradients, tidy_parameters
from crossfade.pipelines.stages import cut_graph
from crossfade.pipelines.timing import Loss, tensors_in, undisturbed
from crossfade.schedule.cost import CostModel
from crossfade.topology import Topology
from crossfade.types import Transport

if TYPE_CHECKING:
    from torch.distributed.pipelining.stage import _PipelineStage


class Split:
    """A module in stages; ``print(split)`` shows where it was cut and why.

    Attributes:
        stages: what is known of each stage.
        shared: the parameters that several stages have copies of: for each the stages, with its name in each.
        device: where it was measured.
    """

    def __init__(
        self,
        pipe: Pipe,
        stages: Sequence[StageReport],
        looks: Sequence[Look],
        shared: Sequence[SharedParameter],
        device: torch.device,
    ) -> None:
        self._pipe, self._looks = pipe, tuple(looks)
        self.stages, self.shared = tuple(stages), tuple(shared)
        self.device = device

    @property
    def num_stages(self) -> int:
        """How many stages there are."""
        return len(self.stages)

    @property
    def modules(self) -> list[nn.Module]:
        """The stages' modules: each takes what the one before it returns; the first one takes the inputs, the last one returns the
        outputs. Parameters are those of the module that was split, but for copies of shared ones.
        """
        return [self._pipe.get_stage_module(index) for index in range(self.num_stages)]

    @property
    def imbalance(self) -> float:
        """The slowest stage's time over the mean of all, less 1."""
        times_us = [stage.times.time_us for stage in self.stages]
        return max(times_us) * len(times_us) / sum(times_us) - 1

    def __repr__(self) -> str:
        return f"Split(num_stages={self.num_stages}, device={str(self.device)!r})"

    def build_stage(
        self, index: int, device: torch.device | str | None = None, group: ProcessGroup | None = None
    ) -> _PipelineStage:
        """Returns torch's pipeline stage, for any of torch's schedules; its module is moved to the device.

        Args:
            index: of the stage, from 0.
            device: where it runs; where it was measured, if None.
            group: the ranks of the pipeline; the default group, if None.

        Raises:
            IndexError: there is no such stage.
        """
        if not 0 <= index < self.num_stages:
            raise IndexError(f"there is no stage {index}\nhint: stages are numbered from 0 to {self.num_stages - 1}")
        return self._pipe.build_stage(index, torch.device(device or self.device), group)

    def sync_shared_gradients(self, stages: Sequence[Any]) -> None:
        """Gives all copies of each shared parameter the sum of their gradients. Call it on every rank, after the schedule's step
        and before the optimizer's. It does nothing where no parameter is shared.

        Args:
            stages: the stages of this rank, that the schedule was made with.

        Raises:
            GraphError: no stage was given.
        """
        sync_shared_gradients(self.shared, stages)

    def predict(
        self,
        schedule: str,
        num_microbatches: int,
        num_ranks: int | None = None,
        *,
        costs: CostModel | None = None,
        transport: Transport | str | None = None,
        topology: Topology | None = None,
    ) -> Prediction:
        """Predicts a training step: its time, the ranks' bubbles and memory, and the communication that is exposed.

        Args:
            schedule: one of `crossfade.pipelines.SCHEDULES`.
            num_microbatches: of one step.
            num_ranks: of the pipeline. None: as many as there are stages, or half as many for schedules that have several
                on a rank.
            costs: what transfers cost, and how many cores there are; by default enough cores for every rank, and on CPUs what
                transfers of `crossfade.p2p` were measured to cost.
            transport: how values go between ranks; by default ``copy`` between GPUs and ``shm`` between CPUs.
            topology: a described cluster on which the ranks are, one on each GPU in order, or by its placement, in which they are
                called ``rank0``, ``rank1``, ... None for one host.

        Raises:
            GraphError: the schedule or the transport does not exist, or cannot run with these numbers; the message says why.
        """
        return predict(self.stages, schedule, num_microbatches, num_ranks, self.device, costs, transport, topology)

    def __str__(self) -> str:
        best = min(self._looks, key=lambda look: look.slowest_us)
        tried = ", ".join(f"{look.slowest_us / 1e3:.2f} ms" for look in self._looks)
        slowest_us = max(stage.times.time_us for stage in self.stages)
        lines = [
            *format_stages(self.stages),
            "",
            f"the slowest stage takes {slowest_us / 1e3:.2f} ms, {self.imbalance:.1%} more than the mean",
            f"cuts that were tried, by their slowest stage: {tried}; number {self._looks.index(best) + 1} was taken",
        ]
        for names in self.shared:
            where = ", ".join(f"stage {index} ({name})" for index, name in sorted(names.items()))
            lines.append(
                f"shared parameter, a copy in each: {where}; call sync_shared_gradients before the optimizer's step"
            )
        return "\n".join(lines)


def split(
    module: nn.Module,
    example_inputs: Sequence[Any] | torch.Tensor,
    num_stages: int,
    *,
    kwargs: Mapping[str, Any] | None = None,
    loss_fn: Callable[..., torch.Tensor] | None = None,
    target: Any = None,
    device: torch.device | str | None = None,
    group: ProcessGroup | None = None,
    memory_limit_bytes: int | None = None,
    num_alive: int | None = None,
    num_passes: int = 5,
    tolerance: float = 0.02,
) -> Split:
    """Cuts a module into stages that take about the same time, forward and backward.

    The module is traced by `torch.export`, and runs some times on the example inputs; its gradients, buffers and the random
    numbers' states are then what they were. Sizes, constants, and whether it trains or evaluates become part of the stages.

    Where torch.distributed is initialised, all ranks of the group call it, with a module that is alike on all of them (one seed,
    or one checkpoint). The group's first rank measures and chooses, and the others take its cuts; then all of them measure the
    stages, at the same time, as they will run.

    Args:
        module: takes tensors, and returns a tensor or a tuple or list of tensors.
        example_inputs: of one microbatch: a tensor, or several in a tuple.
        num_stages: at least 1.
        kwargs: keyword inputs, tensors too.
        loss_fn: the schedule's loss function, called with what the module returns and the target: the last stage computes it, so
            its time counts there. None for none.
        target: of one microbatch; with ``loss_fn``, and only then.
        device: where to measure; the module is moved there. None: where it is.
        group: the ranks that call it; the default group, if None.
        memory_limit_bytes: of each stage: parameters, their gradients, buffers, and the activations of ``num_alive``
            microbatches. The optimizer's state is not counted.
        num_alive: how many microbatches a stage holds activations of, at most; ``num_stages`` if None, which is what 1F1B's first
            one has.
        num_passes: how often each thing is measured; medians count.
        tolerance: how much longer than necessary the slowest stage may be for fewer bytes that cross.

    Raises:
        GraphError: the module cannot be traced or cut so, an input or output is not supported, or one of ``loss_fn`` and
            ``target`` is missing; the message says why, the hint what to do.
        TypeError: there is no module.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"split is given {module!r}\nhint: it takes a torch.nn.Module; call the function in a module's forward"
        )
    if (loss_fn is None) != (target is None):
        given, missing = ("target", "loss_fn") if loss_fn is None else ("loss_fn", "target")
        raise GraphError(
            f"{given} is given, and {missing} is missing",
            hint="give both: loss_fn=..., and target=... of one microbatch, which may be anything if the loss does not look at it",
        )
    if num_stages < 1 or num_passes < 1:
        raise GraphError(f"num_stages={num_stages}, num_passes={num_passes}", hint="both are at least 1")
    where = torch.device(device) if device is not None else _device_of(module)
    module.to(where)
    args = (example_inputs,) if isinstance(example_inputs, torch.Tensor) else tuple(example_inputs)
    args, named, target = pytree.tree_map_only(torch.Tensor, lambda t: t.to(where), (args, dict(kwargs or {}), target))
    wish = Wish(num_stages, memory_limit_bytes, num_alive or num_stages, num_passes, tolerance)
    with undisturbed(module, where):
        _check_values(module, args, named)
        return _Splitter(module, args, named, Loss(loss_fn, target), where, wish, group).split()


class _Splitter:
    """The way from a module to its stages: torch traces it, and asks for the cuts on the way."""

    def __init__(
        self,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        loss: Loss,
        device: torch.device,
        wish: Wish,
        group: ProcessGroup | None,
    ) -> None:
        self._module, self._args, self._kwargs, self._group = module, args, kwargs, group
        self._loss, self._device, self._wish = loss, device, wish
        self._looks: list[Look] = []
        self._names: list[tuple[str, str]] = []

    def split(self) -> Split:
        """Traces, cuts, and measures the stages once more, as they are."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch's own, about what it does itself
                pipe = pipeline(self._module, self._args, self._kwargs, split_policy=self._cut)
        except GraphError:
            raise
        except Exception as error:
            cause = str(error.__cause__ or error).strip().partition("\n")[0]
            raise GraphError(
                f"the module cannot be traced and cut: {cause}",
                hint="torch.export.export(module, example_inputs) must succeed: no Python decisions on values of tensors, "
                "no calls of code that torch does not know",
            ) from error
        modules = [pipe.get_stage_module(index) for index in range(pipe.num_stages)]
        shared = tidy_parameters(self._module, modules)
        return Split(pipe, self._reports(modules), self._looks, shared, self._device)

    def _cut(self, traced: fx.GraphModule) -> fx.GraphModule:
        graph = TracedGraph(traced)
        inputs = pytree.tree_leaves((self._args, self._kwargs))

        def find() -> list[Any]:
            return [asdict(look) for look in find_cuts(graph, inputs, self._loss, self._device, self._wish)]

        self._looks = msgspec.convert(decided_by_first(self._group, find), list[Look])
        cuts = min(self._looks, key=lambda look: look.slowest_us).cuts
        for stage in stages_of(cuts, len(graph.operations)):
            self._names.append((module_of(graph.operations[stage[0]]), module_of(graph.operations[stage[-1]])))
        cut_graph(graph, cuts)
        return traced

    def _reports(self, modules: Sequence[nn.Module]) -> list[StageReport]:
        stages = [RunnableStage(self._runner(m, i), [*m.parameters()], [*m.buffers()]) for i, m in enumerate(modules)]
        inputs = tensors_in(tuple(pytree.tree_leaves((self._args, self._kwargs))))

        def measure() -> list[Any]:
            times = measure_stages(stages, inputs, self._loss, self._device, self._wish.num_passes)
            return [asdict(each) for each in times]

        seen_by_ranks = zip(*gathered(self._group, measure), strict=True)
        times = [mean_times(msgspec.convert(seen, list[StageTimes])) for seen in seen_by_ranks]
        reports = [_report(names, stage, seen) for names, stage, seen in zip(self._names, stages, times, strict=True)]
        for each in (parameter for stage in stages for parameter in stage.parameters):
            each.grad = None
        self._check_memory(reports)
        return reports

    def _runner(self, module: nn.Module, index: int) -> Callable[[tuple[torch.Tensor, ...]], tuple[torch.Tensor, ...]]:
        if index == 0:
            return lambda _: tensors_in(module(*self._args, **self._kwargs))
        return lambda values: tensors_in(module(*values))

    def _check_memory(self, reports: Sequence[StageReport]) -> None:
        limit_bytes = self._wish.memory_limit_bytes
        for index, each in enumerate(reports):
            total_bytes = each.held_bytes + self._wish.num_alive * each.times.activation_bytes
            if limit_bytes is not None and total_bytes > limit_bytes:
                raise GraphError(
                    f"stage {index} takes {total_bytes:,} bytes, more than the {limit_bytes:,} of memory_limit_bytes",
                    hint="ask for more stages, give a smaller microbatch, or raise memory_limit_bytes",
                )


def _report(names: tuple[str, str], stage: RunnableStage, times: StageTimes) -> StageReport:
    return StageReport(
        first=names[0],
        last=names[1],
        times=times,
        parameter_bytes=sum(each.nbytes for each in stage.parameters),
        gradient_bytes=sum(each.nbytes for each in stage.parameters if each.requires_grad),
        buffer_bytes=sum(each.nbytes for each in stage.buffers),
    )


def _device_of(module: nn.Module) -> torch.device:
    return next((each.device for each in (*module.parameters(), *module.buffers())), torch.device("cpu"))


def _check_values(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuses inputs and outputs that stages cannot pass on."""
    for value in pytree.tree_leaves((args, kwargs)):
        if not isinstance(value, torch.Tensor):
            raise GraphError(
                f"an example input is a {type(value).__name__}: {value!r}",
                hint="inputs are tensors; set anything else in the module, or in a module around it",
            )
    with torch.no_grad():
        returned = module(*args, **kwargs)
    values = list(returned) if isinstance(returned, tuple | list) else [returned]
    if not values or not all(isinstance(each, torch.Tensor) for each in values):
        raise GraphError(
            f"the module returns a {type(returned).__name__}, not a tensor or a tuple or list of tensors",
            hint="put a module around it that returns its tensors in a tuple",
        )
