"""What is said of actors that died where somebody else collects the exit statuses of the driver's children."""

from __future__ import annotations

import pytest

from tests.helpers.programs import output_of

pytestmark = pytest.mark.timeout(60)

_PROGRAM = """
import crossfade, os, signal, sys

def reap(*_):
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass

signal.signal(signal.SIGCHLD, signal.SIG_IGN if sys.argv[1] == "ignored" else reap)

@crossfade.remote
class Actor:
    def __init__(self, how=""):
        if how == "raises":
            raise ValueError("planted")
        if how == "exits":
            os._exit(3)

    def exit(self):
        os._exit(5)

def told(actor):
    try:
        actor.exit.remote().get()
    except crossfade.ActorError as error:
        print(str(error).splitlines()[0])

told(Actor.remote())
told(Actor.remote("raises"))
told(Actor.remote("exits"))
killed = Actor.remote()
killed.__ray_ready__.remote().get()
crossfade.kill(killed)
told(killed)
Actor.remote().__ray_ready__.remote().get()
crossfade.shutdown()
"""

_WHY = {
    "ignored": "this program ignores SIGCHLD, so the system keeps no exit status of its children",
    "waited for": "somebody else has collected its exit status, by os.waitpid(-1, ...), say",
}


@pytest.mark.parametrize("how", _WHY)
def test_nobody_says_code_0_of_a_status_that_somebody_else_has_collected(how: str) -> None:
    ended = f"it ended (how is not known: {_WHY[how]})"
    exited, raised, exited_early, killed = output_of("-c", _PROGRAM, how).splitlines()
    assert exited == f"actor Actor0 is dead: {ended}"
    assert raised == "actor Actor1 could not be started: Actor1.__init__ on actor Actor1 raised ValueError: planted"
    assert exited_early == f"actor Actor2 is dead: {ended} before its constructor had returned"
    assert killed.startswith("actor Actor3 is dead: it was killed")
