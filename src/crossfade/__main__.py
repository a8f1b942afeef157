"""``python -m crossfade``: the same as the command ``crossfade``."""

from __future__ import annotations

from crossfade.cli.main import app

if __name__ == "__main__":
    app(prog_name="crossfade")
