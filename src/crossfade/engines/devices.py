"""The devices of an actor's process, as the channels of all its plans share them.

Nothing of it is made before a plan needs it. An actor that has no GPU has the CPU in its place, and so has one whose session claims
GPUs that this machine does not have.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from crossfade.device.context import DeviceContext
from crossfade.device.driver import TimedDriver
from crossfade.device.host_driver import HostDriver
from crossfade.device.memory import Pool
from crossfade.device.signals import Releasable
from crossfade.device.streams import Streams
from crossfade.device.watchdog import Watchdog
from crossfade.engines.machine import num_visible_gpus

_HOST_LIMIT_S = 60.0
_NUM_QUEUES = "32"

Signals = Callable[[str], Sequence[Releasable]]  # what a peer sets and streams of this process may wait for


def select_gpus(gpus: Sequence[int]) -> None:
    """Makes an actor's first GPU torch's current one, and on each of them a stream that is not the default one.

    The default stream waits for all others and cannot be captured. Done before the actor's class is made, and before CUDA starts,
    which is asked for as many hardware queues as it can give: streams that share one wait for each other.
    """
    if not gpus or not num_visible_gpus():
        return
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", _NUM_QUEUES)
    try:
        import torch
    except ImportError:  # the program reaches its GPUs in another way
        return
    for gpu in reversed(gpus):
        torch.cuda.set_device(gpu)
        stream: Any = torch.cuda.Stream(gpu)  # type: ignore[no-untyped-call]
        torch.cuda.set_stream(stream)


@dataclass(slots=True)
class _Watched:
    """A peer whose death lets streams of this process go."""

    pidfd: int
    streams: list[list[int]]  # of each device, those that may wait for it
    users: set[int] = field(default_factory=set)  # plans, by number


def distinct(homes: Sequence[DeviceContext]) -> list[DeviceContext]:
    """Each once: where the CPU stands for several GPUs, all are one."""
    return list({id(home): home for home in homes}.values())


class Devices:
    """The devices of this process: its GPUs, by their indices, or the CPU if it has none."""

    def __init__(self, gpus: Sequence[int], signals: Signals, on_death: Callable[[str], None]) -> None:
        self._gpus = tuple(gpus)
        self._signals = signals  # what a peer sets; any thread may call it
        # Called, in the watchdog's thread, when a peer has died and before anything that waits for it is released.
        self._on_death = on_death
        self._homes: list[DeviceContext] = []
        self._watchdogs: list[Watchdog] = []
        self._watched: dict[str, _Watched] = {}
        self._asked: set[int] = set()  # devices, whether they have failed

    @property
    def homes(self) -> Sequence[DeviceContext]:
        """One for each of its GPUs, in order, or one for the CPU. Opened with the first call. Raises a `MissingDependency` if
        cuda-bindings is not installed, and a `DeviceError` if CUDA cannot start.
        """
        if not self._homes:
            drivers: list[TimedDriver] = [_host_driver()] * max(1, len(self._gpus))
            if self._gpus and num_visible_gpus():
                from crossfade.device.cuda import CudaDriver

                drivers = [CudaDriver(gpu) for gpu in self._gpus]
            made = {
                id(driver): DeviceContext(driver, Pool(driver, _empty_caches), Streams(driver)) for driver in drivers
            }
            self._homes = [made[id(driver)] for driver in drivers]
            self._watchdogs = [Watchdog(home.driver) for home in made.values()]
        return self._homes

    def watch(self, peer: str, pidfd: int, plan: int) -> None:
        """Lets streams go when the peer's process ends, as long as the plan is open. ``pidfd`` stays the caller's.

        All streams count that have been made until now, so a plan makes those of its channels before.
        """
        homes = distinct(self._homes)
        is_new = peer not in self._watched
        if is_new:
            self._watched[peer] = _Watched(os.dup(pidfd), [[] for _ in homes])
        watched = self._watched[peer]
        for home, streams in zip(homes, watched.streams, strict=True):
            streams[:] = dict.fromkeys([home.compute_stream(), home.push_stream, *home.streams.all()])
        if is_new:
            for watchdog, streams in zip(self._watchdogs, watched.streams, strict=True):
                signals, on_death = partial(self._signals, peer), partial(self._on_death, peer)
                watchdog.watch(peer, watched.pidfd, signals, streams, lambda report: None, before_release=on_death)
        watched.users.add(plan)

    def failure(self) -> str:
        """Which of them does nothing any more, and why; empty as long as all do, or none is open. One thread asks."""
        for driver in [home.driver for home in distinct(self._homes)]:
            if driver.device not in self._asked:
                self._asked.add(driver.device)
                driver.enter_thread()
            if failure := driver.failure():
                return f"GPU {driver.device} failed: {failure}"
        return ""

    def forget(self, plan: int) -> None:
        """A plan is closed: its streams wait for nobody any more.

        Signals that nobody names any more may be closed when this returns, also those of a peer that other plans still have.
        """
        for peer, watched in list(self._watched.items()):
            watched.users.discard(plan)
            if not watched.users:
                del self._watched[peer]
                for watchdog in self._watchdogs:
                    watchdog.forget(watched.pidfd)
                os.close(watched.pidfd)
        for watchdog in self._watchdogs:
            watchdog.pause()

    def trim(self) -> None:
        """Gives memory that no channel uses back to the devices. They may wait for their streams."""
        for home in distinct(self._homes):
            home.pool.trim()


def _empty_caches() -> None:
    """Has torch give back what it keeps of its GPUs' memory without using it, which may be nearly all there is."""
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def _host_driver() -> HostDriver:
    return HostDriver(_HOST_LIMIT_S)
