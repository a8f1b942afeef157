"""The command ``crossfade``: arguments, and what becomes of errors.

========  ==================================================================================================
exit code  meaning
========  ==================================================================================================
0         done
1         something went wrong on the way: an actor died, a result is wrong
2         the user's mistake: unknown options, a module that cannot be imported, a graph that cannot be compiled
130       Ctrl-C
========  ==================================================================================================

However a command ends, its actors are gone before it returns.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

import crossfade
from crossfade.api.options import MAX_INFLIGHT
from crossfade.cli.exits import INTERRUPTED, PROBLEM, USERS_MISTAKE, UsersMistake, WrongResult
from crossfade.errors import CrossfadeError, MissingDependency, TraceError
from crossfade.host.doorbell import DEFAULT_SPIN_US

app = typer.Typer(
    name="crossfade",
    help="Hides communication behind computation in graphs of actors, and shows how much it hid.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
bench_app = typer.Typer(help="Measures this machine.", no_args_is_help=True)
app.add_typer(bench_app, name="bench")


class EngineName(StrEnum):
    """What runs the actors."""

    LOCAL = "local"
    INLINE = "inline"


@contextmanager
def _command() -> Iterator[None]:
    """Around a command's work: errors become messages and exit codes, and the session is over at the end."""
    try:
        try:
            yield
            # Or Python would find out at its end that there is no room for what was printed. Of a broken pipe it still does.
            with suppress(BrokenPipeError):
                print(end="", flush=True)
        finally:
            crossfade.shutdown()
    except KeyboardInterrupt:
        # One that ended an exec of text (a named tuple's, say) counts as unhandled until the next exec, and then `python -m` ends
        # itself by SIGINT whatever is raised here.
        exec("")
        raise typer.Exit(INTERRUPTED) from None
    except (UsersMistake, MissingDependency, TraceError) as mistake:
        raise _failed(mistake, USERS_MISTAKE) from None
    except (CrossfadeError, WrongResult) as error:
        raise _failed(error, PROBLEM) from None
    except BrokenPipeError:
        raise
    except OSError as error:
        _drop_output()
        raise _failed(
            f"{error}\nhint: see that there is room, and a right to write, where the output goes", PROBLEM
        ) from None


def _drop_output() -> None:
    """Lets go of what cannot be printed, or Python tries once more at its end."""
    try:
        print(end="", flush=True)
    except OSError:
        with open(os.devnull, "wb") as nowhere, suppress(OSError):
            os.dup2(nowhere.fileno(), sys.stdout.fileno())


def _failed(error: Exception | str, code: int) -> typer.Exit:
    print(f"error: {error}", file=sys.stderr)
    return typer.Exit(code)


def _show_version(is_asked: bool) -> None:
    if is_asked:
        build = "compiled" if crossfade.compiled else "pure Python"
        print(f"crossfade {crossfade.__version__} ({build})")
        raise typer.Exit


