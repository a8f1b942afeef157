"""What travels outside of edges, on both engines: arguments of calls and constructors, results, what is bound to methods."""

from __future__ import annotations

import sys
import threading
from dataclasses import dataclass
from typing import Any

import pytest

import crossfade
from crossfade.channels.values.codec import dump_in_band, hint_for_pickling
from crossfade.host.memory import PAGE_BYTES
from tests.helpers.sessions import TORCH, on_each_engine

LOCK = threading.Lock()


engine = on_each_engine(preload=TORCH)


class Keeper:
    def __init__(self, *given: Any) -> None:
        self._given = given

    def given(self) -> Any:
        return self._given

    def same(self, *values: Any) -> Any:
        return values

    def one(self, value: Any) -> Any:
        return value

    def sulk(self, does: bool) -> Any:
        return Sulky() if does else None

    def facts(self, _: Any, *values: Any) -> Any:
        return [_facts(value) for value in values]

    def given_facts(self) -> Any:
        return [_facts(value) for value in self._given]

    def is_one(self, _: Any, first: Any, second: Any) -> bool:
        return first is second and first.data_ptr() == second.data_ptr()

    def changed(self, _: Any, tensor: Any) -> Any:
        tensor += 1
        return tensor

    def resized(self, _: Any, *tensors: Any) -> Any:
        """How many elements there are once each has five more. (Without a gradient, which forbids that.)"""
        found = [tensor.detach() if tensor.requires_grad else tensor for tensor in tensors]
        return [tensor.resize_(tensor.numel() + 5).numel() for tensor in found]

    def trained(self, module: Any = None) -> Any:
        """Whether weights are tied, are parameters, and change when they are trained."""
        first, second = module or self._given[0]
        before = first.weight.detach().clone()
        second(first(before)).sum().backward()
        with_gradients = [p.grad is not None for p in (*first.parameters(), *second.parameters())]
        first.weight.data -= first.weight.grad
        return first.weight is second.weight, all(with_gradients), not (first.weight == before).all().item()

    def pair(self, first: Any, second: Any) -> Any:
        return first, second


class Locker:
    """Its method uses what does not leave its process."""

    def lock(self) -> None:
        with LOCK:
            pass


@dataclass(slots=True)
class Slotted:
    x: int


class Stated:
    """Has slots, and says itself what it is made of."""

    __slots__ = ("x",)

    def __init__(self, x: int) -> None:
        self.x = x

    def __getstate__(self) -> Any:
        return self.x

    def __setstate__(self, state: Any) -> None:
        self.x = state


class Maker:
    def slotted(self, x: int) -> Slotted:
        return Slotted(x)

    def stated(self, x: int) -> Stated:
        return Stated(x)


def _facts(tensor: Any) -> tuple[Any, ...]:
    """What ways to carry it may differ in."""
    torch = sys.modules["torch"]
    raw = tensor.detach().contiguous().view(-1).view(torch.uint8).tolist() if tensor.numel() else []
    return (
        type(tensor).__name__,
        str(tensor.dtype),
        tuple(tensor.shape),
        tensor.stride(),
        tensor.requires_grad,
        tensor.untyped_storage().nbytes() == tensor.nbytes,
        raw,
    )


def _slices() -> list[Any]:
    """Parts of longer tensors, whose other parts stay."""
    torch: Any = pytest.importorskip("torch")
    large = torch.arange(10_000.0)
    return [large[:1], large[500:505].to(torch.float8_e4m3fn)[1:3], large.reshape(100, 100)[:3, :2].T, large[::2]]


def _tensors() -> list[Any]:
    """What arrives as it is, strides included."""
    torch: Any = pytest.importorskip("torch")
    names = "bool int8 bfloat16 float32 float64 complex64 uint16 uint32 uint64 float8_e4m3fn float8_e5m2"
    image = torch.arange(24.0).reshape(1, 2, 3, 4).to(memory_format=torch.channels_last)
    return [
        *((torch.arange(6) % 2).to(getattr(torch, name)) for name in names.split()),
        image,
        image.to(torch.uint16),
        torch.arange(6.0).reshape(2, 3).T,
        torch.ones(1).expand(2, 3),
        torch.empty(0, 3),
        torch.tensor(5),
        torch.ones(2, requires_grad=True) * 2,
        torch.nn.Parameter(torch.ones(3)),
        torch.nn.Parameter(torch.ones(3), requires_grad=False),
    ]


# Tensors


