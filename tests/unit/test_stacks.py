"""The stacks that `crossfade.dump` shows."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from crossfade.engines.sentinel import SideDoor, all_stacks


def test_the_main_thread_is_there_however_many_others_there_are() -> None:
    may_end = threading.Event()
    threads = [threading.Thread(target=may_end.wait, name=f"waiter {index}") for index in range(120)]
    for thread in threads:
        thread.start()
    text = all_stacks()
    may_end.set()
    for thread in threads:
        thread.join()
    assert text.count("thread waiter") >= 90
    main = text[text.index("thread MainThread") :]
    assert "test_the_main_thread_is_there" in main
    assert "may_end.wait" not in main


def test_a_stack_has_its_lines_the_oldest_call_first_in_any_alphabet(tmp_path: Path) -> None:
    path = tmp_path / "größe.py"
    path.write_text("def ausgeführt(call):\n    return call()  # ümlaut\n", encoding="utf-8")
    names: dict[str, object] = {}
    exec(compile(path.read_text(encoding="utf-8"), str(path), "exec"), names)
    text = names["ausgeführt"](all_stacks)  # type: ignore[operator]
    assert f'  File "{path}", line 2, in ausgeführt\n    return call()  # ümlaut\n' in text
    assert text.index("ausgeführt") < text.index("in all_stacks")


@pytest.mark.parametrize("last", ['  File "<string>", line 1 in <module>\n', "  ...\n"])
def test_stacks_whose_writer_is_held_up_come_whole(monkeypatch: pytest.MonkeyPatch, last: str) -> None:
    """Longer than between two looks, shorter than anybody waits for the next line."""
    lines = [
        "Thread 0x1 (most recent call first):\n",
        '  File "a.py", line 2 in run\n',
        "\nCurrent thread 0x2:\n",
        last,
    ]
    fd = os.memfd_create("stacks")

    def write(*_: object) -> None:
        for line in lines:
            time.sleep(0.05)
            os.write(fd, line.encode())

    door: Any = SideDoor.__new__(SideDoor)
    door._stacks = SimpleNamespace(fd=fd)
    writer = threading.Thread(target=write)
    monkeypatch.setattr(os, "kill", lambda *_: writer.start())
    try:
        assert door.stacks_by_signal(1, timeout_s=5.0) == "".join(lines)
    finally:
        writer.join()
        os.close(fd)