@app.callback()
def crossfade_command(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Hides communication behind computation in graphs of actors, and shows how much it hid."""


@app.command()
def demo(
    output: Annotated[Path, typer.Option(help="The folder for the picture, the traces and the plan.")] = Path(
        "demo-output"
    ),
    engine: Annotated[EngineName, typer.Option(help="Processes, or all in this thread.")] = EngineName.LOCAL,
) -> None:
    """Runs three senders and a receiver, and shows what took how long. Needs neither torch nor a GPU."""
    with _command():
        from crossfade.cli.demo import run_demo

        run_demo(output, engine.value)


@app.command()
def plan(
    target: Annotated[
        str,
        typer.Argument(
            metavar="MODULE:FUNCTION",
            help="Returns the last node of a graph, or a MultiOutputNode, or a pair of that and a Workload; takes no arguments.",
        ),
    ],
    max_inflight: Annotated[
        int, typer.Option(min=1, max=MAX_INFLIGHT, help="How many executions may be under way.")
    ] = 10,
    overlap: Annotated[bool, typer.Option(help="Start receives early and let sends trail.")] = True,
    svg: Annotated[Path | None, typer.Option(help="Write a picture of the predicted timeline there.")] = None,
    topology: Annotated[
        Path | None,
        typer.Option(help="Plan for the cluster that this file describes; no actor is constructed.", metavar="FILE"),
    ] = None,
    workload: Annotated[
        Path | None,
        typer.Option(
            help="How long methods take and how large values are, as Workload.to_json writes it.", metavar="FILE"
        ),
    ] = None,
    costs: Annotated[
        Path | None, typer.Option(help="What moving values costs, as CostModel.to_json writes it.", metavar="FILE")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the prediction and what bounds it as JSON.")] = False,
) -> None:
    """Prints what every actor of a graph would do, how long that takes, and what bounds it. Starts no process: the actors'
    constructors run in this one.
    """
    with _command():
        from crossfade.cli.plan import show_plan

        show_plan(
            target,
            max_inflight=max_inflight,
            overlap=overlap,
            svg=svg,
            topology=topology,
            workload=workload,
            costs=costs,
            is_json=json,
        )


@app.command()
def pipeline(
    target: Annotated[
        str,
        typer.Argument(
            metavar="MODULE:FUNCTION",
            help="Returns (module, example_inputs), the inputs of one microbatch in a tuple; takes no arguments.",
        ),
    ],
    stages: Annotated[int, typer.Option(min=1, help="How many stages to cut the module into.")],
    microbatches: Annotated[int, typer.Option(min=1, help="How many microbatches a training step has.")],
    ranks: Annotated[
        int | None, typer.Option(min=1, help="How many ranks; if not given, as many as each schedule wants.")
    ] = None,
    device: Annotated[
        str, typer.Option(help="Where to measure, such as cuda; where the module is, if not given.")
    ] = "",
    topology: Annotated[
        Path | None, typer.Option(help="Predict for the cluster that this file describes.", metavar="FILE")
    ] = None,
) -> None:
    """Cuts a module into stages of equal time, and predicts a training step by each of torch's schedules."""
    with _command():
        from crossfade.cli.pipeline import show_pipeline

        show_pipeline(
            target, num_stages=stages, num_microbatches=microbatches, num_ranks=ranks, device=device, topology=topology
        )


@app.command()
def doctor(
    traces: Annotated[
        list[Path],
        typer.Argument(metavar="TRACE...", help="Files of torch.profiler, one for each rank, or a folder of them."),
    ],
    json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
    html: Annotated[
        Path | None, typer.Option(help="Write a page with the timeline, now and after the fix.", metavar="FILE")
    ] = None,
    timeline: Annotated[
        Path | None,
        typer.Option(help="Write a step, now and after the fix, as .svg or, for Perfetto, as .json.", metavar="FILE"),
    ] = None,
) -> None:
    """Says why communication is not hidden, or why a GPU computes nothing, and what each fix would win, from a trace."""
    with _command():
        from crossfade.cli.doctor import examine

        examine(traces, is_json=json, html=html, timeline=timeline)


@app.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
def record(
    script: Annotated[Path, typer.Argument(metavar="SCRIPT", help="A Python file, run as Python runs it.")],
    arguments: Annotated[list[str] | None, typer.Argument(metavar="[ARGS]...", help="Its arguments.")] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="The folder for the traces.", metavar="FOLDER")] = Path(
        "traces"
    ),
    skip: Annotated[int, typer.Option(min=0, help="Begin after so many steps of an optimizer.")] = 0,
    steps: Annotated[int, typer.Option(min=0, help="End after so many more; 0: with the script.")] = 0,
    with_stack: Annotated[bool, typer.Option("--with-stack", help="Keep the lines; slower.")] = False,
    with_tensors: Annotated[
        bool, typer.Option("--with-tensors", help="Keep what makes the input of collectives; slower.")
    ] = False,
) -> None:
    """Runs a script and records a trace of it for the doctor. With torchrun: torchrun ... -m crossfade record SCRIPT."""
    with _command():
        from crossfade.cli.record import record_script

        record_script(
            script,
            arguments or [],
            output,
            num_skipped=skip,
            num_steps=steps,
            with_stack=with_stack,
            with_tensors=with_tensors,
        )


@app.command()
def topology(
    json: Annotated[
        Path | None,
        typer.Option(help="The file to write; in the user's cache folder if none is named.", metavar="FILE"),
    ] = None,
    show: Annotated[
        Path | None, typer.Option(help="Measure nothing: show what such a file has.", metavar="FILE")
    ] = None,
    limit_s: Annotated[float, typer.Option(min=1, help="No measure begins after so many seconds.")] = 110.0,
) -> None:
    """Measures the links between this host's GPUs: by size, by several at once, and beside work that computes."""
    with _command():
        from crossfade.cli.topology import measure_topology, show_file

        if show is not None:
            show_file(show)
        else:
            measure_topology(json, limit_s)


@app.command()
def tune(
    shapes: Annotated[
        list[str], typer.Argument(metavar="M,N,K...", help="The product of each GPU, such as 8192,8192,7168.")
    ],
    operator: Annotated[list[str] | None, typer.Option(help="Its name; may be given again. All, if none is.")] = None,
    dtype: Annotated[str, typer.Option(help="Of the elements.")] = "bfloat16",
    layout: Annotated[str, typer.Option(help="nn, or nt where b is the transpose of a row-major matrix.")] = "nt",
    again: Annotated[bool, typer.Option("--again", help="Measure what was measured before too.")] = False,
    eager: Annotated[
        bool, typer.Option("--eager", help="For groups that are opened without is_replayable=True.")
    ] = False,
) -> None:
    """Measures the ways to do products with their collectives, and keeps the best for each shape. Start it with torchrun."""
    with _command():
        from crossfade.cli.tune import tune_here

        tune_here(shapes, operator or [], dtype, layout, again=again, is_eager=eager)


@bench_app.callback()
def bench() -> None:
    """Measures this machine."""


@bench_app.command()
def hops(
    num: Annotated[int, typer.Option(min=10, help="Executions for each figure (fewer where they take long).")] = 5000,
    spin_us: Annotated[
        float, typer.Option(min=0, help="How long, in microseconds, a waiting process looks for work before it sleeps.")
    ] = DEFAULT_SPIN_US,
) -> None:
    """Round trips through actors: latency, chains, fan-out, arrays, several in flight. All values are checked."""
    with _command():
        from crossfade.cli.bench import bench_hops

        bench_hops(num, spin_us)
