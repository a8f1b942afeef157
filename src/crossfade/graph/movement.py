"""How a value is to move, in the user's words and in Ray's."""

from __future__ import annotations

from crossfade.hints import check_flag
from crossfade.types import TargetDevice, Transport

__all__ = ["RAYS_CPU", "promised", "target_device_of", "transport_name"]

RAYS_CPU = "cpu"
"""``TorchTensorType.CPU``: by shared memory, and for collectives gloo."""

_DEVICES = {
    "default": TargetDevice.DEFAULT,
    "cpu": TargetDevice.CPU,
    "cuda": TargetDevice.CUDA,
    "gpu": TargetDevice.CUDA,
}
"""Devices as users write them."""


def transport_name(transport: str) -> str:
    """The name of what is asked for; the bare string ``nccl`` is Ray's name of any transport for device tensors."""
    is_rays_name = transport == Transport.NCCL and not isinstance(transport, Transport)
    return str(Transport.ACCELERATOR if is_rays_name else transport)


def promised(name: str, ours: bool | None, rays: bool) -> bool:
    """A promise in our spelling, or where that is left out in Ray's, with an underscore before the name.

    Raises:
        TypeError: one of them is no bool.
    """
    check_flag(f"_{name}", rays)
    if ours is None:
        return rays
    check_flag(name, ours)
    return ours


def target_device_of(device: str) -> TargetDevice:
    """Where readers want a value's tensors.

    Raises:
        ValueError: there is no such device.
    """
    if device not in tuple(_DEVICES):
        raise ValueError(f"there is no device {device!r}\nhint: it is one of {', '.join(_DEVICES)}")
    return _DEVICES[device]
