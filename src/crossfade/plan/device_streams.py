"""On which streams of GPUs a channel's values move: one table for the plan's text, for predicted timelines and for measured ones.

=================================  ==========================  ==============================
a value                            on its writer's GPU         on its reader's GPU
=================================  ==========================  ==============================
``copy``, between GPUs             ``push``                    ``compute``, which waits for it
the same, posted by its reader     ``push``                    ``push``
``staged``, between GPUs           ``up``                      ``down``
``nccl``, between GPUs             ``nccl``                    ``nccl``
``shm``, ``tcp``, from a GPU       ``up``
``shm``, ``tcp``, wanted on a GPU                              ``down``
=================================  ==========================  ==============================

A collective of GPU actors, by ``copy`` or ``nccl``, is one span on ``coll`` of each of them, whatever it does inside: copies that
leave and come, waits for the other parties, and additions on a stream of their own, which it forks to and joins again.

What the driver passes stays on the CPU, and what it gets is taken there: at its own end nothing moves on a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from crossfade.plan.actions import COLL_STREAM
from crossfade.types import Transport


class DeviceStream(StrEnum):
    """What a stream of a GPU is for: the name of a span's stream."""

    COMPUTE = "compute"
    """Kernels of methods."""
    PUSH = "push"
    """Copies to other GPUs."""
    UP = "up"
    """Copies to the host."""
    DOWN = "down"
    """Copies from the host."""
    NCCL = "nccl"
    """NCCL's transfers, a stream for each link."""
    COLL = COLL_STREAM
    """Collectives, a stream for each set of actors and way to move."""


_OUT: Mapping[Transport, DeviceStream] = {
    Transport.COPY: DeviceStream.PUSH,
    Transport.STAGED: DeviceStream.UP,
    Transport.NCCL: DeviceStream.NCCL,
    Transport.SHM: DeviceStream.UP,
    Transport.TCP: DeviceStream.UP,
}
_IN: Mapping[Transport, DeviceStream] = {
    Transport.COPY: DeviceStream.COMPUTE,
    Transport.STAGED: DeviceStream.DOWN,
    Transport.NCCL: DeviceStream.NCCL,
    Transport.SHM: DeviceStream.DOWN,
    Transport.TCP: DeviceStream.DOWN,
}


def stream_out(transport: Transport) -> DeviceStream:
    """On which stream of its writer's GPU a value leaves. Raises a KeyError for transports that take nothing from GPUs."""
    return _OUT[transport]


def stream_in(transport: Transport, *, is_posted: bool = False) -> DeviceStream:
    """On which stream of its reader's GPU a value arrives; ``compute`` if it is only waited for. Raises a KeyError for transports
    that bring nothing to GPUs.
    """
    arrives_on = _IN[transport]
    return _OUT[transport] if is_posted and arrives_on is DeviceStream.COMPUTE else arrives_on
