"""Tables and progress bars, as the commands show them; and what bounds a prediction, on one screen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from crossfade.schedule.bounds import Bound, Bounds
from crossfade.types import DRIVER


def new_table(title: str, left: Sequence[str], right: Sequence[str] = ()) -> Table:
    """An empty table with words in the columns at the left, and figures in those at the right."""
    table = Table(title=title or None, title_justify="left")
    for name in left:
        table.add_column(escape(name), no_wrap=True)
    for name in right:
        table.add_column(escape(name), justify="right")
    return table


def new_progress(console: Console, doing: str) -> Progress:
    """A bar that is gone at its end; its task's description says what is being done."""
    done = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(TextColumn(doing), *done, TextColumn("{task.description}"), console=console, transient=True)


NUM_SHOWN = 5
"""Actors, and links, that are shown one by one."""


def print_bounds(bounds: Bounds) -> None:
    """Prints the actors and the links that bound most, and what the rest come to."""
    console = Console(highlight=False, soft_wrap=True)
    table = new_table("What bounds it", ("on the critical path",), ("share", "busy"))
    _add(table.add_row, "actors computing", bounds.actors, "actors")
    _add(table.add_row, "links moving", bounds.links, "links")
    handling = sorted(bounds.actors, key=lambda each: -each.handling)
    _add(
        table.add_row, "actors reading, writing, releasing", [replace(e, share=e.handling) for e in handling], "actors"
    )
    table.add_row("waking up, and being seen", _percent(bounds.waking), "")
    console.print(table)
    computing = [each for each in bounds.actors if each.name != DRIVER]
    for name, group in (("actors compute", computing), ("links move", bounds.links)):
        if group:
            busy = sorted(each.busy for each in group)
            spread = f"at least {busy[0]:.1%}, median {median(busy):.1%}, at most {busy[-1]:.1%}"
            console.print(f"{len(group)} {name}: {spread} of the time")


def _add(add_row: Callable[..., None], title: str, group: Sequence[Bound], what: str) -> None:
    add_row(title, _percent(sum(each.share for each in group)), "")
    on_path = [each for each in group if each.share > 0]
    for each in on_path[:NUM_SHOWN]:
        host = f" on {each.host}" if each.host else ""
        add_row(f"  {escape(each.name + host)}", _percent(each.share), _percent(each.busy))
    rest = on_path[NUM_SHOWN:]
    if rest:
        add_row(f"  {len(rest)} other {what}", _percent(sum(each.share for each in rest)), "")


def _percent(share: float) -> str:
    return f"{share:.1%}"