def test_tensors_of_every_kind_arrive_in_one_way(engine: str) -> None:
    slices = _slices()
    tensors = [*_tensors(), *slices]
    wanted = [_facts(tensor) for tensor in (*_tensors(), *(each.contiguous().clone() for each in slices))]
    keeper = crossfade.remote(Keeper).remote(*tensors)
    assert keeper.given_facts.remote().get() == wanted
    assert keeper.facts.remote(None, *tensors).get() == wanted
    assert [_facts(tensor) for tensor in keeper.same.remote(*tensors).get()] == wanted
    graph = keeper.facts.bind(crossfade.InputNode(), *tensors).compile()
    assert graph.execute(None).get() == wanted


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")  # of torch 2.11, which is asked not to check
def test_what_plain_tensors_are_not_is_kept(engine: str) -> None:
    torch: Any = pytest.importorskip("torch")
    keeper = crossfade.remote(Keeper).remote()
    noted = torch.ones(3, dtype=torch.uint16)
    noted.scale = 2.5
    meta = torch.empty(3, device="meta")
    came, sparse, shape = keeper.same.remote(noted, torch.eye(3).to_sparse(), meta).get()
    assert (came.scale, came.dtype) == (2.5, torch.uint16)
    assert sparse.layout is torch.sparse_coo
    assert (shape.device.type, shape.shape) == ("meta", (3,))


def test_tensors_can_be_resized_where_they_arrive(engine: str) -> None:
    pytest.importorskip("torch")
    keeper = crossfade.remote(Keeper).remote()
    tensors = [*_tensors(), *_slices()]
    wanted = [tensor.numel() + 5 for tensor in tensors]
    assert keeper.resized.remote(None, *tensors).get() == wanted
    graph = keeper.resized.bind(crossfade.InputNode(), *tensors).compile()
    assert graph.execute(None).get() == wanted


def test_an_expanded_tensor_stays_small(engine: str) -> None:
    torch: Any = pytest.importorskip("torch")
    assert len(dump_in_band(torch.zeros(1).expand(1000, 1000))) < 2000
    keeper = crossfade.remote(Keeper).remote()
    came = keeper.one.remote(torch.ones(1).expand(1000, 1000)).get()
    assert (came.stride(), came.sum().item()) == ((0, 0), 1e6)


def test_modules_can_be_trained_where_they_arrive_and_stay_tied(engine: str) -> None:
    torch: Any = pytest.importorskip("torch")
    module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    module[1].weight = module[0].weight
    keeper = crossfade.remote(Keeper).remote(module)
    assert keeper.trained.remote().get() == (True, True, True)
    assert keeper.trained.remote(module).get() == (True, True, True)
    graph = keeper.facts.bind(crossfade.InputNode(), module[0].weight, module[1].weight).compile()
    first, second = graph.execute(None).get()
    assert first == second
    assert first[0] == "Parameter"
    back = keeper.one.remote(module).get()
    assert back[0].weight is back[1].weight


def test_a_tensor_that_is_bound_twice_is_one_and_may_be_written(engine: str) -> None:
    torch: Any = pytest.importorskip("torch")
    tensor = torch.zeros(3)
    keeper = crossfade.remote(Keeper).remote()
    with crossfade.InputNode() as inp:
        nodes = [keeper.is_one.bind(inp, tensor, tensor), keeper.changed.bind(inp, tensor)]
        graph = crossfade.MultiOutputNode(nodes).compile()
    is_one, changed = crossfade.get(graph.execute(None))
    assert is_one
    assert changed.tolist() == [1, 1, 1]
    assert keeper.changed.remote(None, tensor).get().tolist() == [1, 1, 1]
    assert tensor.tolist() == [0, 0, 0]


# What cannot be pickled


@dataclass(frozen=True)
class Frozen(TypeError):
    """An error that takes no notes, and has no words."""

    x: int = 0

    def __str__(self) -> str:
        raise RuntimeError("no words")


class Sulky:
    def __reduce__(self) -> Any:
        raise Frozen(1)


def test_an_error_of_pickling_without_words_is_like_any_other(engine: str) -> None:
    keeper = crossfade.remote(Keeper).remote()
    with crossfade.InputNode() as inp:
        graph = keeper.pair.bind(inp.x, inp.y).compile()
        sulky = keeper.sulk.bind(inp.x).compile()
    for _ in range(2):
        with pytest.raises(crossfade.TaskError):
            sulky.execute(x=True).get()
        assert sulky.execute(x=False).get() is None
        with pytest.raises(Frozen):
            graph.execute(x=Sulky(), y=1)
        with pytest.raises(crossfade.TaskError):
            graph.execute(x=1, y=Sulky()).get()
        assert graph.execute(x=1, y=2).get() == (1, 2)
    with pytest.raises(Frozen):
        keeper.one.remote(Sulky())


@pytest.mark.parametrize("error", [RuntimeError("nope"), TypeError("odd"), AttributeError("x")], ids=repr)
def test_the_hint_about_pickling_is_for_what_cannot_be_pickled(error: Exception) -> None:
    assert hint_for_pickling(error) is None
    assert "locks" in str(hint_for_pickling(TypeError("cannot pickle '_thread.lock' object")))


