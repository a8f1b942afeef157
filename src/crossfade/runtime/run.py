"""How one party runs a method of a plan: values from registers, what it gives into registers, errors in their place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from crossfade.errors import Failure
from crossfade.plan.call import Call, Hole, fill
from crossfade.runtime.cursor import Step


class Runner:
    """Makes the step that runs a node's method. An error is the value of all its outputs, and passes methods by that would use it.
    ``fatal`` errors are let through.
    """

    def __init__(self, registers: list[Any], actor: str, label: str, fatal: tuple[type[BaseException], ...]) -> None:
        self._registers = registers
        self._actor = actor
        self._label = label
        self._fatal = fatal

    def step(self, method: Callable[..., Any], call: Call, inputs: Sequence[int], outputs: Sequence[int]) -> Step:
        """The step, by what the method is given: a call with holes, which stand for the registers of its inputs."""
        is_simple = len(call.args) == 1 and type(call.args[0]) is Hole and not call.kwargs
        if is_simple and len(outputs) == 1:
            return self._one(method, inputs[0], outputs[0])
        if len(outputs) == 1 and not call.kwargs and all(map(_is_flat, call.args)):  # so every input is one of them
            return self._flat(method, call.args, inputs, outputs[0])
        return self._any(method, call, inputs, outputs)

    def _one(self, method: Callable[..., Any], source: int, target: int) -> Step:
        """One value in, as the only argument, and one out: what most nodes are."""
        registers, actor, label, fatal = self._registers, self._actor, self._label, self._fatal

        def run() -> bool:
            value = registers[source]
            if type(value) is Failure:
                registers[target] = value
                return True
            try:
                registers[target] = method(value)
            except fatal:
                raise
            except BaseException as error:
                registers[target] = Failure.capture(error, actor=actor, node=label)
            return True

        return run

    def _flat(self, method: Callable[..., Any], args: Sequence[Any], inputs: Sequence[int], target: int) -> Step:
        """Values and constants in, by position, and one value out."""
        registers, actor, label, fatal = self._registers, self._actor, self._label, self._fatal
        template = [None if type(arg) is Hole else arg for arg in args]
        places = [(place, inputs[arg.index]) for place, arg in enumerate(args) if type(arg) is Hole]

        def run() -> bool:
            given = template.copy()
            for place, register in places:
                value = given[place] = registers[register]
                if type(value) is Failure:
                    registers[target] = value
                    return True
            try:
                registers[target] = method(*given)
            except fatal:
                raise
            except BaseException as error:
                registers[target] = Failure.capture(error, actor=actor, node=label)
            return True

        return run

    def _any(self, method: Callable[..., Any], call: Call, inputs: Sequence[int], outputs: Sequence[int]) -> Step:
        registers, actor, label, fatal = self._registers, self._actor, self._label, self._fatal

        def run() -> bool:
            values = [registers[register] for register in inputs]
            results: Sequence[Any]
            for value in values:
                if type(value) is Failure:
                    results = [value] * len(outputs)
                    break
            else:
                try:
                    results = returns(method(*fill(call.args, values), **fill(call.kwargs, values)), len(outputs))
                except fatal:
                    raise
                except BaseException as error:
                    results = [Failure.capture(error, actor=actor, node=label)] * len(outputs)
            for register, result in zip(outputs, results, strict=True):
                registers[register] = result
            return True

        return run


def _is_flat(arg: Any) -> bool:
    """Whether an argument is a value of the graph, or a constant that need not be copied for each call."""
    return type(arg) not in (list, tuple, dict)


def returns(result: Any, num_returns: int) -> Sequence[Any]:
    """The values that a method gave, one for each output."""
    if num_returns == 1:
        return (result,)
    try:
        values = tuple(result)
    except TypeError:
        values = (result,)
    if len(values) != num_returns:
        raise ValueError(f"the method is declared with num_returns={num_returns} and returned {len(values)} values")
    return values
