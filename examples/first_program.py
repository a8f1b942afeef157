# mypy: disable-error-code=attr-defined
"""The first program: two actors in a row, and five executions under way at once."""

import numpy as np
from numpy.typing import NDArray

import crossfade


@crossfade.remote
class Scaler:
    def __init__(self, factor: float) -> None:
        self.factor = factor

    def scale(self, x: NDArray[np.float64]) -> NDArray[np.float64]:
        return x * self.factor


@crossfade.remote
class Summer:
    def total(self, x: NDArray[np.float64]) -> float:
        return float(x.sum())


scaler, summer = Scaler.remote(2.0), Summer.remote()  # two processes
with crossfade.InputNode() as x:
    output = summer.total.bind(scaler.scale.bind(x))

with output.compile() as graph:
    refs = [graph.execute(np.full(1000, float(i))) for i in range(5)]
    print(crossfade.get(refs))  # [0.0, 2000.0, 4000.0, 6000.0, 8000.0]
