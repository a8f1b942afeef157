"""``crossfade record``: a script under `crossfade.record`, whole or some steps of it."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import crossfade
from crossfade.cli.exits import PROBLEM, UsersMistake
from crossfade.errors import MissingDependency, TraceError

_MOST_UNTRACED = 5  # of the steps that are skipped, the last ones are timed


def record_script(
    script: Path,
    arguments: Sequence[str],
    folder: Path,
    *,
    num_skipped: int,
    num_steps: int,
    with_stack: bool,
    with_tensors: bool,
) -> None:
    """Runs a script as ``python SCRIPT ARGS`` does, and says where its trace is.

    A step is one of an optimizer. A script whose optimizers make fewer steps than are to be skipped has no trace.
    """
    if not script.is_file():
        raise UsersMistake(f"there is no file {script}", hint="name a Python file")
    try:
        from torch.optim.optimizer import register_optimizer_step_post_hook
    except ImportError:
        raise MissingDependency("torch", extra="torch", needed_for="crossfade record") from None
    num_untraced = min(max(num_skipped - 1, 0), _MOST_UNTRACED)
    recording = crossfade.record(folder, with_stack=with_stack, with_tensors=with_tensors, untraced_steps=num_untraced)
    window = _Window(recording, num_skipped, num_steps, num_untraced)
    handle = register_optimizer_step_post_hook(window.step)
    before = sys.argv, list(sys.path)
    sys.argv, sys.path[0] = [str(script), *arguments], os.path.dirname(os.path.realpath(script))
    try:
        with window:
            code = _run(script)
    finally:
        handle.remove()
        sys.argv, sys.path[:] = before
    if code not in (None, 0):
        raise SystemExit(code)
    if window.error is not None:
        raise window.error
    if window.recording.path is None:
        raise UsersMistake(
            f"{script} ended after {window.num_seen} steps of an optimizer, and {num_skipped} were to be skipped",
            hint="give a smaller --skip",
        )
    replaced = " (it replaces an earlier one)" if window.recording.has_replaced else ""
    following = f"next: crossfade doctor {folder}"
    if not window.recording.has_gpu:
        following = "the doctor needs a trace of a GPU, and this program used none"
    print(f"recorded: {window.recording.path}{replaced}\n{following}")


def _run(script: Path) -> object:
    """Runs a script, and returns what it exits with. What it raises is shown as Python shows it: it is no error of crossfade's."""
    try:
        runpy.run_path(str(script.absolute()), run_name="__main__")
    except SystemExit as end:
        return end.code
    except Exception as error:
        frames = error.__traceback__
        while frames is not None and frames.tb_frame.f_globals["__name__"] in (__name__, "runpy"):
            frames = frames.tb_next
        sys.excepthook(type(error), error.with_traceback(frames), frames)
        return PROBLEM
    return None


class _Window:
    """The part of a script that is recorded: from one step of an optimizer to another, or up to the end.

    Attributes:
        recording: of that part.
        num_seen: how many steps the optimizers have made.
        error: why there is no trace, where the script had run long enough for one.
    """

    def __init__(self, recording: crossfade.Recording, num_skipped: int, num_steps: int, num_untraced: int) -> None:
        self.recording = recording
        self.num_seen = 0
        self.error: TraceError | None = None
        self._num_skipped = num_skipped
        self._first = num_skipped - num_untraced
        self._last = num_skipped + num_steps if num_steps else 0
        self._open = ExitStack()

    def __enter__(self) -> _Window:
        if not self._first:
            self._open.enter_context(self.recording)
        return self

    def __exit__(self, *_: object) -> None:
        with self._going_on():
            self._open.close()

    @contextmanager
    def _going_on(self) -> Iterator[None]:
        """Keeps the error of a trace that fails, so that the script goes on without."""
        try:
            yield
        except TraceError as error:
            self._open.pop_all()
            if self.num_seen >= self._num_skipped:  # else the script ended before the trace began
                self.error = error

    def step(self, *_: Any) -> None:
        """An optimizer has made a step."""
        self.num_seen += 1
        if self.error is not None:
            return
        with self._going_on():
            if self.num_seen == self._first:
                self._open.enter_context(self.recording)
            elif self.num_seen == self._last:
                self._open.close()
            elif self.num_seen > self._first and (not self._last or self.num_seen < self._last):
                self.recording.step()
