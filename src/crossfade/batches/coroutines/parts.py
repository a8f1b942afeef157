"""Batches as coroutines: parts that take turns on one thread, and stop where a collective has started.

The order of turns is fixed: part 0, part 1, ..., and again, each as far as its next collective, until all have ended. It depends on
nothing but the parts' own collectives, so it is the same on all ranks that issue the same ones::

    part 0   compute | start a ............| wait a, compute | start c ...
    part 1                compute | start b .................| wait b, compute ...

A part is a greenlet, so it may stop only where the C++ frames below it allow that (`why_atomic`). Where they do not, its collective
is started and waited for in one turn, and the report says why.
"""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import copy_context
from functools import partial
from typing import Any, NamedTuple

import torch
from torch._guards import TracingContext
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from crossfade.batches.carriers.carrier import Carrier, MethodCall, group_name, options_of
from crossfade.batches.coroutines.ddp import OneBackward
from crossfade.batches.coroutines.interception import installed
from crossfade.batches.coroutines.spans import CollectiveSpan, Mark, mark, us_between
from crossfade.batches.coroutines.thread_state import ThreadState, seeded
from crossfade.batches.ranks.agreement import Agreement
from crossfade.batches.ranks.following import Issued
from crossfade.errors import BatchesError, MissingDependency

try:
    from greenlet import GreenletExit, getcurrent, greenlet
except ImportError:
    raise MissingDependency("greenlet", extra="batches", needed_for="interleaving batches") from None

_C: Any = torch._C
_inside: Any = torch.distributed.distributed_c10d
_AUTOGRAD = _C.DispatchKey.AutogradOther
_EQUAL = {
    *(
        "allreduce",
        "all_reduce",
        "broadcast",
        "reduce",
        "all_gather_single",
        "_allgather_base",
        "all_gather_into_tensor",
    ),
    *("reduce_scatter_single", "_reduce_scatter_base", "reduce_scatter_tensor"),
}
"""Collectives to which all ranks bring equally many bytes."""


def current_part() -> Part | None:
    """The part whose code this is; None outside a run, and in a greenlet that the part's own code has made."""
    here = getcurrent()
    return here if type(here) is Part else None


def why_atomic(num_operators: int = 0) -> str:
    """Why a part must not stop here, or nothing. ``num_operators``: calls of ``torch.ops`` and scripts that it is inside.

    (Keys alone do not say it: inference mode excludes autograd's everywhere, and kernels run with it and without. A switch under
    the C++ frame of an operator ends the process.)
    """
    if _C._current_graph_task_id() != -1:
        return "in a backward"
    if _C._functorch.maybe_current_level() is not None:
        return "in a function transform"
    if "torch._dynamo" in sys.modules and TracingContext.try_get() is not None:
        return "in a compilation"
    if num_operators or (
        not torch.is_inference_mode_enabled() and _C._dispatch_tls_is_dispatch_key_excluded(_AUTOGRAD)
    ):
        return "inside an operator"
    return ""


class _Started(NamedTuple):
    """A work that the module has, and is to wait for; kept, so that its id means it alone."""

    work: Any
    name: str
    args: tuple[Any, ...]
    begin: Mark


