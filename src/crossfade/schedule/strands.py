"""Strands, steps and what steps wait for: the simulator's words. `schedule.steps` says what they mean and makes them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from crossfade.plan.plan import ChannelSpec, CollectiveSpec
from crossfade.schedule.gpus import Kernels, Push


class Need(NamedTuple):
    """A fact that must be true before a step can continue."""

    fact: str
    # of which execution, relative to the step's own: 0 or, for a slot, minus the ring's depth. Before execution 0 there is nothing
    # to wait for.
    offset: int = 0
    is_hop: bool = False  # whether it is seen in shared memory, ``hop_us`` after another actor made it true
    latency_us: float = 0.0  # how much later it is seen on another host
    # how long it is waited for; after that the step continues without it. All such needs of a step share one time.
    patience_us: float = math.inf
    # a need counts only if the first of these facts became true before the second, which is known by then; empty for one that
    # counts always.
    only_if: tuple[str, str] | tuple[()] = ()


class Step(NamedTuple):
    """An action with its meaning spelled out."""

    label: str  # the action as the plan writes it, or what a strand does at an end of its round
    what: str = ""  # the method's or the channel's name, for people
    ahead: int = 0  # by how many executions it runs ahead
    kind: str | None = None  # of its span, None for no span
    needs: tuple[Need, ...] = ()  # what it waits for first, one after the other
    work_us: float = 0.0  # what it then costs on a core
    fact: str = ""  # what is true after that, or empty
    transfer: ChannelSpec | None = None  # the channel of which it starts one end of a transfer, or None
    collective: CollectiveSpec | None = None  # the collective in which it takes part, or None
    is_only_started: bool = False  # whether the collective is one that the host starts, and a stream takes part in
    device: Kernels | Push | None = None  # what it does on a GPU instead of a core, or None
    then: tuple[Need, ...] = ()  # what it waits for after that


@dataclass(frozen=True, slots=True)
class Strand:
    """Steps that one party goes through in order, once per round."""

    actor: str
    stream: str  # where its spans are shown
    steps: tuple[Step, ...]  # the steps of one round
    first_round: int = 0  # minus the largest ``ahead``
    thread: str = ""  # who goes through it: the actor's process, or one of the streams of its GPUs

    @property
    def is_on_gpu(self) -> bool:
        """Whether a stream goes through it."""
        return self.thread != self.actor
