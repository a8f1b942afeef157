"""What nodes say: how values are to move, and whether the arguments of methods fit."""

from __future__ import annotations

import functools
import sys
import timeit
from types import SimpleNamespace
from typing import Any, cast

import pytest

import crossfade
from crossfade.errors import GraphError
from crossfade.graph.actors import CONSTRUCTOR, ActorInfo, Signatures
from crossfade.graph.nodes import InputNode, bind
from crossfade.graph.type_hints import TorchTensorType
from crossfade.types import TargetDevice, Transport
from tests.helpers.bound_nodes import OTHER, call


def passing(function: Any) -> Any:
    @functools.wraps(function)
    def outside(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return outside


def giving_three(function: Any) -> Any:
    @functools.wraps(function)
    def outside(self: Any, x: Any) -> Any:
        return function(self, x, 3)

    return outside


class Awkward:
    def __repr__(self) -> str:
        raise RuntimeError("never to be called")


AWKWARD = Awkward()


class Base:
    def __init__(self, rank: int, size: int = 1) -> None:
        pass

    def inherited(self, x: Any) -> None: ...


class Methods(Base):
    def none(self) -> None: ...
    def one(self, x: Any, factor: float = 2.0) -> None: ...
    def by_position(self, x: Any, /, y: Any = None) -> None: ...
    def by_name(self, x: Any, *, scale: Any, shift: Any = AWKWARD) -> None: ...
    def anything(self, *args: Any, **kwargs: Any) -> None: ...
    def some(self, x: Any, *rest: Any) -> None: ...
    def __call__(self, x: Any) -> None: ...

    @staticmethod
    def static(x: Any) -> None: ...

    @classmethod
    def of_class(cls, x: Any) -> None: ...

    @passing
    def wrapped(self, x: Any) -> None: ...

    @giving_three
    def changed(self, x: Any, three: int) -> None: ...

    @crossfade.method(num_returns=2)
    def two(self, x: Any) -> None: ...

    partial = functools.partialmethod(one, 1)
    builtin = dict.get
    kind = Awkward
    without_self = lambda: None  # noqa: E731


NAMES = [name for name in dir(Methods) if not name.startswith("__") or name == "__call__"]
INFO = ActorInfo("M0", "Methods", "s", dict.fromkeys(NAMES, 1), signatures=Signatures(Methods))


@pytest.mark.parametrize(
    ("method", "args", "kwargs"),
    [
        ("none", (), {}),
        ("one", (1,), {}),
        ("one", (1, 2), {}),
        ("one", (1,), {"factor": 3}),
        ("one", (), {"factor": 3, "x": 1}),
        ("by_position", (1, 2), {}),
        ("by_position", (1,), {"y": 2}),
        ("by_name", (1,), {"scale": 2}),
        ("by_name", (), {"scale": 2, "x": 1, "shift": 3}),
        ("anything", (1, 2, 3), {"k": 4}),
        ("some", (1, 2, 3), {}),
        ("__call__", (1,), {}),
        ("inherited", (1,), {}),
        ("static", (1,), {}),
        ("of_class", (1,), {}),
        ("wrapped", (1,), {}),
        ("changed", (1,), {}),
        ("two", (1,), {}),
        ("partial", (), {}),
        ("builtin", (1, 2, 3, 4, 5), {"k": 6}),
        ("kind", (1, 2, 3, 4, 5), {}),
        ("without_self", (), {}),
    ],
)
def test_arguments_that_fit(method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    assert bind(INFO, method, args, kwargs)
    inp = InputNode()
    assert bind(INFO, method, tuple(inp for _ in args), {name: [inp] for name in kwargs})


@pytest.mark.parametrize(
    ("method", "args", "kwargs", "says"),
    [
        ("none", (1,), {}, "too many positional arguments\nhint: it is M0.none()"),
        ("one", (), {}, "missing a required argument: 'x'\nhint: it is M0.one(x, factor=2.0)"),
        ("one", (1, 2, 3), {}, "too many positional arguments\n"),
        ("one", (1,), {"faktor": 3}, "got an unexpected keyword argument 'faktor'\n"),
        ("one", (1,), {"x": 3}, "multiple values for argument 'x'\n"),
        ("by_position", (), {"x": 1}, "'x'"),
        ("by_name", (1,), {}, "'scale'\nhint: it is M0.by_name(x, *, scale, shift=<Awkward>)"),
        ("by_name", (1, 2), {}, "too many positional arguments\n"),
        ("some", (), {}, "'x'\nhint: it is M0.some(x, *rest)"),
        ("__call__", (), {}, "'x'\nhint: it is M0.__call__(x)"),
        ("inherited", (1, 2), {}, "hint: it is M0.inherited(x)"),
        ("static", (), {}, "hint: it is M0.static(x)"),
        ("of_class", (1, 2), {}, "hint: it is M0.of_class(x)"),
        ("wrapped", (1, 2), {}, "hint: it is M0.wrapped(x)"),
        ("changed", (1, 2), {}, "hint: it is M0.changed(x)"),
        ("two", (), {}, "hint: it is M0.two(x)"),
    ],
)
def test_arguments_that_do_not_fit(method: str, args: tuple[Any, ...], kwargs: dict[str, Any], says: str) -> None:
    with pytest.raises(TypeError) as caught:
        bind(INFO, method, args, kwargs)
    assert str(caught.value).startswith(f"the arguments do not fit M0.{method}: ")
    assert says in str(caught.value)


@pytest.mark.parametrize(("cls", "fits", "wrong"), [(Base, (1, 2), ()), (Awkward, (), (1,)), (dict, (1, 2, 3), None)])
def test_arguments_of_constructors(cls: type, fits: tuple[Any, ...], wrong: tuple[Any, ...] | None) -> None:
    takes = Signatures(cls).of(CONSTRUCTOR)
    assert (takes is None) == (wrong is None)
    if takes is not None and wrong is not None:
        takes.check(cls.__name__, fits, {})
        with pytest.raises(TypeError, match=rf"hint: it is {cls.__name__}\("):
            takes.check(cls.__name__, wrong, {})


def test_each_signature_is_looked_up_once_and_calls_are_hardly_slower() -> None:
    takes = Signatures(Methods)
    assert takes.of("one") is takes.of("one")
    assert takes.of("builtin") is takes.of("no such thing") is None
    each_us = min(timeit.repeat(lambda: INFO.check_arguments("one", (1,), {}), number=1_000, repeat=20)) * 1e3
    assert each_us < 20  # 0.3 us on a machine that does nothing else


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


def test_a_node_of_rays_is_no_constant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray.dag", SimpleNamespace(DAGNode=Foreign))
    with pytest.raises(GraphError, match=r"Foreign of ray.dag among the arguments of bind\nhint: import it from"):
        call([Foreign()])


class Foreign:
    """As Ray's InputNode, which somebody has imported from there."""
