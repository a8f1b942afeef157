"""Turn one party's part of a plan into a flat list of bound calls, once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from crossfade.channels.protocol import EMPTY, Reader, Writer
from crossfade.channels.values.codec import hint_for_pickling
from crossfade.collectives.protocol import Collective
from crossfade.errors import ChannelError, Failure
from crossfade.plan.actions import MAIN, Action, Verb
from crossfade.plan.call import Call
from crossfade.plan.plan import NodeSpec, Plan
from crossfade.plan.text import values_used
from crossfade.runtime.cursor import Cursor, Round, Step, behind, inside, unless
from crossfade.runtime.guard import Guard
from crossfade.runtime.intake import Intake, Registers, settler
from crossfade.runtime.nvtx import find_ranges
from crossfade.runtime.record import Recorder
from crossfade.runtime.run import Runner
from crossfade.runtime.static_shape import StaticShape
from crossfade.runtime.waiting import Bound, Waiting

if TYPE_CHECKING:
    from crossfade.runtime.device_record import DeviceRecorder


@dataclass(slots=True)
class Ends:
    """One party's ends of a plan's channels, by channel id, and of its collectives, by collective id."""

    writers: dict[str, Writer] = field(default_factory=dict)
    readers: dict[str, Reader] = field(default_factory=dict)
    collectives: dict[str, Collective] = field(default_factory=dict)


def bind(
    plan: Plan,
    actor: str,
    methods: Mapping[str, Callable[..., Any]],
    calls: Mapping[str, Call],
    ends: Ends,
    recorder: Recorder | None = None,
    guard: Guard | None = None,
    devices: Sequence[tuple[DeviceRecorder, int]] = (),
    before_run: Sequence[Callable[[], None]] = (),
    fatal: tuple[type[BaseException], ...] = (SystemExit, KeyboardInterrupt),
) -> Cursor:
    """A cursor that runs ``actor``'s program. ``methods`` (bound) and ``calls`` are by the ids of its nodes.

    ``devices`` records, beside ``recorder``, what the methods enqueue, each on a stream. ``before_run`` is called before each
    method. A ``fatal`` error of a method ends more than its own execution; every other is what its readers get.
    """
    binder = _Binder(plan, actor, methods, calls, ends, guard, before_run, fatal)
    program = plan.programs[actor]
    if recorder is not None:
        _listen(plan, program, ends, recorder)
    body = [bound for action in program for bound in binder.steps(action)]
    max_ahead = max((action.ahead for action in program), default=0)
    ahead = [[b for b in body if b.action.ahead and b.action.ahead + t >= 0] for t in range(-max_ahead, 0)]
    round_ = Round(-max_ahead) if recorder is None else recorder.round
    round_.number = -max_ahead

    def wrapped(bounds: Sequence[Bound]) -> list[Step]:
        steps = [
            bound.step if recorder is None else _recorded(bound, plan, binder, recorder, devices) for bound in bounds
        ]
        return [behind(bound.before, step) for bound, step in zip(bounds, steps, strict=True)]

    # A recorder has to see each step that cannot run yet, so nothing may look before it.
    looks = {index: bound.idle for index, bound in enumerate(body) if bound.idle is not None}
    idles = looks if recorder is None else {}
    actions = [bound.action for bound in body]
    prologue = [wrapped(bounds) for bounds in ahead]
    return Cursor(prologue, wrapped(body), round_, idles, actions, binder.owing, settler(binder.owing))


def _recorded(
    bound: Bound, plan: Plan, binder: _Binder, recorder: Recorder, devices: Sequence[tuple[DeviceRecorder, int]]
) -> Step:
    """A step that is recorded, on devices too if it runs a method."""
    action, step, what = bound.action, bound.step, _what(plan, bound.action)
    if action.verb is not Verb.RUN:
        return recorder.wrap(step, action, what, bound.is_done)
    for device, stream in devices:
        step = device.wrap(step, action, what, stream)
    recorded = recorder.wrap(step, action, what, bound.is_done)
    return unless(binder.is_skipped(plan.node[action.target]), bound.step, recorded)


def maker_of(plan: Plan, value: str) -> str:
    """How an error calls what makes a value."""
    node = plan.maker.get(value)
    return f"the collective that makes {value}" if node is None else label_of(node)


def label_of(node: NodeSpec) -> str:
    """How an error calls a node."""
    return f"{node.actor}.{node.method} (node {node.id})"


def _what(plan: Plan, action: Action) -> str:
    if action.verb is Verb.COLL:
        return str(plan.collective[action.target].kind)
    node = plan.node.get(action.target)
    return f"{node.actor}.{node.method}" if node is not None and action.verb is Verb.RUN else action.target


def _listen(plan: Plan, program: Sequence[Action], ends: Ends, recorder: Recorder) -> None:
    for action in program:
        if action.verb is Verb.SEND:
            ends.writers[action.target].on_moved = recorder.moved(action, _what(plan, action))
        elif action.verb is Verb.RECV:
            ends.readers[action.target].on_moved = recorder.moved(action, _what(plan, action))
        elif action.verb is Verb.COLL:
            ends.collectives[action.target].on_moved = recorder.moved(action, _what(plan, action))


class _Binder:
    """Makes the steps. Values live in a list of registers that the steps close over."""

    def __init__(
        self,
        plan: Plan,
        actor: str,
        methods: Mapping[str, Callable[..., Any]],
        calls: Mapping[str, Call],
        ends: Ends,
        guard: Guard | None,
        before_run: Sequence[Callable[[], None]],
        fatal: tuple[type[BaseException], ...],
    ) -> None:
        self._guard = guard
        self._before_run = tuple(before_run)
        self._fatal = fatal
        self._plan = plan
        self._actor = actor
        self._methods = methods
        self._calls = calls
        self._ends = ends
        self._ranges = find_ranges() if any(a.verb is Verb.RUN for a in plan.programs[actor]) else None
        registers = Registers()
        self._registers, self._register = registers.values, registers.of
        receives = {plan.channel[a.target].value: a for a in plan.programs[actor] if a.verb is Verb.RECV}
        self._releases = {value: ends.readers[action.target].release for value, action in receives.items()}
        self.owing: list[Intake] = []  # intakes that owe a value that the party did not wait for
        self._waiting = Waiting(plan, actor, registers)
        self._around_writes = self._passed_on()

    def _passed_on(self) -> dict[str, Callable[[], AbstractContextManager[None]]]:
        """In what to write values of a collective that are only passed on to others. None where a guard looks at all values."""
        if self._guard is not None:
            return {}
        program = self._plan.programs[self._actor]
        kept = {
            value
            for action in program
            if action.verb in (Verb.RUN, Verb.COLL)
            for value in values_used(self._plan, action, self._actor)
        }
        found = {}
        for name in (action.target for action in program if action.verb is Verb.COLL and action.stream != MAIN):
            outputs = self._plan.collective[name].outputs_of(self._actor)
            around = self._ends.collectives[name].pass_on() if kept.isdisjoint(outputs) else None
            if around is not None:
                found.update(dict.fromkeys(outputs, around))
        return found

    def is_skipped(self, node: NodeSpec) -> Callable[[], bool]:
        """Returns a check whether the method will be skipped, because one of its inputs is an error."""
        registers, inputs = self._registers, [self._register(value) for value in node.inputs]
        return lambda: any(type(registers[register]) is Failure for register in inputs)

    def steps(self, action: Action) -> list[Bound]:
        """Returns the steps of one action: waits for values that may not have arrived from elsewhere, then the action itself."""
        waiting = self._waiting
        waits = waiting.before(action, self._intake)
        if action.verb is Verb.READ:
            return [waiting.wait(action, self._intake)]
        before = self._looks(self._plan.node[action.target]) if action.verb is Verb.RUN else ()
        steps = waits + [Bound(step, action, before=before) for step in self._steps_of(action)]
        if action.verb in (Verb.RECV, Verb.COLL):
            waiting.start(action)
            if action.stream == MAIN:
                steps.append(waiting.wait(action, self._intake))
        return steps

    def _steps_of(self, action: Action) -> list[Step]:
        match action.verb:
            case Verb.RECV:
                return [self._ends.readers[action.target].try_start]
            case Verb.RUN:
                return [behind(self._before_run, self._run(self._plan.node[action.target]))]
            case Verb.WRITE:
                return [self._write(action.target)]
            case Verb.SEND:
                flush = self._ends.writers[action.target].try_flush
                return [self._write(action.target), flush] if action.stream == MAIN else [self._write(action.target)]
            case Verb.COLL:
                return [self._start(action)]
            case Verb.FREE:
                return [self._free(action.target)]
            case Verb.READ:
                return []

    def _intake(self, arrival: Action) -> Intake:
        """Makes the intake of the value that a ``read``, ``recv`` or ``coll`` brings."""
        name = arrival.target
        if arrival.verb is Verb.COLL:
            collective = self._ends.collectives[name]
            first = self._register(self._plan.collective[name].outputs_of(self._actor)[0])
            take, drop, idle = self._finish(name), lambda: collective.try_finish() is not None, collective.is_idle
        else:
            first = self._register(self._plan.channel[name].value)
            take, drop, idle = self._read(name), self._drop(name), self._ends.readers[name].is_idle
        return Intake(self._registers, first, take, drop, idle, self.owing)

    def _drop(self, channel: str) -> Step:
        """Returns a step that reads the next value of a channel and discards it."""
        try_read, release = self._ends.readers[channel].try_read, self._releases.get(self._plan.channel[channel].value)

        def drop() -> bool:
            if try_read() is EMPTY:
                return False
            if release is not None:
                release()
            return True

        return drop

    def _read(self, channel: str) -> Step:
        registers, register = self._registers, self._register(self._plan.channel[channel].value)
        try_read = self._ends.readers[channel].try_read

        def read() -> bool:
            value = try_read()
            if value is EMPTY:
                return False
            registers[register] = value
            return True

        return read if self._guard is None else self._guard.arrive(read, registers, register)

    def _write(self, channel: str) -> Step:
        registers, register = self._registers, self._register(self._plan.channel[channel].value)
        try_write, actor = self._ends.writers[channel].try_write, self._actor
        label = f"{maker_of(self._plan, self._plan.channel[channel].value)}, pickling what it returned,"

        def write_here() -> bool:
            try:
                return try_write(registers[register])
            except ChannelError:
                raise
            except Exception as error:  # it cannot be pickled: its readers get that error instead
                return try_write(Failure.capture(error, actor=actor, node=label, hint=hint_for_pickling(error)))

        around = self._around_writes.get(self._plan.channel[channel].value)
        write = write_here if around is None else inside(around, write_here)
        if self._guard is None:
            return write
        writer, is_ordered = self._ends.writers[channel], self._plan.channel[channel].is_ordered
        return self._guard.leave(write, registers, register, channel, writer if is_ordered else None)

    def _checked(self, step: Step, values: Sequence[str]) -> Step:
        """A step whose values of static shape are compared, and become errors where they do not fit."""
        watched = [
            (self._register(value), StaticShape(self._plan, value), maker_of(self._plan, value))
            for value in values
            if value in self._plan.static
        ]
        if not watched:
            return step
        registers, actor = self._registers, self._actor

        def checked() -> bool:
            if not step():
                return False
            for register, shape, maker in watched:
                if (error := shape.fault_of(registers[register])) is not None:
                    label = f"{maker}, checking the shapes of what it returned,"
                    registers[register] = Failure.capture(error, actor=actor, node=label)
            return True

        return checked

    def _start(self, action: Action) -> Step:
        """Returns a step that starts a collective. A party whose input is an error knows the result and waits for no other."""
        collective = action.target
        registers, start = self._registers, self._ends.collectives[collective].start
        values = self._plan.collective[collective].inputs_of(self._actor)
        inputs = [self._register(value) for value in values]
        outputs = [self._register(value) for value in self._plan.collective[collective].outputs_of(self._actor)]
        intake = self._waiting.intake(action, self._intake)

        def started() -> bool:
            if intake.num_owed and not intake.settle():  # the previous execution must end first
                return False
            given = [registers[register] for register in inputs]
            failure = next((value for value in given if type(value) is Failure), None)
            if failure is None:
                start(given)
                return True
            start([failure] * len(inputs))
            for register in outputs:
                registers[register] = failure
            intake.owe()
            return True

        if self._guard is None:
            return started
        label = f"{self._plan.collective[collective].kind} (collective {collective})"
        given = list(zip(inputs, values, strict=True))
        looks = [self._guard.look(registers, given, label)]
        return behind(looks, self._guard.run(started, registers, given, [], label, collective))

    def _finish(self, collective: str) -> Step:
        registers, try_finish = self._registers, self._ends.collectives[collective].try_finish
        outputs = [self._register(value) for value in self._plan.collective[collective].outputs_of(self._actor)]

        def finish() -> bool:
            values = try_finish()
            if values is None:
                return False
            for register, value in zip(outputs, values, strict=True):
                registers[register] = value
            return True

        step = self._checked(finish, self._plan.collective[collective].outputs_of(self._actor))
        if self._guard is not None:
            for register in outputs:
                step = self._guard.arrive(step, registers, register)
        return step

    def _free(self, value: str) -> Step:
        registers, register = self._registers, self._register(value)
        release = self._releases.get(value)

        def free() -> bool:
            registers[register] = EMPTY
            if release is not None:
                release()
            return True

        intake = self._waiting.may_be_owed(value)
        step = free if intake is None else _unless_owed(intake, free)
        return step if self._guard is None else self._guard.free(step, registers, register, value)

    def _run(self, node: NodeSpec) -> Step:
        method, call = self._methods[node.id], self._calls[node.id]
        inputs = [self._register(value) for value in node.inputs]
        outputs = [self._register(value) for value in node.outputs]
        label = label_of(node)
        runner = Runner(self._registers, self._actor, label, self._fatal)
        step = self._checked(runner.step(method, call, inputs, outputs), node.outputs)
        if self._ranges is not None:
            step = self._ranges.wrap(step, label)
        if self._guard is None:
            return step
        return self._guard.run(step, self._registers, self._given(node), outputs, label, node.id)

    def _looks(self, node: NodeSpec) -> Sequence[Callable[[], None]]:
        """What a guard does before a method: whether it runs at all hangs on it."""
        guard = self._guard
        return () if guard is None else (guard.look(self._registers, self._given(node), label_of(node)),)

    def _given(self, node: NodeSpec) -> list[tuple[int, str]]:
        """(register, value id) of a method's inputs."""
        return [(self._register(value), value) for value in node.inputs]


def _unless_owed(intake: Intake, free: Step) -> Step:
    """A step that releases a value, or owes it if it has not arrived and nobody waited for it."""

    def owe_or_free() -> bool:
        if intake.has_value():
            return free()
        intake.owe()
        return True

    return owe_or_free
