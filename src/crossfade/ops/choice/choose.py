"""Which candidate does a call, the same on all ranks by rank 0's word: what was measured for such a shape, else the model's choice.

One decision is made for each bucket of shapes, and rank 0 tells it once. Which of its candidates a certain shape takes follows from
the shape alone, so no rank has to ask again: a warm call finds its candidate in a dictionary.

`crossfade.ops.prepare` passes a `WarmUp` in place of a candidate: the call is done, and no replay comes of it. By then libraries
have loaded their kernels for these lengths, made their communicators and taken their memory, so a capture, which allows none of
this, needs none of it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from threading import Lock
from typing import TYPE_CHECKING

from crossfade.device.borrowed import torch_or_raise
from crossfade.errors import DeviceError
from crossfade.ops.calls.job import Algorithm, Given, Job, Operator, Shape, layout_of, takes_fused
from crossfade.ops.choice.cache import Cache, Decision, Source, versions
from crossfade.ops.choice.candidate import PLAIN, Candidate, candidates_for
from crossfade.ops.choice.figures import H200, Figures, measure_waves, product_timer, with_topology
from crossfade.ops.choice.model import Model, Prediction
from crossfade.ops.choice.ranks import Alone, GroupRanks, Ranks
from crossfade.ops.choice.replays import enqueue, is_replayed
from crossfade.topology import load_topology

if TYPE_CHECKING:
    import torch

    from crossfade.peers.group import PeerGroup


@dataclass(frozen=True, slots=True)
class WarmUp:
    """Passed in place of a candidate for a call that is not counted among those that come again."""

    candidate: Candidate


Predict = Callable[[Shape, Candidate], Prediction | None]
Candidates = Callable[[Shape], Sequence[Candidate]]
"""All that can do a shape, the same ones on all ranks, and plain among them."""

TIE = 1.02
"""What is less than 2 % faster is not faster: measurements differ by as much. Of such candidates the one that was predicted best is
taken, and of such predictions plain."""
MOST_SHAPES = 4096
"""Shapes whose candidate is remembered."""
_CROWDED, _CROWDED_ROUNDS = 1.2, 4
"""Measured at 32768, 7168, 2048 with one rank that gets 1.5 times (of four H200) and 1.25 times (of two) what each sends: four
rounds took 2.11 ms where one took 2.50, and 1.89 where one took 1.97. With equal counts one is best."""
_KEPT_AS = "crossfade.ops.chooser"
_MAKING = Lock()


class Chooser:
    """Chooses for the ranks of a group. All ranks make the same calls, with equal shapes.

    ``predict`` gives None for what no model knows, which is never chosen unmeasured. ``cache`` is used by rank 0 alone; None to
    keep nothing.
    """

    def __init__(self, predict: Predict, candidates: Candidates, ranks: Ranks, cache: Cache | None = None) -> None:
        self.predict = predict
        self.candidates = candidates
        self.ranks = ranks
        self._cache = cache
        self._decisions: dict[Shape, Decision] = {}
        self._chosen: dict[tuple[Shape, str], Candidate] = {}
        self._num_measured = 0
        self._deciding = Lock()

    def choose(self, shape: Shape, *, without: str = "") -> Candidate:
        """The candidate for a shape, at once: what was measured for its bucket, now or before, else the model's choice.

        Measures nothing, so it may be called inside a capture. The first call for a bucket waits for rank 0's word. ``without`` is
        the name of candidates that cannot do this call, whatever its shape; the same on all ranks.
        """
        chosen = self._chosen.get((shape, without))
        if chosen is None:
            able = {each for each in self.candidates(shape) if each.name != without}
            chosen = next((each for each in self.decide(shape).order if each in able), PLAIN)
            if len(self._chosen) >= MOST_SHAPES:
                self._chosen.clear()
            self._chosen[shape, without] = chosen
        return chosen

    def decide(self, shape: Shape) -> Decision:
        """The decision for a shape's bucket, as `choose` uses it."""
        bucket = shape.bucket
        if bucket not in self._decisions:
            # Rank 0 says it once, whichever of its threads come here; the others only hear it, and may wait for it.
            with self._deciding if self.ranks.rank == 0 else nullcontext():
                if bucket not in self._decisions:
                    kept = self._cache.load if self._cache is not None else lambda _: None
                    self._decisions[bucket] = self.hear(str(bucket), lambda: kept(bucket) or self._modelled(bucket))
        return self._decisions[bucket]

    def begin_measuring(self) -> int:
        """A number for one measurement, the same on all ranks, and never given before."""
        self._num_measured += 1
        return self._num_measured

    def keep(self, bucket: Shape, decision: Decision) -> None:
        """Puts what was measured in the place of what was decided for a bucket before."""
        self._decisions[bucket] = decision
        self._chosen = {each: chosen for each, chosen in self._chosen.items() if each[0].bucket != bucket}
        if self._cache is not None and self.ranks.rank == 0:
            self._cache.keep(bucket, decision)

    def hear(self, key: str, say: Callable[[], Decision]) -> Decision:
        """Rank 0's decision about something, in whatever order the ranks ask."""
        failure: list[Exception] = []

        def text() -> str:
            try:
                return json.dumps(say().to_data())
            except Exception as error:
                failure.append(error)
                return json.dumps({"failure": first_line(error)})

        heard = json.loads(self.ranks.tell(key, text))
        if failure:
            raise failure[0]
        if "failure" in heard:
            raise DeviceError(f"rank 0 could not decide about '{key}': {heard['failure']}")
        return Decision.from_data(heard)

    def _modelled(self, bucket: Shape) -> Decision:
        known = {each: us for each, us in self.rank(bucket) if us is not None}
        order = ranked(known)
        return Decision((*order, *([] if PLAIN in order else [PLAIN])), Source.MODEL)

    def rank(self, shape: Shape) -> list[tuple[Candidate, float | None]]:
        """All candidates with their predicted times, the fastest first, those without one at the end."""
        times_us: dict[Candidate, float] = {}
        unknown: list[Candidate] = []
        for each in self.candidates(shape):
            predicted = self.predict(shape, each)
            if predicted is None or not math.isfinite(predicted.total_us):
                unknown.append(each)
            else:
                times_us[each] = predicted.total_us
        return [*((each, times_us[each]) for each in ranked(times_us)), *((each, None) for each in unknown)]


