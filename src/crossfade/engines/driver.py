"""The driver's own part of a plan: it writes inputs, and reads outputs, when the user says so."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from crossfade.channels.protocol import EMPTY, Reader, Writer
from crossfade.channels.values import codec
from crossfade.engines.protocol import ActorStatistics, Arrival
from crossfade.engines.unpicklable import hint_for, name_culprit
from crossfade.errors import ChannelBroken, ChannelError, CrossfadeError, Failure
from crossfade.interrupted import came_while_waiting, passed_through, passed_through_others
from crossfade.plan.actions import Action, Verb
from crossfade.plan.plan import Plan
from crossfade.plan.spans import Span
from crossfade.runtime.bind import Ends
from crossfade.runtime.record import Recorder
from crossfade.runtime.static_shape import StaticShape
from crossfade.types import DRIVER


class DriverEnds:
    """Submits executions and collects their outputs.

    Once there are ``losses``, actors that cannot continue, nothing is written any more; what has arrived is still collected.
    """

    def __init__(self, plan: Plan, ends: Ends, recorder: Recorder | None, losses: Sequence[object] = ()) -> None:
        self._plan = plan
        self._losses = losses
        self._ends = ends
        self._recorder = recorder
        program = plan.programs[DRIVER]
        written = [plan.channel[a.target] for a in program if a.verb is Verb.WRITE]
        # A value that its readers want on different devices goes by several channels.
        inputs = [(i, c.id) for i, spec in enumerate(plan.inputs) for c in written if c.value == spec.value]
        self._inputs = [index for index, _ in inputs]
        self._writes = [ends.writers[name].try_write for _, name in inputs]
        reads = [plan.channel[a.target] for a in program if a.verb is Verb.READ]
        self._reads = [ends.readers[channel.id].try_read for channel in reads]
        self._channels = [channel.id for channel in reads]
        by_value = {channel.value: channel.id for channel in reads}
        self._idles = [ends.readers[by_value[value]].is_idle for value in plan.outputs]
        self._places = [tuple(i for i, v in enumerate(plan.outputs) if v == channel.value) for channel in reads]
        self._num_read = [0] * len(reads)  # for each channel, how many executions' values were read
        self._static = [
            (i, StaticShape(plan, each.value)) for i, each in enumerate(plan.inputs) if each.value in plan.static
        ]
        self._rooms = [ends.writers[name].has_room for _, name in inputs]
        self._is_writing = False  # some inputs of an execution are written, but not all
        self.num_submitted = 0
        if recorder is not None:
            self._writes = [
                self._recorded(write, Action(Verb.WRITE, name), lambda: self.num_submitted)
                for write, (_, name) in zip(self._writes, inputs, strict=True)
            ]
            self._reads = [
                self._recorded(read, Action(Verb.READ, channel.id), partial(self._num_read.__getitem__, index))
                for index, (read, channel) in enumerate(zip(self._reads, reads, strict=True))
            ]

    @property
    def try_submit(self) -> Callable[[Sequence[Any]], bool]:
        """`OpenPlan.try_submit`. (No attribute holds it: ends that refer to themselves would die late.)"""
        return self._submit_one if len(self._writes) == 1 and not self._static else self._submit_all

    def _submit_one(self, values: Sequence[Any]) -> bool:
        """For one input, and no promise about its shape."""
        if self._losses:
            raise _lost()
        try:
            is_written = self._writes[0](values[0])
        except Exception as error:
            self._name_culprit(error, values)
            raise
        if is_written:
            self.num_submitted += 1
        return is_written

    def _submit_all(self, values: Sequence[Any]) -> bool:
        if self._losses:
            raise _lost()
        if self._static:
            self._check_shapes(values)
        if not all(has_room() for has_room in self._rooms):
            return False
        try:
            if not self._writes[0](values[0]):
                return False
        except Exception as error:
            self._name_culprit(error, values)
            raise
        self._is_writing = True
        failure = self._write_rest(values)
        self._is_writing = False
        self.num_submitted += 1
        if failure is not None:
            raise failure.to_error()
        return True

    def _name_culprit(self, error: Exception, values: Sequence[Any]) -> None:
        if _came_of_pickling(error):
            name_culprit(error, [(self._input_name(0), values[0])])

    def is_submitted(self, number: int, error: BaseException) -> bool | None:
        if self.num_submitted > number:
            return True
        is_ours = not passed_through_others(error)
        if is_ours and isinstance(error, CrossfadeError):  # it came before the first write, or the graph has ended
            return False
        is_refused = (
            is_ours and isinstance(error, OSError) and error.errno is not None
        )  # there is no memory for a value
        is_clean = (
            is_refused or came_while_waiting(error) or (isinstance(error, Exception) and _came_of_pickling(error))
        )
        return False if is_clean and not self._is_writing else None

    def _check_shapes(self, values: Sequence[Any]) -> None:
        for index, shape in self._static:
            if not self.num_submitted:  # an execution that did not start declared nothing
                shape.declare(values[index])
            elif (error := shape.fault_of(values[index])) is not None:
                raise error

    def _write_rest(self, values: Sequence[Any]) -> Failure | None:
        """Writes all inputs but the first, for which there is room. For one that cannot be pickled, and all after it, that error is
        written: the execution is under way, and its actors get an error instead of a missing value.
        """
        failure: Failure | None = None
        for index, write in zip(self._inputs[1:], self._writes[1:], strict=True):
            try:
                write(values[index] if failure is None else failure)
            except ChannelError:
                raise
            except Exception as error:
                if not _came_of_pickling(error):
                    raise  # a signal's handler raised it: the value may be written or not
                node, hint = f"pickling {self._input_name(index)}", hint_for(error, values[index])
                failure = Failure.capture(error, actor=DRIVER, node=node, hint=hint)
                write(failure)
        return failure

    def _input_name(self, index: int) -> str:
        """How an error calls what the driver writes for an input."""
        key = self._plan.inputs[index].key
        return "the argument of execute" if key == "*" else f"the argument inp{key} of execute"

    def try_take(self) -> Any:
        value = self._reads[0]()
        if value is not EMPTY:
            self._num_read[0] += 1
        elif self._losses:
            raise _lost()
        return value

    def try_collect(self) -> Sequence[Arrival]:
        """A channel that has ended does not keep other outputs from arriving."""
        arrivals: list[Arrival] = []
        broken: ChannelError | None = None
        for index, read in enumerate(self._reads):
            number = self._num_read[index]
            if number == self.num_submitted:
                continue
            try:
                value = read()
            except ChannelError as error:
                broken = broken or error
                continue
            if value is not EMPTY:
                self._num_read[index] = number + 1
                arrivals.append((number, self._places[index], value))
        if not arrivals and (broken is not None or self._losses):
            raise broken or _lost()
        return arrivals

    def idle(self, place: int) -> Callable[[], bool]:
        """Returns a cheap check: True as long as that output has most likely not arrived."""
        return self._idles[place]

    def awaited(self) -> str:
        """Returns the output channel from which the fewest values were read."""
        return self._channels[self._num_read.index(min(self._num_read))]

    def _recorded(self, move: Callable[..., Any], action: Action, execution: Callable[[], int]) -> Callable[..., Any]:
        recorder = self._recorder
        waiting_since = 0

        def recorded(*args: Any) -> Any:
            nonlocal waiting_since
            start = time.monotonic_ns()
            result = move(*args)
            if result is False or result is EMPTY:
                waiting_since = waiting_since or start
            elif recorder is not None:
                if waiting_since:
                    recorder.add(action, action.target, "wait", execution(), waiting_since, start)
                    waiting_since = 0
                recorder.add(action, action.target, "communicate", execution(), start, time.monotonic_ns())
            return result

        return recorded

    def spans(self) -> list[Span]:
        return [] if self._recorder is None else self._recorder.spans()

    def statistics(self) -> ActorStatistics:
        return ActorStatistics(min(self._num_read), channel_statistics(self._ends))

    def close(self) -> None:
        ends: list[Writer | Reader] = [*self._ends.writers.values(), *self._ends.readers.values()]
        for end in ends:
            end.close()


def _came_of_pickling(error: BaseException) -> bool:
    """Whether an error was raised while a value was pickled, by any code: nothing of the value is written then."""
    return passed_through(error, codec.__name__)


def _lost() -> ChannelBroken:
    return ChannelBroken("an actor of the graph cannot continue")


def channel_statistics(ends: Ends) -> dict[str, dict[str, int]]:
    """Counters of each end, as plain data."""
    named = [(f"write {name}", end.statistics()) for name, end in ends.writers.items()]
    named += [(f"read {name}", end.statistics()) for name, end in ends.readers.items()]
    named += [(f"coll {name}", end.statistics()) for name, end in ends.collectives.items()]
    return {name: asdict(statistics) for name, statistics in named}
