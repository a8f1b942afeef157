"""The events of a file in Chrome's trace format, a piece at a time: memory is bounded by the piece, not by the file.

A file is an object with ``traceEvents``, as torch.profiler writes it, or only the list of events; plain or compressed by gzip.
Several versions of torch write what is no JSON: names with broken UTF-8 or control characters, paths with single backslashes,
``inf``, ``nan`` and ``N/A``. A piece that cannot be read is read once more without these.
"""

from __future__ import annotations

import gzip
import re
import zlib
from collections.abc import Iterator
from contextlib import suppress
from io import BufferedReader
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from crossfade.errors import TraceError

_T = TypeVar("_T")
_PIECE_BYTES = 8 << 20
_GZIP = b"\x1f\x8b"
_EVENTS = re.compile(rb'"traceEvents"\s*:\s*\[')
_BETWEEN = re.compile(rb"\}\s*(,)\s*\{")
_LAST = re.compile(rb"[\}\[]\s*(\])")
_NO_VALUE = re.compile(rb'(":\s*)(?:-?(?:nan|inf|infinity)|N/A)(?=\s*[,}\]])', re.IGNORECASE)
_BACKSLASH = re.compile(rb'(\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))|\\')
_CONTROL_TO_SPACE = bytes.maketrans(bytes(range(1, 32)), b" " * 31)
_UNREADABLE = msgspec.DecodeError, UnicodeDecodeError
_MOST_IN_VAIN = 5  # texts that were still unreadable when mended: the file is damaged, and mending takes long
_MOST_CUTS = 100  # places that look like the end of an event, and may lie inside one


class ChromeEvent(msgspec.Struct, gc=False):
    """One event. ``ts`` and ``dur`` are in microseconds; ``args`` is text until somebody needs it."""

    name: Any = ""
    ph: Any = ""
    cat: Any = ""
    pid: Any = 0
    tid: Any = 0
    ts: float | None = 0.0
    dur: float | None = 0.0
    args: msgspec.Raw = msgspec.Raw(b"{}")


class ChromeFile:
    """A trace file. Iterating yields lists of events; ``metadata`` is what else the file says, and is whole after the last list."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata: dict[str, Any] = {}
        self._decoder = msgspec.json.Decoder(list[ChromeEvent], strict=False)
        self._num_bytes = 0  # of text, before what is in hand
        self._num_events = 0
        self._num_in_vain = 0

    def __iter__(self) -> Iterator[list[ChromeEvent]]:
        """Raises a `TraceError` where the file is empty, damaged, truncated or no trace."""
        try:
            with self._opened() as file:
                yield from self._events(file)
        except (EOFError, zlib.error, gzip.BadGzipFile):
            raise self._error("ends in the middle of its compressed data", _WRITE_AGAIN) from None
        except OSError as error:
            raise TraceError(
                f"{self.path}: {error.strerror or error}\nhint: see that the file is there and may be read"
            ) from None

    def _opened(self) -> gzip.GzipFile | BufferedReader:
        with self.path.open("rb") as file:
            is_compressed = file.read(2) == _GZIP
        return gzip.open(self.path) if is_compressed else self.path.open("rb")

    def _events(self, file: gzip.GzipFile | BufferedReader) -> Iterator[list[ChromeEvent]]:
        text = self._skip_head(file)
        while piece := file.read(_PIECE_BYTES):
            text += piece
            if len(text) < _PIECE_BYTES:
                continue
            events, length = self._most(text)
            text = text[length:]
            self._num_bytes += length
            self._num_events += len(events)
            yield events
        yield self._rest(text)

    def _skip_head(self, file: gzip.GzipFile | BufferedReader) -> bytes:
        """Reads up to the first event; what stands before goes into ``metadata``."""
        text = b""
        while piece := file.read(_PIECE_BYTES):
            text += piece
            if (bare := text.lstrip())[:1] == b"[":
                if bare[1:].lstrip()[:1] == b"[":
                    raise self._error("is a list of lists, not of events", _WHAT_IS_READ)
                return bare[1:]
            if bare[:1] not in (b"{", b""):
                raise self._error("is not JSON", _WHAT_IS_READ)
            if found := _EVENTS.search(text):
                with suppress(*_UNREADABLE):
                    head = self._parse(_OBJECT, text[: found.start()].rstrip().rstrip(b",") + b"}")
                    self.metadata.update(head)
                self._num_bytes = found.end()
                return text[found.end() :]
        if not text.strip():
            raise self._error("is empty", _WRITE_AGAIN)
        raise self._error('has no "traceEvents"', _WHAT_IS_READ)

    def _most(self, text: bytes) -> tuple[list[ChromeEvent], int]:
        """As many whole events as the text begins with, and where the next one begins."""
        for end in _cuts(_BETWEEN, text):
            with suppress(*_UNREADABLE):
                return self._decode(text[:end]), end + 1
        raise self._error(
            f"is damaged after {self._num_events:,} events, near byte {self._num_bytes:,} of its text", _WRITE_AGAIN
        )

    def _rest(self, text: bytes) -> list[ChromeEvent]:
        for end in _cuts(_LAST, b"[" + text):  # the list may be empty
            tail = text[end:].strip()
            with suppress(*_UNREADABLE):
                metadata = self._parse(_OBJECT, b'{"":0' + tail) if tail else {}
                events = self._decode(text[: end - 1])
                self.metadata.update(metadata)
                return events
        if text.strip() == b"":
            raise self._error(f"ends after {self._num_events:,} events, without the end of its list", _WRITE_AGAIN)
        raise self._error(f"is damaged or truncated after {self._num_events:,} events", _WRITE_AGAIN)

    def _decode(self, text: bytes) -> list[ChromeEvent]:
        return self._parse(self._decoder, b"[" + text + b"]")

    def _parse(self, decoder: msgspec.json.Decoder[_T], text: bytes) -> _T:
        """Raises one of `_UNREADABLE`, in a damaged file or where the text was cut inside an event."""
        try:
            return decoder.decode(text)
        except _UNREADABLE as error:
            if "truncated" in str(error) or self._num_in_vain == _MOST_IN_VAIN:
                raise
            self._num_in_vain += 1
            found = decoder.decode(_mended(text))
            self._num_in_vain -= 1
            return found

    def _error(self, what: str, hint: str) -> TraceError:
        return TraceError(f"{self.path.name} {what}\nhint: {hint}")


_OBJECT = msgspec.json.Decoder(dict[str, Any])
_WHAT_IS_READ = "crossfade reads what torch.profiler's export_chrome_trace writes"
_WRITE_AGAIN = "a program that was killed while it wrote its trace leaves such a file: record it again"


def _mended(text: bytes) -> bytes:
    """JSON, of what some versions of torch write."""
    text = text.decode(errors="replace").encode().translate(_CONTROL_TO_SPACE)
    return _BACKSLASH.sub(lambda found: found[1] or rb"\\", _NO_VALUE.sub(rb"\1null", text))


def _cuts(pattern: re.Pattern[bytes], text: bytes) -> Iterator[int]:
    """Where a pattern's first group begins, from the end of the text backwards."""
    num, end, window = 0, len(text), 1 << 14
    while end > 0 and num < _MOST_CUTS:
        begin = max(end - window, 0)
        found = [match.start(1) for match in pattern.finditer(text, begin) if match.start() < end]
        for place in reversed(found):
            yield place
            num += 1
        end, window = begin, window * 4
