"""How far predictions are off for pipelines whose stages are on two hosts in turn: each value between stages crosses the network.

``python -m tests.helpers.ray_two_hosts benchmarks.ray_predictions`` prints a Markdown table. As in `benchmarks.plan_predictions`,
a prediction knows what `crossfade.calibrate` and `crossfade.calibrate_tcp` have measured, and the times of the methods in a
pipeline of two stages and four microbatches. Stages sleep, so each stands for an actor with a core of its own.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import crossfade
from benchmarks.common import Table
from benchmarks.large_graphs import Stage, forward_through, train_through
from benchmarks.plan_predictions import ARRAY_BYTES, LIMIT_PERCENT, Case, Sleeper
from benchmarks.quiet import Quiet
from crossfade.api.calibrate import calibrate

if TYPE_CHECKING:
    from tests.helpers.ray_two_hosts import Hosts

ROUNDS = int(os.environ.get("ROUNDS", "8"))
PATIENCE_S = float(os.environ.get("PATIENCE", "30"))
SHAPES = [
    ("forward", forward_through, (2, 8), 8),
    ("forward", forward_through, (4, 16), 8),
    ("forward", forward_through, (4, 64), 8),
    ("forward", forward_through, (4, 32), ARRAY_BYTES),
    ("training", train_through, (2, 16), 8),
    ("training", train_through, (4, 32), 8),
]


def main(hosts: Hosts) -> None:
    from tests.helpers.ray_two_hosts import place

    quiet = Quiet(PATIENCE_S)
    costs = quiet.run(calibrate)
    table = Table("Between two hosts", ["graph", "predicted, ms", "measured, ms (range)", "error", "samples"])
    worst = 0.0
    with hosts.ray() as ray:
        places = [place(ray, host) for host in (0, 1)]
        crossfade.init(engine="ray")
        costs = quiet.run(lambda: crossfade.calibrate_tcp(costs, scheduling_strategy=places[1]))
        crossfade.shutdown()
        for name, through, shape, value_bytes in SHAPES:
            size = ", 1 MB values" if value_bytes == ARRAY_BYTES else ""
            title = f"{name}, {shape[0]} x {shape[1]}, sleeping{size}"
            case = Case(title, Sleeper, _in_turn(places, through), *shape, value_bytes, "ray")
            case.measure(costs, ROUNDS, quiet)
            worst = max(worst, abs(case.error_percent))
            table.add(*case.cells())
    print(table.markdown())
    print(f"tcp_us {costs.tcp_us:.1f}, tcp_us_per_mb {costs.tcp_us_per_mb:.0f}")
    print(
        f"The worst of {len(SHAPES)} predictions was {worst:.1f} % off (at most {LIMIT_PERCENT} wanted). {quiet.summary()}"
    )


def _in_turn(places: Sequence[Any], through: Callable[[Sequence[Any], int], Any]) -> Callable[..., Any]:
    """Makes a pipeline whose stages are placed here and there in turn."""

    def make(num_stages: int, num_microbatches: int, kind: type[Stage]) -> Any:
        stage = crossfade.remote(kind)
        stages = [stage.options(scheduling_strategy=places[k % 2]).remote() for k in range(num_stages)]
        return through(stages, num_microbatches)

    return make
