"""What the tests of the tuner measure: candidates whose times are made up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from crossfade.ops.calls.job import Shape
from crossfade.ops.choice.cache import Cache
from crossfade.ops.choice.candidate import Candidate
from crossfade.ops.choice.choose import Chooser
from crossfade.ops.choice.model import Prediction
from crossfade.ops.choice.ranks import Alone, Ranks
from crossfade.ops.choice.tune import Trial, Tuner

SHAPE = Shape("matmul_reduce_scatter", 8192, 8192, 7168, "bfloat16", "nt", 4)


def rows(m: int) -> Shape:
    """The same with other rows."""
    return Shape("matmul_reduce_scatter", m, 8192, 7168, "bfloat16", "nt", 4)


def ways(*texts: str) -> list[Candidate]:
    return [Candidate.parse(text) for text in texts]


class Bench:
    """Times candidates as it is told to, by their text: one time, or those of one repetition after another, or an error to raise
    when it is run. What is not named cannot be set up. ``needs``: rows of which M has to be a multiple.
    """

    def __init__(
        self,
        times_us: Mapping[str, float | Sequence[float] | Exception],
        predicted_us: Mapping[str, float],
        needs: Mapping[str, int] | None = None,
    ) -> None:
        self._times_us = times_us
        self._predicted_us = predicted_us
        self._needs = needs or {}
        self.log: list[str] = []  # what was set up and run, in order
        self.fails_on: Shape | None = None  # a shape for which nothing can be set up
        self.fails: set[str] = set()  # texts of candidates that cannot be made warm

    def tuner(self, ranks: Ranks | None = None, cache: Cache | None = None, **options: Any) -> Tuner:
        return Tuner(self.measure, Chooser(self.predict, self.candidates, ranks or Alone(), cache), **options)

    def measure(self, shape: Shape, candidate: Candidate) -> Trial:
        text = str(candidate)
        self.log.append(f"set up {text}")
        if text not in self._times_us or shape == self.fails_on:
            raise RuntimeError(f"no kernel for {text}\nat all")
        found, next_at = self._times_us[text], 0

        def trial(num_repeats: int) -> list[float]:
            nonlocal next_at
            if not num_repeats:
                if text in self.fails:
                    raise RuntimeError(f"{text} cannot be captured")
                return []
            self.log.append(text)
            if isinstance(found, Exception):
                raise found
            if not isinstance(found, Sequence):
                return [found] * num_repeats
            next_at += num_repeats
            return [found[at % len(found)] for at in range(next_at - num_repeats, next_at)]

        return trial

    def predict(self, shape: Shape, candidate: Candidate) -> Prediction | None:
        time_us = self._predicted_us.get(str(candidate))
        return None if time_us is None else Prediction(time_us, (("all", time_us),))

    def candidates(self, shape: Shape) -> list[Candidate]:
        texts = {**self._predicted_us, **self._times_us}
        return [Candidate.parse(text) for text in texts if shape.m % self._needs.get(text, 1) == 0]
