"""The stacks that `crossfade.dump` shows."""

from __future__ import annotations

import threading
from pathlib import Path

from crossfade.engines.sentinel import all_stacks


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
