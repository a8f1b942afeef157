"""From the bytes of a pipe to prefixed lines."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from crossfade.engines.output import MAX_LINE_LETTERS, Lines


def cut(data: bytes, places: list[int]) -> list[bytes]:
    """The data in pieces."""
    marks = [0, *sorted(place % (len(data) + 1) for place in places), len(data)]
    return [data[start:end] for start, end in pairwise(marks)]


@given(text=st.text(st.characters(codec="utf-8")), places=st.lists(st.integers(0, 1000)))
def test_however_the_bytes_arrive_every_line_comes_whole_and_prefixed(text: str, places: list[int]) -> None:
    lines = Lines("> ")
    shown = "".join(lines.feed(piece) for piece in cut(text.encode(), places)) + lines.flush()
    expected = text.split("\n")
    if not expected[-1]:
        expected.pop()
    assert shown == "".join(f"> {line}\n" for line in expected)
    assert lines.flush() == ""


def test_a_line_without_an_end_is_kept_until_the_flush() -> None:
    lines = Lines("(A0 pid=1) ")
    assert lines.feed(b"first\nsec") == "(A0 pid=1) first\n"
    assert lines.feed(b"ond") == ""
    assert lines.flush() == "(A0 pid=1) second\n"


def test_a_very_long_line_comes_in_pieces() -> None:
    lines = Lines("> ")
    shown = lines.feed(b"x" * (2 * MAX_LINE_LETTERS + 5))
    assert shown == ("> " + "x" * MAX_LINE_LETTERS + "\n") * 2
    assert lines.feed(b"\n") == "> xxxxx\n"


def test_bytes_that_are_no_text_are_replaced() -> None:
    lines = Lines("> ")
    assert lines.feed(b"a\xffb\n") == "> a\ufffdb\n"
    assert lines.feed("ä".encode()[:1]) == ""
    assert lines.flush() == "> \ufffd\n"
