"""A slow link that loses packets, between two namespaces of the network: a forwarder between two taps, for kernels without netem.

``python -m tests.helpers.slow_link PID DELAY_MS LOSS`` makes both interfaces, gives the second one to the namespace of a process,
says that it is ready, and forwards: each packet arrives after the delay, or with this probability not at all.
"""

from __future__ import annotations

import fcntl
import heapq
import os
import random
import select
import struct
import sys
import time
from contextlib import suppress

from tests.helpers.two_hosts import LINKS, ip

_TUNSETIFF = 0x400454CA
_TAP_WITHOUT_HEAD = 0x0002 | 0x1000
_LONGEST = 1 << 16


def _open_tap(name: str) -> int:
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _TAP_WITHOUT_HEAD))
    return fd


def forward(ends: tuple[int, int], delay_s: float, loss: float) -> None:
    """Never returns."""
    draw = random.Random(0)
    other = dict(zip(ends, reversed(ends), strict=True))
    due: list[tuple[float, int, int, bytes]] = []  # when, which number, to where, what
    number = 0
    while True:
        left_s = max(0.0, due[0][0] - time.monotonic()) if due else None
        for fd in select.select(ends, (), (), left_s)[0]:
            packet = os.read(fd, _LONGEST)
            if draw.random() >= loss:
                number += 1
                heapq.heappush(due, (time.monotonic() + delay_s, number, other[fd], packet))
        while due and due[0][0] <= time.monotonic():
            _, _, target, packet = heapq.heappop(due)
            with suppress(OSError):  # that interface is down, or full: one packet more is lost
                os.write(target, packet)


def main(pid: str, delay_ms: str, loss: str) -> None:
    ends = _open_tap(LINKS[0]), _open_tap(LINKS[1])
    ip("link", "set", LINKS[1], "netns", pid)
    print("ready", flush=True)
    forward(ends, float(delay_ms) / 1000, float(loss))


if __name__ == "__main__":
    main(*sys.argv[1:])
