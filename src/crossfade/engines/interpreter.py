"""An actor's process as a child of this one: a fresh interpreter that inherits its descriptors."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress

from crossfade.engines.output import Pipes
from crossfade.errors import ActorStartError
from crossfade.host.interpreter import code_to_run, search_path
from crossfade.host.limits import limit_met
from crossfade.host.processes import describe_exit


class Interpreter:
    """A `Child` that was started here. An `ActorStartError` if the system could not start it; nothing is left then."""

    is_borrowed = False

    def __init__(self, name: str, spin_us: float, pipes: Pipes, fds: tuple[int, ...]) -> None:
        self._popen = _start(name, fds, spin_us, pipes)
        self.pid = self._popen.pid

    def await_exit(self, pidfd: int) -> int | None:
        """``Popen.wait`` has a lock: a signal's handler would wait for its own thread if that holds the lock, and could leave other
        threads waiting. It also mistakes a status that was collected elsewhere for code 0.
        """
        code: int | None = None
        with suppress(ChildProcessError):  # the status was collected elsewhere
            result = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
            if result is not None:
                code = result.si_status if result.si_code == os.CLD_EXITED else -result.si_status
        self._popen.poll()
        return code

    def describe(self, code: int | None) -> str:
        return describe_exit(code)

    def discard(self) -> None:
        self._popen.kill()
        self._popen.wait()


def _start(name: str, fds: tuple[int, ...], spin_us: float, pipes: Pipes) -> subprocess.Popen[bytes]:
    """Starts the interpreter of an actor. Until it ignores Ctrl-C, which is the driver's business, it has it blocked."""
    stdout, stderr = pipes.for_child
    path = search_path()
    command = [sys.executable, "-u", "-c", code_to_run(path.fd, "crossfade.engines.serving", *fds, spin_us)]
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        inherited = (*fds, path.fd)
        return subprocess.Popen(command, pass_fds=inherited, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr)
    except (OSError, subprocess.SubprocessError) as error:
        if limit_met(error):
            raise
        failed = ActorStartError(
            f"the process of actor {name} could not be started: {error}",
            hint=f"the interpreter is {sys.executable!r}; is there memory, and room for one more process?",
        )
        failed.actor = name
        raise failed from error
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        path.close()
