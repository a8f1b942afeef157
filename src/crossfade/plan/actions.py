"""Actions: the steps that one actor takes for one execution of a graph, and the notation for them.

=====================  ==============================================================================================
``run n3``             call the method of node n3; its inputs must be in this actor's registers
``write n3``           put the value of channel n3 into its ring (memory that the readers share; waits for a free slot); over
                       ``copy``, enqueue the copies of its device tensors as well, which the GPU's stream ``push`` carries out
``read n3``            take the next value of channel n3 from its ring (waits for it); over ``copy``, make the GPU's stream
                       ``compute`` wait for its device tensors
``send n3``            give the value of channel n3 to a transport that moves bytes by itself (gloo, staged, nccl)
``recv n3``            let such a transport bring the next value; its first user waits for it
``coll c0``            do collective c0 together with its other parties; its inputs must be in this actor's registers
``free n3``            release value n3: its register is emptied and, if it came through a channel, its slot released
=====================  ==============================================================================================

``@send``, ``@recv``, ``@coll`` after the name is the stream: an action on ``main`` (not written) is finished before the
next action starts, an action on another stream is only started, and who uses a value of it first waits for it. ``+k`` is
the number of executions by which the action runs ahead: in the round of execution e, ``recv n3 @recv +1`` starts the
receive of execution e + 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

MAIN = "main"
SEND_STREAM = "send"
RECV_STREAM = "recv"
COLL_STREAM = "coll"


class Verb(StrEnum):
    """What an action does; the module's table says what each means."""

    READ = "read"
    RECV = "recv"
    RUN = "run"
    WRITE = "write"
    SEND = "send"
    COLL = "coll"
    FREE = "free"


# Sets of verbs for loops over all actions of a plan: Python 3.11 takes 0.1 us to find one member of an enumeration by its name.
PUTS = frozenset({Verb.WRITE, Verb.SEND})
TAKES = frozenset({Verb.READ, Verb.RECV})
CALLS = frozenset({Verb.RUN, Verb.COLL})


@dataclass(frozen=True, slots=True)
class Action:
    """One step of one actor."""

    verb: Verb
    # a node id for ``run``, a channel id for ``read``, ``write``, ``send`` and ``recv``, a collective id for ``coll``, a value id
    # for ``free``.
    target: str
    stream: str = MAIN  # where it runs; see the module's text
    ahead: int = 0  # by how many executions it runs ahead (``recv`` only)

    def __str__(self) -> str:
        stream = "" if self.stream == MAIN else f" @{self.stream}"
        ahead = f" +{self.ahead}" if self.ahead else ""
        return f"{self.verb} {self.target}{stream}{ahead}"
