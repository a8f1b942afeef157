"""How a value is to move, in the user's words and in Ray's."""

from __future__ import annotations

from crossfade.graph.communicators import Communicator, CPUCommunicator
from crossfade.hints import check_flag
from crossfade.types import TargetDevice, Transport

RAYS_CPU = "cpu"
"""``TorchTensorType.CPU``."""

_DEVICES = {
    "default": TargetDevice.DEFAULT,
    "cpu": TargetDevice.CPU,
    "cuda": TargetDevice.CUDA,
    "gpu": TargetDevice.CUDA,
}
"""Devices as users write them."""


def asked_transport(transport: str | Communicator, by_cpu: Transport = Transport.SHM) -> str | Communicator:
    """Returns the name of the transport that the user wants, or the communicator itself.

    The bare string ``nccl`` is Ray's name of any transport for device tensors. ``cpu`` stands for ``by_cpu``, and a
    `CPUCommunicator` for gloo.
    """
    if isinstance(transport, CPUCommunicator):
        return str(Transport.GLOO)
    if isinstance(transport, Communicator):
        return transport
    if isinstance(transport, Transport):
        return str(transport)
    return str({"nccl": Transport.ACCELERATOR, RAYS_CPU: by_cpu}.get(transport, transport))


def promised(name: str, ours: bool | None, rays: bool) -> bool:
    """A promise in our spelling, or where that is left out in Ray's, with an underscore before the name. It is a bool."""
    is_rays = check_flag(f"_{name}", rays)
    return is_rays if ours is None else check_flag(name, ours)


def target_device_of(device: str) -> TargetDevice:
    """Where readers want a value's tensors. Raises a ValueError if there is no such device."""
    if device not in tuple(_DEVICES):
        raise ValueError(f"there is no device {device!r}\nhint: it is one of {', '.join(_DEVICES)}")
    return _DEVICES[device]
