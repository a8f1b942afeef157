"""A session with two GPUs."""

from __future__ import annotations

from tests.helpers.sessions import opened

session = opened(num_gpus=2)
