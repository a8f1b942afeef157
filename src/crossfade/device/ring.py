"""A ring of slots in the receiver's device memory, filled by the sender's copy engine (docs/decisions/0008-device-signals.md).

::

    sender's copy stream     (wait free[k] >= n - 1) | copy into slot k | set full[k] = n
    receiver's stream                                  wait full[k] >= n | use slot k ... | set free[k] = n

Here n counts the uses of slot k, on both sides alike. Both hosts only enqueue, and run ahead of their devices. What a stream
waits for was enqueued before (PL-5): the sender waits for ``free[k]`` after the record `FreeEnqueued` came back, the receiver for
``full[k]`` after the record `Enqueued` arrived.

A value that arrived is a *lease* on its slot. When the lease ends, ``free`` is enqueued behind the last use, and the slot's
credit goes back. Slots are taken in the order in which they became free, so a kept value holds up nobody but itself.

A value that is too long for a slot makes the receiver offer larger ones (a new *generation*); the old ones are given back when the
sender has closed them, no lease is on them and every ``free`` has happened. A receiver may begin without slots; and where it has no
memory for them, the sender's next try raises, and the ring continues with shorter values.

When all slots but one are leased, or kept values hold all generations but two, `Lease.is_short` says that a value should
be copied out at once. Who does so can keep as many values as it likes, of any lengths, and the ring never stops.
"""

from __future__ import annotations

from dataclasses import dataclass

from crossfade.device.records import Offer
from crossfade.device.signals import Counter, SignalBoard

NUM_GROUPS = 8  # generations of slots that can exist at once: each has signals of its own on the board


def num_signals(num_slots: int) -> int:
    """How long the board of a ring is."""
    return 2 * num_slots * NUM_GROUPS


@dataclass(frozen=True, slots=True)
class RingStatistics:
    """Counters of one end."""

    num_values: int
    num_bytes: int
    num_slots: int  # this and the next: the slots of the present generation
    slot_bytes: int
    num_leased: int  # slots that values hold now (receiver)
    num_credits: int  # slots that may be filled now (sender)
    num_generations: int  # how often slots were offered


def ring_signals(board: SignalBoard, offer: Offer, label: str) -> tuple[list[Counter], list[Counter]]:
    """The counters ``full`` and ``free`` of a generation's slots."""
    first = 2 * offer.group * offer.num_slots
    full = [board.counter(first + k, f"full[{k}] of {label}") for k in range(offer.num_slots)]
    free = [board.counter(first + offer.num_slots + k, f"free[{k}] of {label}") for k in range(offer.num_slots)]
    return full, free
