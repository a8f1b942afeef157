"""What a graph's methods take and how large its values are: what the simulator has to be told of a program."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from statistics import median
from typing import Any

from crossfade.figures import arguments_of, check_figure, is_figure, parsed, written
from crossfade.hints import nearest
from crossfade.plan.actions import MAIN, Verb
from crossfade.plan.plan import NodeSpec, Plan
from crossfade.plan.spans import COMPUTE
from crossfade.plan.timeline import Timeline

NUM_NAMED = 6
"""How many of a graph's names an error shows."""
_FORM = 'for example {"compute_us": {"forward": 2000}, "default_value_bytes": 1000000}'


@dataclass(frozen=True)
class Workload:
    """How long a graph's methods run and how large its values are.

    Raises:
        TypeError: ``synchronous`` is one name.
        ValueError: a time or a size is negative, or a time is not finite.
    """

    compute_us: Mapping[str, float] = field(default_factory=dict)
    """A method's time on an idle machine: by node id (``n3``), else by ``actor.method``, else by ``method``. For a method that uses
    a GPU the time of its host alone, which enqueues."""
    value_bytes: Mapping[str, int] = field(default_factory=dict)
    """A value's size: by value id, else by the call that makes it, named as in ``compute_us``."""
    default_compute_us: float = 0.0
    """The time of methods that ``compute_us`` does not have."""
    default_value_bytes: int = 8
    """The size of values that ``value_bytes`` does not have."""
    device_us: Mapping[str, float] = field(default_factory=dict)
    """The time of a method's kernels, on actors with GPUs, named likewise; 0 for others. They begin once the host has enqueued
    them."""
    synchronous: Collection[str] = ()
    """Methods, named likewise, that return only when their kernels have run, since they look at a result (``.item()``)."""

    def __post_init__(self) -> None:
        if isinstance(self.synchronous, str):
            raise TypeError(
                f"synchronous is {self.synchronous!r}\nhint: it is a collection of names: [{self.synchronous!r}]"
            )
        # Equal, whatever collection it was given as.
        object.__setattr__(self, "synchronous", frozenset(self.synchronous))
        for what in ("default_compute_us", "default_value_bytes"):
            check_figure(f"{what} of the workload", getattr(self, what))
        for what in ("compute_us", "value_bytes", "device_us"):
            for name, figure in getattr(self, what).items():
                if not is_figure(figure):
                    check_figure(f"{what} of the workload: {name}", figure)

    def check_names(self, plan: Plan) -> None:
        """Refuses names that the plan does not have: what they stand for would be left out, and the prediction wrong.

        Raises:
            ValueError: with the nearest name.
        """
        calls = {name: None for node in plan.nodes for name in _names(node)}
        values = {given.value: None for given in plan.inputs}
        values |= {value: None for node in plan.nodes for value in node.outputs}
        values |= {value: None for each in plan.collectives for outputs in each.outputs for value in outputs}
        for what, given, known in (
            ("compute_us", self.compute_us, calls),
            ("device_us", self.device_us, calls),
            ("synchronous", self.synchronous, calls),
            ("value_bytes", self.value_bytes, {**values, **calls}),
        ):
            for name in given:
                if name not in known:
                    hint = nearest(str(name), known, f"the graph has {_some(known)}: print(graph.plan) shows them all")
                    raise ValueError(f"{what} of the workload has {name!r}, which is not in the graph\nhint: {hint}")

    def time_us(self, node: NodeSpec) -> float:
        """How long the node's method runs."""
        return next(
            (self.compute_us[name] for name in _names(node) if name in self.compute_us), self.default_compute_us
        )

    def device_time_us(self, node: NodeSpec) -> float:
        """How long its kernels run."""
        return next((self.device_us[name] for name in _names(node) if name in self.device_us), 0.0)

    def is_synchronous(self, node: NodeSpec) -> bool:
        """Whether it returns only when they have run."""
        return any(name in self.synchronous for name in _names(node))

    def on(self, plan: Plan) -> Workload:
        """The same, with the size of every value of a plan by its id."""
        sizes = dict(self.value_bytes)
        for node in plan.nodes:
            named = next((self.value_bytes[name] for name in _names(node) if name in self.value_bytes), None)
            if named is not None:
                sizes |= {value: named for value in node.outputs if value not in self.value_bytes}
        return replace(self, value_bytes=sizes)

    def size_bytes(self, value: str) -> int:
        """How large the value is, by its id; see `on`."""
        return self.value_bytes.get(value, self.default_value_bytes)

    @classmethod
    def measured(cls, timeline: Timeline, **more: Any) -> Workload:
        """The times of a recorded run: for each method the median, over all actors and executions. Recorded kernels of GPUs are
        ``device_us``.

        Args:
            timeline: what ``graph.timeline()`` gave, of a graph of any size.
            **more: what it does not tell, such as ``default_value_bytes``.
        """
        found: dict[bool, dict[str, list[float]]] = {False: {}, True: {}}
        for span in timeline.spans:
            if span.kind == COMPUTE and span.label.startswith(Verb.RUN):
                method = span.what.rpartition(".")[2]  # a measured span has the actor's name before it
                found[span.stream != MAIN].setdefault(method, []).append(span.duration_us)
        host_us, device_us = ({name: median(times) for name, times in found[each].items()} for each in (False, True))
        return cls(host_us, device_us=device_us, **more)

    def to_json(self) -> str:
        """The figures as text, one JSON object; ``from_json`` gives an equal workload back."""
        return written({**asdict(self), "synchronous": sorted(self.synchronous)})

    @classmethod
    def from_json(cls, text: str) -> Workload:
        """Reads what ``to_json`` wrote, or a person. Figures that are left out keep their defaults.

        Raises:
            ValueError: the text is no JSON object, or has a name or a kind of figure that is not known.
        """
        data = arguments_of(cls, parsed(text, "workload", _FORM), "the workload", _FORM)
        for name, given in data.items():
            is_right = name.startswith("default_") or isinstance(given, list if name == "synchronous" else dict)
            if not is_right or (name == "synchronous" and not all(isinstance(each, str) for each in given)):
                raise ValueError(f"{name} of the workload is {given!r}\nhint: {_FORM}")
        return cls(**data)


def _names(node: NodeSpec) -> tuple[str, str, str]:
    """What a workload may call a node, from the exact to the general."""
    return node.id, f"{node.actor}.{node.method}", node.method


def _some(names: Iterable[str]) -> str:
    few = [*islice(names, NUM_NAMED + 1)]
    return ", ".join(few[:NUM_NAMED]) + (", ..." if len(few) > NUM_NAMED else "")
