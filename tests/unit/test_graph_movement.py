"""How values are to move, as nodes and type hints say it: transports, devices, promises."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from crossfade.graph.nodes import InputNode
from crossfade.graph.type_hints import TorchTensorType
from crossfade.types import TargetDevice, Transport
from tests.helpers.bound_nodes import OTHER, call


def test_transports_are_set_on_the_node_itself() -> None:
    node = call()
    assert (node._transport, node._static_shape, node._direct_return) == ("auto", False, False)
    assert node.with_tensor_transport("gloo", "cpu", True, True) is node
    assert (node._transport, node._static_shape, node._direct_return) == ("gloo", True, True)
    assert node.with_tensor_transport(Transport.SHM, _static_shape=True, static_shape=False)._static_shape is False
    assert (node._transport, type(node._transport)) == ("shm", str)
    assert node.with_tensor_transport(direct_return=True)._transport == "auto"
    assert node._direct_return


def test_rays_nccl_is_any_device_transport_and_the_member_is_nccl() -> None:
    node = call()
    assert node.with_tensor_transport("nccl")._transport == "accelerator"
    assert node.with_tensor_transport(transport=Transport.NCCL)._transport == "nccl"
    assert type(node._transport) is str
    assert node.with_type_hint(TorchTensorType("nccl", device="gpu"))._transport == "accelerator"
    assert node._target_device == "cuda"
    assert node.with_type_hint(TorchTensorType(Transport.NCCL))._transport == "nccl"
    assert node._target_device == "default"


def test_a_reader_may_have_a_device_of_its_own() -> None:
    node = call().with_tensor_transport(device="cuda").with_tensor_transport("shm", device="cpu", reader=OTHER)
    assert (node._target_device, node._target_device_to) == (TargetDevice.CUDA, {"Worker1": TargetDevice.CPU})
    assert node.with_tensor_transport(device="cpu")._target_device_to == {}


def test_type_hints_are_another_spelling() -> None:
    node = call()
    hint = TorchTensorType(transport="gloo", _static_shape=True, direct_return=True)
    assert node.with_type_hint(hint) is node
    assert (node._transport, node._static_shape, node._direct_return) == ("gloo", True, True)
    assert node.with_type_hint(SimpleNamespace(transport="shm"))._transport == "shm"
    assert node.with_type_hint(TorchTensorType("gloo", static_shape=False))._static_shape is False
    assert repr(hint) == "TorchTensorType(transport='gloo')"
    with pytest.raises(TypeError, match="hint:"):
        node.with_type_hint(3)


def test_type_hints_have_rays_constants_and_refuse_what_is_older() -> None:
    node: Any = call(InputNode())
    for transport, ours in (
        (TorchTensorType.AUTO, "auto"),
        (TorchTensorType.ACCELERATOR, "accelerator"),
        (TorchTensorType.NCCL, "accelerator"),
        (TorchTensorType.CPU, "shm"),
    ):
        assert node.with_type_hint(TorchTensorType(transport, TargetDevice.GPU))._transport == ours
        assert node._target_device is TargetDevice.CUDA
    for older in ({"_shape": (2,)}, {"_dtype": "float16", "transport": "nccl"}):
        with pytest.raises(
            TypeError, match=rf"TorchTensorType '{next(iter(older))}'\nhint: leave it out: .*_static_shape=True"
        ):
            TorchTensorType(**older)
    with pytest.raises(
        TypeError, match=r"TorchTensorType 'transprt'\nhint: did you mean 'transport'\? it takes transport, "
    ):
        TorchTensorType(transprt="nccl")


def test_wishes_that_cannot_be_met_are_refused() -> None:
    node = call()
    with pytest.raises(ValueError, match="hint: it is one of default, cpu, cuda, gpu"):
        node.with_tensor_transport(device="tpu")
    with pytest.raises(TypeError, match="hint:"):
        node.with_tensor_transport(cast(Any, object()))
    assert node._transport == "auto"


@pytest.mark.parametrize("flag", ["_static_shape", "_direct_return", "static_shape", "direct_return"])
def test_promises_are_true_or_false(flag: str) -> None:
    node: Any = call(InputNode())
    with pytest.raises(TypeError, match=f"^{flag} is 1\nhint: it is True or False$"):
        node.with_tensor_transport("shm", **{flag: 1})
    with pytest.raises(TypeError, match=rf"^{flag} is \(2, 2\)\nhint: it is True or False$"):
        TorchTensorType("shm", **cast(Any, {flag: (2, 2)}))
    assert node._transport == "auto"