def ranked(times_us: dict[Candidate, float]) -> list[Candidate]:
    """From the fastest on; but plain is the first of those that are as good as the fastest."""
    order = sorted(times_us, key=lambda each: times_us[each])
    if PLAIN in times_us and times_us[PLAIN] <= TIE * times_us[order[0]]:
        order.remove(PLAIN)
        order.insert(0, PLAIN)
    return order


def first_line(error: Exception) -> str:
    """What it is, and the first line of what it says."""
    first = (str(error).splitlines() or [""])[0]
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


# of a group


def chooser_of(group: PeerGroup) -> Chooser:
    """The one that a group's operators ask when they are given no candidate; it is kept with the group.

    Not collective, so the first call may be anywhere, also inside a capture. The choices are kept in the user's cache folder. Ranks
    that torch.distributed does not know have no store and no disk in common: each follows the model with figures that all have.
    """
    chooser: Chooser | None = group.belongings.get(_KEPT_AS)
    if chooser is None:
        with _MAKING:
            chooser = group.belongings.get(_KEPT_AS)
            if chooser is None:
                chooser = group.belongings[_KEPT_AS] = _make(group)
    return chooser


def _make(group: PeerGroup) -> Chooser:
    candidates = partial(candidates_for, group=group)
    process_group = group.process_group
    if process_group is None:
        return Chooser(_model(group, _with_sms(H200, group.device)), candidates, Alone())
    ranks: Ranks = Alone()
    if group.num_ranks > 1:
        name = f"group {group.number}"
        ranks = GroupRanks(process_group, group.device, name=name, check=group.check)
    return make_chooser(group, candidates, ranks)


def make_chooser(
    group: PeerGroup,
    candidates: Candidates,
    ranks: Ranks | None = None,
    cache: Cache | None = None,
    *,
    is_measuring: bool = False,
) -> Chooser:
    """A chooser of its own. Collective where ``ranks`` is None, and where ``is_measuring`` first measures the device's products."""
    process_group = group.process_group
    if process_group is None:
        raise DeviceError(
            "these ranks have no group of torch.distributed, or it is destroyed, and by it they would agree",
            hint="make it with open_group",
        )
    ranks = ranks or GroupRanks(process_group, group.device, check=group.check)
    cache = cache or _cache(group)
    return Chooser(_model(group, _figures(group, cache, is_measuring=is_measuring)), candidates, ranks, cache)


