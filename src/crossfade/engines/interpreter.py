"""A process as a child of this one, an actor's or a template's: a fresh interpreter that inherits its descriptors."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress

from crossfade.errors import ActorStartError
from crossfade.host.interpreter import code_to_run, search_path
from crossfade.host.limits import limit_met
from crossfade.host.processes import describe_exit


class Interpreter:
    """A `Child` that was started here. An `ActorStartError` if the system could not start it; nothing is left then."""

    is_borrowed = False

    def __init__(
        self,
        name: str,
        module: str,
        arguments: Sequence[object],
        stdio: tuple[int | None, int | None],
        fds: tuple[int, ...],
    ) -> None:
        """The interpreter calls ``main`` of a module with the descriptors, which it inherits, and the arguments. Of no ``name`` is
        the process that others are forked from. Until it ignores Ctrl-C, which is the driver's business, it has it blocked.
        """
        stdout, stderr = stdio
        path = search_path()
        inherited = (*fds, path.fd)
        command = [sys.executable, "-u", "-c", code_to_run(path.fd, module, *fds, *arguments)]
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self._popen = subprocess.Popen(
                command, pass_fds=inherited, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr
            )
        except (OSError, subprocess.SubprocessError) as error:
            if limit_met(error):
                raise
            raise not_started(name, str(error)) from error
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            path.close()
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


def not_started(name: str, why: str, hint: str = "") -> ActorStartError:
    """The error of actor ``name``, for which the system started no process."""
    what = f"the process of actor {name}" if name else "the process that actors are forked from"
    return ActorStartError(
        f"{what} could not be started: {why}",
        hint=hint or f"the interpreter is {sys.executable!r}; is there memory, and room for one more process?",
        actor=name,
    )
