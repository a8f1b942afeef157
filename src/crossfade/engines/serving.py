"""How a process becomes an actor: one that was started for it, a Ray worker, or one that has an object of the user's."""

from __future__ import annotations

import os
import signal
import socket
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NoReturn

from crossfade.engines.actor import Actor
from crossfade.engines.sentinel import Sentinel
from crossfade.host.doorbell import Doorbell
from crossfade.host.frames import KEY_BYTES, FrameError
from crossfade.host.limits import allow_many_descriptors, reserve_descriptors
from crossfade.host.sockets import Connection, take_over


def main(*arguments: Any) -> None:
    """Runs an actor on inherited descriptors: the arguments are those of `serve`, one by one. The driver's Ctrl-C is the driver's
    business.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    *fds, spin_us = arguments
    for fd in fds:
        os.set_inheritable(fd, False)  # they are this process's, not those of programs that it starts
    exit_with(serve(fds, spin_us))


def exit_with(code: int) -> NoReturn:
    """Ends the process: threads of gloo or of user code must not keep a stopped actor alive, however it came to its end."""
    with suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def serve(fds: Sequence[int], spin_us: float, instance: Any = None) -> int:
    """Runs an actor in this thread until it is to stop; returns the exit status. An actor whose ``instance`` is somebody else's is
    a guest in this process, which goes on without the driver.
    """
    control_fd, keys_fd, bell_memory_fd, bell_fd, driver_pidfd, lifeline_fd, door_fd, stacks_fd = fds
    is_guest = instance is not None
    allow_many_descriptors()
    reserve_descriptors()
    keys = take_over(keys_fd, 2 * KEY_BYTES)
    connection = Connection(socket.socket(fileno=control_fd), keys[:KEY_BYTES], "actor")
    door = Connection(socket.socket(fileno=door_fd), keys[KEY_BYTES:], "actor")
    doorbell = Doorbell(bell_memory_fd, bell_fd, spin_us=spin_us)
    actor = Actor(connection, doorbell, instance)
    sentinel = Sentinel(driver_pidfd, lifeline_fd, door, stacks_fd, actor.describe, is_guest=is_guest)
    actor.look_after = sentinel.look_after
    code = 0
    try:
        actor.serve()
    except FrameError as error:
        print(f"crossfade: actor {actor.name} stops: its control connection is broken, {error}", file=sys.stderr)
        code = 1
    except ConnectionError:
        pass  # the driver is gone
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if is_guest:
            exit_with(code)  # as Ray does it
    except BaseException:
        traceback.print_exc()
        code = 1
    if actor.is_forked:
        print("a process that was forked in a method of an actor must not return from that method", file=sys.stderr)
        exit_with(code or 1)
    if is_guest:
        actor.leave_all()
        connection.close()
        doorbell.close()
    return code
