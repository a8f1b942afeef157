"""What several unit tests need."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from crossfade.host.doorbell import Doorbell


@pytest.fixture
def doorbell() -> Iterator[Doorbell]:
    """Sleeps at once."""
    made = Doorbell(*Doorbell.create_fds("test"), spin_us=0)
    yield made
    made.close()
