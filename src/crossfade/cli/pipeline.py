"""``crossfade pipeline``: where a user's module would be cut, and what each schedule would make of it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from crossfade.cli.exits import UsersMistake
from crossfade.cli.shown import print_bounds
from crossfade.cli.target import call_target, describe, read_cluster, users_code
from crossfade.errors import GraphError, MissingDependency

if TYPE_CHECKING:
    from crossfade.pipelines.predict import Prediction


def show_pipeline(
    target: str,
    *,
    num_stages: int,
    num_microbatches: int,
    num_ranks: int | None,
    device: str,
    topology: Path | None = None,
) -> None:
    """Prints the split of the module that a function returns, a row for each schedule, and what bounds the quickest of them."""
    cluster = None if topology is None else read_cluster(topology)
    made = call_target(target, example="my_package.my_model:make", returns="a module and its example inputs")
    try:
        import torch
    except ModuleNotFoundError:
        raise MissingDependency("torch", extra="torch", needed_for="crossfade pipeline") from None
    from crossfade.pipelines import SCHEDULES, split
    from crossfade.pipelines.report import format_bytes, format_table

    module, example_inputs = _taken_apart(made, target, torch.nn.Module)
    try:
        torch.empty(0, device=device or None)
    except (RuntimeError, AssertionError) as error:  # the latter where torch is built without CUDA
        message = str(error).partition("\n")[0]
        raise UsersMistake(f"there is no device {device!r}: {message}", hint="name one that torch has here") from None
    with users_code(f"the module of {target}"):
        try:
            cut = split(module, example_inputs, num_stages, device=device or None)
        except GraphError as error:
            raise UsersMistake.of(error, f"the module of {target} cannot be cut: ") from None
    print(cut)
    print(f"\npredicted, for a step of {num_microbatches} microbatches, without the optimizer:\n")
    rows = [["schedule", "ranks", "step", "bubble", "memory", "exposed"]]
    refused = []
    quickest: Prediction | None = None
    for name in SCHEDULES:
        try:
            found = cut.predict(name, num_microbatches, num_ranks, topology=cluster)
        except GraphError as error:
            message, _, hint = str(error).partition("\nhint: ")
            refused.append(f"{name}: {message}; {hint}")
            continue
        quickest = found if quickest is None or found.step_us < quickest.step_us else quickest
        bubble = f"{sum(found.bubbles) / found.num_ranks:.1%}"
        memory, exposed = format_bytes(max(found.memory_bytes)), f"{max(found.exposed_us) / 1e3:.2f} ms"
        rows.append([name, str(found.num_ranks), f"{found.step_us / 1e3:.2f} ms", bubble, memory, exposed])
    print("\n".join([*format_table(rows, num_left=1), *refused]))
    print("\nbubble: the mean of all ranks; memory and exposed communication: of the rank that has most")
    if cluster is not None and quickest is not None:
        print(f"\nthe quickest, {quickest.schedule}:")
        print_bounds(quickest.bounds)


def _taken_apart(made: Any, target: str, kind: type) -> tuple[Any, Any]:
    hint = "return (module, example_inputs), the inputs of one microbatch in a tuple"
    if not isinstance(made, tuple | list) or len(made) != 2:
        raise UsersMistake(f"{target}() returned {describe(made)}, not a module and its example inputs", hint=hint)
    if not isinstance(made[0], kind):
        raise UsersMistake(f"{target}() returned {describe(made[0])} first, which is no torch.nn.Module", hint=hint)
    return made[0], made[1]
