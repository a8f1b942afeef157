"""Sound plans as text, to be edited; and the validator's verdict, which must be that of a machine that tries all orders."""

from __future__ import annotations

from crossfade.plan.parse import parse_plan
from crossfade.plan.plan import Plan
from crossfade.plan.validate import find_fault
from tests.helpers.explore import explore

CHAIN = """
plan max_inflight=2 returns=value
input i0 = *
node n0 = A.make(i0) -> n0
node n1 = B.take(n0) -> n1
channel i0: driver -> A | shm depth=2 buffer_bytes=0
channel n0: A -> B | gloo depth=2 buffer_bytes=0
channel n1: B -> driver | shm depth=2 buffer_bytes=0
output n1
driver | write i0 | read n1 | free n1
A | read i0 | run n0 | send n0 @send | free i0
B | recv n0 @recv | run n1 | write n1 | free n0
"""
PAIR = """
plan max_inflight=2 returns=list
node n0 = A.make() -> n0
node n1 = B.make() -> n1
node n2 = A.take(n1) -> n2
node n3 = B.take(n0) -> n3
channel n0: A -> B | shm depth=2 buffer_bytes=0
channel n1: B -> A | shm depth=2 buffer_bytes=0
channel n2: A -> driver | shm depth=1 buffer_bytes=0
channel n3: B -> driver | shm depth=1 buffer_bytes=0
output n2
output n3
driver | read n2 | free n2 | read n3 | free n3
A | run n0 | write n0 | read n1 | run n2 | free n1 | write n2
B | run n1 | write n1 | read n0 | run n3 | free n0 | write n3
"""
QUEUE = """
plan max_inflight=2 returns=value
node n0 = A.make() -> n0
node n1 = A.make() -> n1
node n2 = B.take(n0, n1) -> n2
channel n0: A -> B | gloo depth=2 buffer_bytes=0
channel n1: A -> B | gloo depth=2 buffer_bytes=0
channel n2: B -> driver | shm depth=1 buffer_bytes=0
output n2
driver | read n2 | free n2
A | run n0 | send n0 @send | run n1 | send n1 @send
B | recv n0 @recv | recv n1 @recv | run n2 | free n0 | free n1 | write n2
"""
TOGETHER = """
plan max_inflight=2 returns=list
input i0 = *
node n0 = A.make(i0) -> n0
node n1 = B.make(i0) -> n1
node n2 = A.work(i0) -> n2
collective c0 = allreduce(sum) over gloo: A(n0) -> c0.0; B(n1) -> c0.1
collective c1 = allgather() over gloo: B(n1) -> c1.0; A(n0) -> c1.1
channel i0: driver -> A, B | shm depth=2 buffer_bytes=0
channel c0.0: A -> driver | shm depth=2 buffer_bytes=0
channel c1.0: B -> driver | shm depth=2 buffer_bytes=0
output c0.0
output c1.0
driver | write i0 | read c0.0 | free c0.0 | read c1.0 | free c1.0
A | read i0 | run n0 | coll c0 @coll | run n2 | free i0 | write c0.0 | coll c1
B | read i0 | run n1 | free i0 | coll c0 | coll c1 @coll | free n1 | write c1.0
"""


def edited(text: str, *edits: tuple[str, str]) -> Plan:
    for old, new in edits:
        assert text.count(old) == 1, f"{old!r} is there {text.count(old)} times"
        text = text.replace(old, new)
    return parse_plan(text)


def verdict(plan: Plan) -> tuple[str, str] | None:
    """(invariant, 'actor: step') of the fault, or None; what the machine does must agree."""
    fault = find_fault(plan)
    explored = explore(plan)
    assert (fault is None) == (explored.verdict == "ok"), f"{fault} but {explored}"
    if fault is None:
        return None
    assert fault.index is not None
    return fault.invariant, f"{fault.actor}: {plan.programs[fault.actor][fault.index]}"