def _notes(error: BaseException) -> str:
    return "\n".join(getattr(error, "__notes__", ()))


def test_an_error_names_what_cannot_be_pickled(engine: str) -> None:
    keeper = crossfade.remote(Keeper).remote()
    name = repr(keeper)[len("ActorHandle(") : -1]
    with pytest.raises(TypeError, match="cannot pickle") as call:
        keeper.same.remote(1, LOCK)
    assert f"argument 1 of {name}.same cannot be pickled\nhint: " in _notes(call.value)
    with pytest.raises(TypeError, match="cannot pickle") as named:
        keeper.one.remote(value={"bad": LOCK})
    assert f"argument 'value' of {name}.one cannot be pickled\nhint: " in _notes(named.value)
    with pytest.raises(TypeError, match="cannot pickle") as made:
        crossfade.remote(Keeper).remote(LOCK)
    assert "argument 0 of the constructor of Keeper cannot be pickled\nhint: " in _notes(made.value)
    with pytest.raises(TypeError, match="cannot pickle") as bound:
        keeper.same.bind(0, {"bad": LOCK}).compile()
    assert f"argument 1 of {name}.same (node n0) cannot be pickled\nhint: " in _notes(bound.value)
    for error in (call, named, made, bound):
        assert type(error.value) is TypeError
        assert _notes(error.value).count("hint: ") == 1


def test_an_error_names_the_part_of_the_input_that_cannot_be_pickled(engine: str) -> None:
    keeper = crossfade.remote(Keeper).remote()
    with crossfade.InputNode() as inp:
        whole = keeper.one.bind(inp).compile()
        parts = keeper.pair.bind(inp.x, inp[0]).compile()
    with pytest.raises(TypeError, match="cannot pickle") as error:
        whole.execute(LOCK)
    assert "the argument of execute cannot be pickled\nhint: locks" in _notes(error.value)
    assert whole.execute(1).get() == 1
    for args, kwargs, name in (((LOCK,), {"x": 1}, "inp[0]"), ((1,), {"x": LOCK}, "inp.x")):
        with pytest.raises(TypeError, match="cannot pickle") as error:
            parts.execute(*args, **kwargs).get()
        assert f"the argument {name} of execute" in f"{error.value}{_notes(error.value)}"
        assert "hint: locks" in f"{error.value}{_notes(error.value)}"
    assert parts.execute(1, x=2).get() == (2, 1)


def test_an_error_names_the_class_that_cannot_be_pickled(local: None) -> None:
    with pytest.raises(TypeError, match="cannot pickle") as error:
        crossfade.remote(Locker).remote()
    assert "class Locker cannot be pickled\nhint: its methods use" in _notes(error.value)


def test_an_error_that_has_a_hint_gets_no_other(engine: str) -> None:
    keeper, other = (crossfade.remote(Keeper).remote() for _ in range(2))
    with pytest.raises(TypeError, match="hint: connect actors") as error:
        keeper.one.remote(other)
    assert _notes(error.value).endswith(".one cannot be pickled")


def test_classes_with_slots_that_cannot_come_back_say_what_to_do(local: None) -> None:
    maker = crossfade.remote(Maker).remote()
    graph = maker.slotted.bind(crossfade.InputNode()).compile()
    with pytest.raises(AttributeError, match="__dict__") as call:
        maker.slotted.remote(1).get()
    with pytest.raises(AttributeError, match="__dict__") as value:
        graph.execute(1).get()
    for error in (call.value, value.value):
        assert isinstance(error, crossfade.TaskError)
        assert str(error).endswith(f"\nhint: {error.hint}")
        assert "__getstate__" in str(error.hint)
        assert "on actor driver" not in str(error)
        assert "Traceback on the actor" not in str(error)
    assert "in the driver raised AttributeError" in str(call.value)
    assert maker.stated.remote(5).get().x == 5


# Rings that there is no memory for


@pytest.mark.parametrize("options", [{"buffer_bytes": 10**13}, {"buffer_bytes": 10**9, "max_inflight": 2000}])
def test_rings_for_which_there_is_no_memory_are_refused(local: None, options: dict[str, int]) -> None:
    first, second = (crossfade.remote(Keeper).remote() for _ in range(2))
    node = second.one.bind(first.one.bind(crossfade.InputNode()))
    with pytest.raises(
        crossfade.GraphError, match=r"rings of the graph take \d+ bytes [^\n]*\nhint: lower max_inflight"
    ) as error:
        node.compile(**options)
    assert "buffer_bytes" in str(error.value.hint)
    with node.compile(buffer_bytes=PAGE_BYTES) as graph:
        assert graph.execute(7).get() == 7
