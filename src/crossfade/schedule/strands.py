"""Strands, steps and what steps wait for: the simulator's words. `schedule.steps` says what they mean and makes them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from crossfade.plan.plan import ChannelSpec, CollectiveSpec
from crossfade.schedule.gpus import Kernels, Push

__all__ = ["Need", "Step", "Strand"]


@dataclass(frozen=True, slots=True)
class Need:
    """A fact that must be true before a step can go on.

    Attributes:
        fact: what.
        offset: of which execution, relative to the step's own: 0 or, for a slot, minus the ring's depth. Before
            execution 0 there is nothing to wait for.
        is_hop: whether it is seen in shared memory, ``hop_us`` after it became true.
        patience_us: how long it is waited for; after that the step goes on without it. All such needs of a step share one time.
        only_if: a need counts only if the first of these facts became true before the second, which is known by then; empty for
            one that counts always.
    """

    fact: str
    offset: int = 0
    is_hop: bool = False
    patience_us: float = math.inf
    only_if: tuple[str, str] | tuple[()] = ()


@dataclass(frozen=True, slots=True)
class Step:
    """An action with its meaning spelled out.

    Attributes:
        label: the action as the plan writes it, or what a strand does at an end of its round.
        what: the method's or the channel's name, for people.
        ahead: by how many executions it runs ahead.
        kind: of its span, None for no span.
        needs: what it waits for first, one after the other.
        work_us: what it then costs on a core.
        fact: what is true after that, or empty.
        transfer: the channel of which it starts one end of a transfer, or None.
        collective: the collective in which it takes part, or None.
        device: what it does on a GPU instead of a core, or None.
        then: what it waits for after that.
    """

    label: str
    what: str = ""
    ahead: int = 0
    kind: str | None = None
    needs: tuple[Need, ...] = ()
    work_us: float = 0.0
    fact: str = ""
    transfer: ChannelSpec | None = None
    collective: CollectiveSpec | None = None
    device: Kernels | Push | None = None
    then: tuple[Need, ...] = ()


@dataclass(frozen=True, slots=True)
class Strand:
    """Steps that one party goes through in order, once per round.

    Attributes:
        actor: the party.
        stream: where its spans are shown.
        steps: the steps of one round.
        first_round: minus the largest ``ahead``.
        thread: who goes through it: the actor's process, or one of the streams of its GPUs.
    """

    actor: str
    stream: str
    steps: tuple[Step, ...]
    first_round: int = 0
    thread: str = ""

    @property
    def is_on_gpu(self) -> bool:
        """Whether a stream goes through it."""
        return self.thread != self.actor
