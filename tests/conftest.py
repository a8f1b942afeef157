"""What all tests share: how many examples hypothesis tries, what an interrupt does, and which tests need more GPUs than there are.

``default`` is for ``make test``, ``soak`` for ``make soak`` (``pytest --hypothesis-profile=soak``), which runs the properties of
``make test`` again (``tests/helpers/counts.py``).
"""

from __future__ import annotations

import gc
import os
import signal
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.helpers.gpus import skip_without_gpus

# A shell that starts the tests in the background has them ignore Ctrl-C, and so would every process that a test interrupts.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Several tests run at a time, with several processes each: threads of torch's would only wait for each other's cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Examples start processes and move megabytes: how long one takes says nothing about whether it is right.
_SLOW_IS_FINE = (HealthCheck.too_slow, HealthCheck.data_too_large)

settings.register_profile(
    "default",
    max_examples=60,
    deadline=None,
    print_blob=True,
    suppress_health_check=_SLOW_IS_FINE,
    derandomize="CI" in os.environ,
)
settings.register_profile("soak", settings.get_profile("default"), max_examples=2_000, derandomize=False)
settings.load_profile("default")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    skip_without_gpus(items)


def pytest_collection_finish() -> None:
    """What was imported and collected stays: tests that call the garbage collector need not have it look at that."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def no_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """The user has no home directory, and has named no other place for files."""

    def home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    for name in ("CROSSFADE_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", home)
