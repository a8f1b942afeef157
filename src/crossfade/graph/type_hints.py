"""Ray's older spelling of a node's wishes: ``node.with_type_hint(TorchTensorType(transport="gloo"))``."""

from __future__ import annotations

from typing import Any

from crossfade.graph.communicators import Communicator
from crossfade.graph.movement import RAYS_CPU, promised
from crossfade.hints import nearest
from crossfade.types import Transport

_NAMES = ("transport", "device", "_static_shape", "_direct_return", "static_shape", "direct_return")
_ALL = f"it takes {', '.join(_NAMES[:4])}"
_INSTEAD = dict.fromkeys(
    ("_shape", "_dtype", "shape", "dtype"),
    "leave it out: shape and dtype travel with each tensor; _static_shape=True promises that they stay the same",
)


class TorchTensorType:
    """Says how the tensors that a node gives should move. It has the same arguments as ``Node.with_tensor_transport``.

    ``AUTO``, ``ACCELERATOR``, ``NCCL`` (Ray's older name for that) and ``CPU`` are transports as Ray writes them.

    Attributes:
        transport: the name of the transport, or a `Communicator`.
        device: where readers want the tensors.
        static_shape: every execution's tensors have the same shapes and dtypes.
        direct_return: the value is a tensor itself and does not only contain tensors.

    Raises:
        TypeError: an unknown argument, or a flag that is no bool.
    """

    AUTO = Transport.AUTO.value
    ACCELERATOR = Transport.ACCELERATOR.value
    NCCL = Transport.NCCL.value  # the bare string, which means ACCELERATOR
    CPU = RAYS_CPU

    def __init__(
        self,
        transport: str | Communicator = "auto",
        device: str = "default",
        _static_shape: bool = False,
        _direct_return: bool = False,
        *,
        static_shape: bool | None = None,
        direct_return: bool | None = None,
        **unknown: Any,
    ) -> None:
        for name in unknown:
            raise TypeError(
                f"unknown argument of TorchTensorType {name!r}\nhint: {_INSTEAD.get(name) or nearest(name, _NAMES, _ALL)}"
            )
        self.transport = transport
        self.device = device
        self.static_shape = promised("static_shape", static_shape, _static_shape)
        self.direct_return = promised("direct_return", direct_return, _direct_return)

    def __repr__(self) -> str:
        return f"TorchTensorType(transport={self.transport!r})"
