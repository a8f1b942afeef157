"""Tables and progress bars, as the commands show them."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

__all__ = ["new_progress", "new_table"]


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
