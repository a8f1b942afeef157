"""What is known of the host's GPUs when a graph is compiled: what was measured, or at least how they are linked."""

from __future__ import annotations

from collections.abc import Mapping

from crossfade.api.session import Session
from crossfade.engines.machine import gpu_uuids, num_visible_gpus, visible_gpus
from crossfade.errors import Failure
from crossfade.topology import Topology, load_topology


def known_links(session: Session, gpus: Mapping[str, tuple[int, ...]]) -> tuple[Topology | None, dict[int, str]]:
    """The topology that a graph is compiled for, and the UUIDs of the GPUs by index, as far as they are known.

    Where ``crossfade topology`` has not run, an actor tells how the GPUs are linked, once in a session. It has started CUDA, which
    would take this process a second, and keep it from being forked.
    """
    if len({gpu for each in gpus.values() for gpu in each}) < 2:
        return None, {}
    measured = load_topology()
    if measured is not None:
        return measured, gpu_uuids([device.uuid for device in measured.devices], visible_gpus())
    if session.links is None and num_visible_gpus():
        call = session.engine.ask_topology(next(iter(gpus)))
        call.wait(None)
        told = call.result()
        session.links = Topology() if isinstance(told, Failure) else told
    if session.links is None:
        return None, {}
    return session.links, {index: device.uuid for index, device in enumerate(session.links.devices)}
