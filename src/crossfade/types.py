"""Words that every room shares: names of things, tensor shapes, transports."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

__all__ = ["DRIVER", "TensorSpec", "Transport"]

DRIVER = "driver"
"""The name of the driving process in plans; no actor may have it."""


class Transport(StrEnum):
    """How a channel moves bytes.

    ``auto`` is a request, the others are what a plan shows.
    """

    AUTO = "auto"
    SHM = "shm"
    """A ring in shared memory, for processes of one host."""
    GLOO = "gloo"
    """torch.distributed's gloo, for CPU tensors; moves bytes in the background of both sides."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """The shape and dtype of a tensor, without its values.

    Attributes:
        shape: the length of each dim.
        dtype: torch's or numpy's name of the element type, such as ``"bfloat16"``.
    """

    shape: tuple[int, ...]
    dtype: str
