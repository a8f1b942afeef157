"""Files that crossfade writes: where it keeps them, and how they are replaced whole."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

__all__ = ["cache_folder", "replace_file"]


def cache_folder() -> Path:
    """Where crossfade keeps what it measured: CROSSFADE_CACHE_DIR, else ``crossfade`` in XDG_CACHE_HOME, else in ``~/.cache``.
    Raises a RuntimeError if this user has no home.
    """
    own = os.environ.get("CROSSFADE_CACHE_DIR", "")
    if own:
        return Path(own)
    cache = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(cache) if os.path.isabs(cache) else Path.home() / ".cache") / "crossfade"


def replace_file(path: Path, text: str) -> None:
    """Writes a file whole or not at all: who reads it meanwhile gets the old one or the new one. Where the path is a symlink, the
    file behind it is replaced. What is no regular file, such as a device or a pipe, is written to.
    """
    target = Path(os.path.realpath(path))
    beside = target.with_name(f".{os.urandom(8).hex()}")
    try:
        if path.exists() and not path.is_file():
            path.write_text(text, encoding="utf-8")
            return
        with beside.open("x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(target)
    except OSError as error:
        raise type(error)(error.errno, error.strerror, str(path)) from None  # of the file that was asked for
    finally:
        with suppress(OSError):
            beside.unlink(missing_ok=True)