class Part(greenlet):  # type: ignore[misc,unused-ignore]
    """One batch of a run.

    Attributes:
        index: which, from 0.
        state: what torch keeps per thread, between its turns.
        result, error: how it ended.
        num_collectives, num_stops: collectives and yield points that it came to, and those where it let the others run.
        num_operators: calls of ``torch.ops`` and scripts that it is inside.
        atomic: why it did not stop at the others, with how often.
        spans: where the run records them: name, bytes, begin, end.
    """

    def __init__(self, owner: Run, index: int, call: Callable[[], Any], state: ThreadState) -> None:
        super().__init__()
        self.owner = owner
        self.index = index
        self.call = call
        self.state = state
        self.result: Any = None
        self.error: BaseException | None = None
        self.num_collectives = self.num_stops = self.num_operators = 0
        self.atomic: Counter[str] = Counter()
        self.spans: list[tuple[str, int, Mark, Mark]] = []
        self._started: dict[int, _Started] = {}
        self._is_quiet = False
        self._is_coalescing = False
        self.is_abandoned = False

    def run(self) -> None:
        """The greenlet's body."""
        try:
            self.result = self.call()
        except GreenletExit:
            pass
        except BaseException as error:
            self.error = error

    def forget(self) -> None:
        """Drops what it held: its call, its result, the modes that its state has, and its run."""
        del self.call, self.result, self.state, self.owner
        self._started.clear()

    # what the interception calls

    def on_method(self, name: str, original: Callable[..., Any], group: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        """A collective of a process group: started, and given back as a work when the others have had their turns.

        Where the module itself waits for it, the others have their turns then.
        """
        if self._is_quiet or _C._current_graph_task_id() != -1:
            return original(group, *args, **kwargs)
        if name.endswith("coalescing"):
            self._is_coalescing = name == "_start_coalescing"
            work = original(group, *args, **kwargs)
            if not self._is_coalescing:
                self._stop()
            return work
        if self._is_coalescing:  # these start together, when all are known, in the module's own group
            return original(group, *args, **kwargs)
        options = options_of(args, kwargs)
        is_waited_for = options is not None and not options.asyncOp
        begin = self._before(name, args, group)
        self._is_quiet = True
        try:
            work = self.owner.carrier.start(self.index, MethodCall(name, original, group, args, kwargs, options))
        finally:
            self._is_quiet = False
        if work is not None and not is_waited_for:
            self._started[id(work)] = _Started(work, name, args if begin is not None else (), begin)
            return work
        self._stop()
        if begin is not None and work is not None:
            work.wait()
            self._after(name, args, begin)
        return work

    def on_wait(self, original: Callable[..., Any], work: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        """The module waits for a work: the others have their turns before, if it is one that it has started without waiting."""
        started = self._started.pop(id(work), None)
        if started is None:
            return original(work, *args, **kwargs)
        self._stop()
        result = original(work, *args, **kwargs)
        if started.begin is not None:
            self._after(started.name, started.args, started.begin)
        return result

    def on_packet(self, packet: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        """A functional collective: started, and its output given back when the others have had their turns."""
        if self._is_quiet or _C._current_graph_task_id() != -1:
            return packet(*args, **kwargs)
        name = str(packet).partition(".")[2]
        begin = self._before(name, args, self.owner.group_of_packet(packet, args, kwargs))
        with self.quiet():
            out, work = self.owner.carrier.start_packet(self.index, packet, args, kwargs)
        self._stop()
        if work is not None:
            work.wait()
        if begin is not None:
            if work is None and type(out) is torch.Tensor:
                torch.ops._c10d_functional.wait_tensor(out)
            self._after(name, args, begin)
        return out

    def on_module(self, module: torch.nn.Module, output: Any) -> None:
        """A module has run that limits how batches are interleaved."""
        if isinstance(module, DistributedDataParallel):
            self.owner.one_backward.watch(module, output)
        elif isinstance(module, _BatchNorm) and module.training:
            self.owner.has_batch_norm = True

    def on_yield_point(self) -> None:
        """The user says that others may run."""
        if not self._is_quiet:
            self._before("yield_point", (), None)
            self._stop()

    def on_operator(self, operator: Callable[[], Any]) -> Any:
        """An operator that has a collective of its own, by whatever moves it: others may run when it has started, not before. Its
        exchanges on a lane are one, whatever its caller does meanwhile, and so is the opening of its group.
        """
        with self.quiet():
            result = operator()
        self.on_yield_point()
        return result

    def take_error(self) -> BaseException:
        """Its error, which is not kept: it knows the frames that it has come through, and those know this part."""
        error, self.error = self.error, None
        assert error is not None, "it has failed"
        return error

    # turns

    def _before(self, name: str, args: tuple[Any, ...], group: Any) -> Mark | None:
        self.num_collectives += 1
        owner = self.owner
        size_bytes = _size(args) if name in _EQUAL else 0
        owner.order[group].append((self.index, name, size_bytes))
        if owner.agreement is not None:
            with self.quiet():
                size = f" of {size_bytes} bytes" if name in _EQUAL else ""
                owner.agreement.compare(f"batch {self.index}, {name}{size}", group)
        return mark(on_gpu=owner.on_gpu) if owner.records else None

    def _after(self, name: str, args: tuple[Any, ...], begin: Mark) -> None:
        self.spans.append((name, _size(args), begin, mark(on_gpu=self.owner.on_gpu)))

    def _stop(self) -> None:
        """Lets the other parts run, if that is safe here."""
        why = "abandoned" if self.is_abandoned else why_atomic(self.num_operators)
        if why:
            self.atomic[why] += 1
        else:
            self.num_stops += 1
            self.parent.switch()

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Inside, collectives are not seen, and nothing stops."""
        before, self._is_quiet = self._is_quiet, True
        try:
            yield
        finally:
            self._is_quiet = before


class Run:
    """One interleaved execution of several calls.

    Args:
        carrier: how collectives go.
        agreement: where each collective is compared with the other ranks' before it starts; None where they are not compared so.
        records: whether the spans of collectives are recorded.
        on_gpu: whether the parts have streams of their own.
        streams: one a part; the current one for all, if there are none.
    """

    def __init__(
        self,
        carrier: Carrier,
        *,
        agreement: Agreement | None = None,
        records: bool = False,
        on_gpu: bool = False,
        streams: Sequence[Any] = (),
    ) -> None:
        self.carrier = carrier
        self.agreement = agreement
        self.records = records
        self.on_gpu = on_gpu
        self.order: defaultdict[Any, list[Issued]] = defaultdict(list)  # collectives by their group
        self.one_backward = OneBackward()
        self.has_batch_norm = False
        self.parts: list[Part] = []
        self._not_replayed_before = carrier.num_not_replayed
        self._streams = streams
        self._begin: Mark = None
        self._end: Mark = None

    @property
    def num_not_replayed(self) -> int:
        """How many collectives of this run were not replays of a captured graph, where there are such."""
        return self.carrier.num_not_replayed - self._not_replayed_before

    def go(self, calls: Sequence[Callable[[], Any]]) -> list[Any]:
        """Runs the calls, and gives what they returned. The first error of a part is raised, and the other parts are ended."""
        if isinstance(getcurrent(), Part):
            raise BatchesError(
                "a batch is interleaved inside another one", hint="interleave the outer module, or the inner one"
            )
        caller = torch.cuda.current_stream() if self._streams else None
        for stream in self._streams:
            stream.wait_stream(caller)
        self._begin = mark(on_gpu=self.on_gpu) if self.records else None
        installed.enter(self, current_part)
        outer = ThreadState.take()
        try:
            self.parts = [
                Part(self, index, call, seeded(outer, self._streams[index] if self._streams else None))
                for index, call in enumerate(calls)
            ]
            if outer.cpu_generator is not None:  # the parts' own began with numbers from it
                outer = outer._replace(cpu_generator=torch.default_generator.get_state())
            for part in self.parts:
                part.gr_context = copy_context()
            self._take_turns(outer)
            results = [part.result for part in self.parts]
        finally:
            installed.leave(self)
            outer.put(ThreadState.take())
            for stream in self._streams:
                caller.wait_stream(stream)  # type: ignore[union-attr]
            for part in self.parts:
                part.forget()  # a run is kept for its counts and spans only
        self._end = mark(on_gpu=self.on_gpu) if self.records else None
        if self.agreement is not None:
            common = Counter(
                part for group, issued in self.order.items() if self.agreement.is_of_all(group) for part, *_ in issued
            )
            self.agreement.compare(
                f"the end, after {', '.join(str(common[part.index]) for part in self.parts)} collectives"
            )
        return results

    def _take_turns(self, now: ThreadState) -> None:
        alive = list(self.parts)
        try:
            while alive:
                for part in tuple(alive):
                    part.state, now = part.state.turn(part.switch, now)
                    if part.dead:
                        alive.remove(part)
                        if part.error is not None:
                            raise part.take_error()
        except BaseException:  # an interrupt may also come between two turns
            self._abandon(alive)
            raise

    def _abandon(self, alive: list[Part]) -> None:
        """Ends parts in the middle: what they have to tidy up runs, with their state, and without further stops."""
        for part in alive:
            part.is_abandoned = True
            part.state, _ = part.state.turn(partial(part.throw, GreenletExit), ThreadState.take())

    @staticmethod
    def group_of_packet(packet: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The process group that a functional collective names."""
        name = group_name(packet, args, kwargs)
        return None if name is None else _inside._resolve_process_group(name)

    def timeline(self) -> tuple[list[CollectiveSpan], float]:
        """The recorded collectives of all parts, and the length of the run in microseconds. Waits for the GPU."""
        total_us = us_between(self._begin, self._end)
        spans = [
            CollectiveSpan(part.index, name, size, us_between(self._begin, begin), us_between(self._begin, end))
            for part in self.parts
            for name, size, begin, end in part.spans
        ]
        return sorted(spans, key=lambda span: span.begin_us), total_us


def _size(args: Sequence[Any]) -> int:
    """Bytes of the tensors among a collective's arguments."""
    size_bytes = 0
    for each in args:
        if isinstance(each, torch.Tensor):
            size_bytes += each.numel() * each.itemsize  # also of a sparse one, which has no nbytes
        elif isinstance(each, list | tuple):
            size_bytes += _size(each)
    return size_bytes
