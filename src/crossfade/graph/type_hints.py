"""Ray's older spelling of a node's wishes: ``node.with_type_hint(TorchTensorType(transport="gloo"))``."""

from __future__ import annotations

__all__ = ["TorchTensorType"]


class TorchTensorType:
    """Says how the tensors that a node gives should move. It has the same arguments as ``Node.with_tensor_transport``.

    Attributes:
        transport: the name of the transport.
        device: where readers want the tensors.
        static_shape: every execution's tensors have the same shapes and dtypes.
        direct_return: the value is a tensor itself and does not only contain tensors.
    """

    def __init__(
        self,
        transport: str = "auto",
        device: str = "default",
        _static_shape: bool = False,
        _direct_return: bool = False,
        *,
        static_shape: bool | None = None,
        direct_return: bool | None = None,
    ) -> None:
        self.transport = transport
        self.device = device
        self.static_shape = _static_shape if static_shape is None else static_shape
        self.direct_return = _direct_return if direct_return is None else direct_return

    def __repr__(self) -> str:
        return f"TorchTensorType(transport={self.transport!r})"