def _model(group: PeerGroup, figures: Figures) -> Predict:
    return Model(figures.captured() if is_replayed(group) else figures).predict


def _cache(group: PeerGroup) -> Cache:
    device = group.device
    name = "CPU" if device.type == "cpu" else str(torch_or_raise().cuda.get_device_name(device))
    # What is best may differ where each call is enqueued by itself.
    return Cache(name, group.num_ranks, versions() + (", replayed" if is_replayed(group) else ""))


def _figures(group: PeerGroup, cache: Cache, *, is_measuring: bool) -> Figures:
    """What is known of this device, and what four H200 do where it is not. Rank 0 decides, so only it looks."""
    if group.rank:
        return H200
    device, topology, figures = group.device, load_topology(), H200
    if topology is not None:
        figures = with_topology(figures, topology)
    figures = _with_sms(figures, device)
    waves = cache.load_waves()
    if waves is None and is_measuring and device.type == "cuda":
        waves = measure_waves(product_timer(device), figures.num_sms)
        cache.keep_waves(waves)
    return figures if waves is None else replace(figures, waves=waves)


def _with_sms(figures: Figures, device: torch.device) -> Figures:
    if device.type == "cpu":
        return figures
    return replace(figures, num_sms=torch_or_raise().cuda.get_device_properties(device).multi_processor_count)


# of a call


def algorithm_of(
    operator: Operator,
    group: PeerGroup,
    given: Given,
    num_rows: int,
    candidate: Candidate | WarmUp | str | None,
    algorithms: Mapping[str, Algorithm],
    *,
    lane: int = 0,
    most_received: int = 0,
) -> Callable[[Job], None]:
    """What does a job by the given candidate or its text, by the chosen one where it is None.

    ``num_rows`` is M of `Shape`, and ``most_received`` that of `choose_for`; both are the same on all ranks.
    """
    is_warm_up = isinstance(candidate, WarmUp)
    if isinstance(candidate, WarmUp):
        candidate = candidate.candidate
    elif candidate is None:
        candidate = choose(operator, group, given, num_rows, lane, most_received)
    elif isinstance(candidate, str):
        candidate = Candidate.parse(candidate)
    if group.is_staged and candidate != PLAIN:
        raise ValueError(f"'{candidate}' needs GPUs that reach each other\nhint: a staged group has 'plain' alone")
    algorithm = algorithms.get(candidate.name)
    if algorithm is None:
        raise ValueError(f"this operator cannot be done by '{candidate}'\nhint: one of {', '.join(algorithms)}")
    run = partial(algorithm, **dict(candidate.parameters))
    return run if is_warm_up else partial(enqueue, candidate, run)


def choose(
    operator: Operator, group: PeerGroup, given: Given, num_rows: int, lane: int = 0, most_received: int = 0
) -> Candidate:
    """What was measured to be best for such a shape, or else the model's choice; the same on all ranks, by rank 0's word."""
    (depth, columns), dtype = given.b.shape, str(given.b.dtype).removeprefix("torch.")
    layout = layout_of(operator, given.b)
    shape = Shape(operator, num_rows, columns, depth, dtype, layout, group.num_ranks)
    can_fuse = takes_fused(operator, lane, has_bias=given.bias is not None)
    return choose_for(shape, group, most_received, can_fuse=can_fuse)


def choose_for(shape: Shape, group: PeerGroup, most_received: int = 0, *, can_fuse: bool = True) -> Candidate:
    """What `choose` gives for a shape, whose M counts what one rank sends; plain where there is nothing to do.

    Shapes are tuned with equal counts. Where one rank gets many more rows than any rank sends, its link is what all wait for, and
    it has to have work early: so there are more rounds. ``most_received`` are the most rows of an all-to-all that a rank gets.
    """
    if not (shape.m and shape.n):
        return PLAIN
    chosen = chooser_of(group).choose(shape, without="" if can_fuse else "fused")
    if chosen.name == "rounds" and most_received > _CROWDED * shape.m and chosen.arguments["rounds"] < _CROWDED_ROUNDS:
        return Candidate.of("rounds", **{**chosen.arguments, "rounds": _CROWDED_ROUNDS})
    return chosen
