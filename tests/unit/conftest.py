"""What several unit tests need."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from crossfade.device.signals import HostBoard
from crossfade.host.doorbell import Doorbell
from crossfade.host.memory import Memory
from crossfade.host.processes import open_pidfd
from crossfade.testing.fake import Machine
from tests.helpers.running_driver import RunningDriver


@pytest.fixture
def doorbell() -> Iterator[Doorbell]:
    """Sleeps at once."""
    made = Doorbell(*Doorbell.create_fds("test"), spin_us=0)
    yield made
    made.close()


@pytest.fixture
def driver() -> RunningDriver:
    return RunningDriver(Machine(is_strict=False), "process")


@pytest.fixture
def board(driver: RunningDriver) -> Iterator[HostBoard]:
    memory = Memory.create("signals", 65536)
    yield HostBoard(driver, memory, 64, "test")
    memory.close()


@pytest.fixture
def killed() -> Iterator[int]:
    """The descriptor of a process that has been killed."""
    peer = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    pidfd = open_pidfd(peer.pid)
    peer.kill()
    yield pidfd
    os.close(pidfd)
    peer.communicate()
