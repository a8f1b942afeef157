"""Actors that say where the tensors lie that they are given, on GPUs or with the CPU in their place; values to give them."""

from __future__ import annotations

import gc
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

import crossfade
from crossfade.edges.host_copies import HostCopies

LIMIT_S = 60
SIZES = [5, 700, 0, 1, 3000, 7]


def get(ref: Any) -> Any:
    return crossfade.get(ref, timeout=LIMIT_S)


def unpacked(found: Any, size: int, wanted: str | None) -> None:
    """A batch arrived whole, with its tensors where they are wanted. (Memory that stands for a GPU's is not known from other.)"""
    places, value = found
    assert value == plain(size)
    if wanted is not None and size:
        assert set(places) == {wanted}


def fan_out(writer: Any, readers: Sequence[Any], off: Any, transport: Any, *, sizes: Sequence[int] = SIZES) -> None:
    """An object that holds tensors among other things goes to several actors with GPUs, to one without, and to the driver."""
    with crossfade.InputNode() as given:
        packed = writer.pack.bind(given).with_tensor_transport(transport)
        packed.with_tensor_transport("auto", reader=off)
        outputs = [actor.unpack.bind(packed) for actor in (*readers, off)]
        graph = crossfade.MultiOutputNode([*outputs, packed]).compile()
    assert {spec.transport for spec in graph.plan.channels if spec.value == "n0"} == {str(transport), "shm"}
    on_gpus = GPU if torch.cuda.is_available() else None
    refs: list[Any] = []
    for size in [*sizes, *sizes]:
        refs.append((size, graph.execute(size)))
        if len(refs) == 3:
            _check_fan_out(refs.pop(0), on_gpus)
    for sent in refs:
        _check_fan_out(sent, on_gpus)
    graph.teardown(timeout=LIMIT_S)


def _check_fan_out(sent: tuple[int, Any], on_gpus: str | None) -> None:
    size, ref = sent
    *found, host, value = get(ref)
    for each in found:
        unpacked(each, size, on_gpus)
    unpacked(host, size, CPU if torch.cuda.is_available() else None)
    assert value.tokens.device.type == "cpu"
    assert torch.equal(value.tokens, batch(size).tokens)
    assert torch.equal(value.more["turned"], value.tokens.t())


def there_and_back(off: Any, on: Any, device: str) -> None:
    """From an actor without a GPU to one that has one, and back to it and to the driver."""
    with crossfade.InputNode() as given:
        ones = off.pack.bind(given, CPU).with_tensor_transport(device=device)
        seen = on.unpack.bind(ones)
        packed = on.pack.bind(given).with_tensor_transport(device="cpu")
        graph = crossfade.MultiOutputNode([seen, off.unpack.bind(packed), packed]).compile()
    for size in SIZES:
        seen_there, seen_here, value = get(graph.execute(size))
        unpacked(seen_there, size, GPU if device == "cuda" else CPU)
        unpacked(seen_here, size, CPU if torch.cuda.is_available() else None)
        assert value.tokens.device.type == "cpu"
        assert torch.equal(value.tokens, batch(size).tokens)
    graph.teardown(timeout=LIMIT_S)


def late_inputs(readers: Sequence[Any], num: int, *, overlap: bool) -> None:
    """What the driver gives is looked at, and spoilt, long after the method has returned; slots are used again meanwhile."""
    with crossfade.InputNode() as given:
        given.with_tensor_transport(device="cuda")
        outputs = [actor.is_all.bind(given.value, given.number) for actor in readers]
        graph = crossfade.MultiOutputNode(outputs).compile(overlap=overlap, max_inflight=4)
    refs: list[Any] = []
    for number in range(num):
        value = torch.full(((1, 1000, 300_000)[number % 3],), number)
        refs.append(graph.execute(value=value, number=number))
        if len(refs) == graph.plan.max_inflight:
            assert all(found.item() is True for found in get(refs.pop(0)))
    assert all(found.item() is True for ref in refs for found in get(ref))
    graph.teardown(timeout=LIMIT_S)


def aside(writer: Any, reader: Any, transport: Any, num: int) -> None:
    """A method uses what came on a side stream, which rejoins; the slots are filled again as soon as they are free."""
    with crossfade.InputNode() as given:
        made = writer.make.bind(given.number, given.size).with_tensor_transport(transport)
        graph = reader.is_all_aside.bind(made, given.number).compile(overlap=True)
    refs: list[Any] = []
    for number in range(num):
        refs.append(graph.execute(number=number, size=(1, 1000, 300_000)[number % 3]))
        if len(refs) == graph.plan.max_inflight:
            assert get(refs.pop(0)).item() is True
    assert all(get(ref).item() is True for ref in refs)
    graph.teardown(timeout=LIMIT_S)


def differing(first: Any, second: Any, off: Any, sizes: Sequence[int], **options: Any) -> Any:
    """Parts of the input, and readers of one part, have their tensors in different places."""
    with crossfade.InputNode() as given:
        given.with_tensor_transport(device="cuda").with_tensor_transport(reader=off)
        given.y.with_tensor_transport(device="cpu")
        given.z.with_tensor_transport(device="cuda").with_tensor_transport(reader=second)
        outputs = [actor.where.bind(given.x, given.z) for actor in (first, second, off)]
        graph = crossfade.MultiOutputNode([*outputs, first.where.bind(given.y)]).compile(**options)
    for size in sizes:
        values = dict(zip("xyz", torch.ones(3, size), strict=True))
        assert get(graph.execute(**values)) == [
            [(GPU, size), (GPU, size)],
            [(GPU, size), (CPU, size)],
            [(CPU, size), (CPU, size)],
            [(CPU, size)],
        ]
    return graph


def brought_by_itself(output: Any, num: int) -> None:
    """A method copies what the driver gives to a GPU, and tells whether it was pinned and the sum; slots are used again at once."""
    graph = output.compile(max_inflight=2)
    refs: list[Any] = []
    for number in range(num):
        refs.append(graph.execute(torch.full((100_000,), number)))
        if len(refs) == graph.plan.max_inflight:
            _check_brought(refs.pop(0), number - 1)
    _check_brought(refs.pop(0), num - 1)
    graph.teardown(timeout=LIMIT_S)


def _check_brought(ref: Any, number: int) -> None:
    is_pinned, total = get(ref)
    assert is_pinned
    assert (total.device.type, total.item()) == (CPU, 100_000 * number)


def beside_each_other(writer: Any, reader: Any, transport: Any) -> None:
    """One edge whose shape is declared to be static, and one whose tensors' lengths and number change, in one graph."""
    with crossfade.InputNode() as given:
        fixed = writer.make.bind(given.number, 1000).with_tensor_transport(
            transport, static_shape=True, direct_return=True
        )
        free = writer.pack.bind(given.number).with_tensor_transport(transport)
        outputs = [reader.is_all.bind(fixed, given.number), reader.unpack.bind(free)]
        graph = crossfade.MultiOutputNode(outputs).compile(buffer_bytes=8192)
    for number in SIZES:
        same, found = get(graph.execute(number=number))
        assert same.item() is True
        unpacked(found, number, GPU if torch.cuda.is_available() else None)
    graph.teardown(timeout=LIMIT_S)


CPU = "cpu"
GPU = "gpu"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
"""Where actors with a GPU make tensors."""


@dataclass
class Batch:
    """An object that holds tensors among other things."""

    name: str
    tokens: torch.Tensor
    more: dict[str, Any]


class Unpicklable:
    """What cannot be given to anybody."""

    def __reduce__(self) -> Any:
        raise ValueError("this is not to be pickled")


class OnlyOnce:
    """A thing that is pickled once."""

    num_pickled = 0

    def __reduce__(self) -> Any:
        self.num_pickled += 1
        if self.num_pickled > 1:
            raise ValueError("it was pickled before")
        return str, ("once",)


def batch(size: int, *, device: str = CPU) -> Batch:
    """One whose tensors' lengths and number change with the size."""
    base = torch.arange(size * 6, device=device).view(6, size)
    more = {
        "turned": base.t(),
        "pair": (base[1].to(torch.bfloat16), [torch.ones(3, device=device)] * (size % 3)),
        "none": torch.empty(0, 3, device=device),
        "alone": torch.tensor(7, device=device),
        "wanted": torch.ones(2, device=device, requires_grad=True),
        "array": np.arange(size),
        "text": "x" * size,
    }
    return Batch(f"batch {size}", base, more)


def plain(size: int) -> Any:
    """What `InputWorker.unpack` finds in a batch besides places."""
    value = batch(size)
    first, others = value.more["pair"]
    tokens, rest = value.tokens.tolist(), [other.tolist() for other in others]
    return value.name, tokens, first.tolist(), rest, 7, list(range(size)), value.more["text"]


def where(tensor: torch.Tensor) -> str:
    """Where a tensor lies. In place of a GPU's own memory stands memory of torch's; what stays on the CPU lies on a slot, or where
    that was copied out to, and belongs to somebody else.
    """
    if tensor.is_sparse:
        tensor = tensor._values()
    if tensor.is_cuda:
        assert tensor.device.index == torch.cuda.current_device()
        return GPU
    is_torchs = tensor.untyped_storage().resizable()
    return GPU if is_torchs and not torch.cuda.is_available() else CPU


class InputWorker:
    """Says what it gets."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self._kept: list[Any] = []
        self._side: Any = None

    def pid(self) -> int:
        return os.getpid()

    def where(self, *values: Any) -> Any:
        """Where each of some tensors lies, and its sum."""
        return [(where(value), value.sum().item()) for value in values]

    def unpack(self, value: Batch) -> Any:
        """Where its tensors lie, without the empty one, and everything in it as plain data."""
        more = value.more
        first, others = more["pair"]
        tensors = [value.tokens, more["turned"], first, *others, more["alone"], more["wanted"]]
        assert isinstance(more["array"], np.ndarray)
        assert more["wanted"].requires_grad
        assert tuple(more["none"].shape) == (0, 3)
        assert torch.equal(more["turned"], value.tokens.t())
        said = value.name, value.tokens.tolist(), first.tolist(), [each.tolist() for each in others]
        rest = more["alone"].item(), more["array"].tolist(), more["text"]
        return [where(tensor) for tensor in tensors], (*said, *rest)

    def forward(self, layer: Any) -> Any:
        """Where a module's parameters lie, and what it makes of ones."""
        ones = torch.ones(4, device=layer.weight.device)
        return [where(each.data) for each in layer.parameters()], layer(ones).tolist()

    def pack(self, size: int, device: str = DEVICE) -> Batch:
        """A batch, on its GPU if nothing else is said."""
        return batch(size, device=device)

    def make(self, number: int, size: int, gpu: int | None = None) -> torch.Tensor:
        """On one of its GPUs, computed after the method has returned."""
        device = torch.device("cuda", gpu) if gpu is not None else torch.device(DEVICE)
        value = torch.full((size,), -1, device=device)
        if DEVICE == "cuda":
            with torch.cuda.device(device):
                torch.cuda._sleep(200_000)  # type: ignore[no-untyped-call]
        return value.fill_(number)

    def is_all(self, value: torch.Tensor, number: int) -> torch.Tensor:
        """Looked at after the method has returned; what is there is spoilt then."""
        if value.is_cuda:
            torch.cuda._sleep(200_000)  # type: ignore[no-untyped-call]
        found = (value == number).all().reshape(1)
        value.fill_(-2)
        return found

    def is_all_aside(self, value: torch.Tensor, number: int) -> torch.Tensor:
        """The same on a side stream, which rejoins as the guide says."""
        if not value.is_cuda:
            return self.is_all(value, number)
        side = self._side = self._side or torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            found = self.is_all(value, number)
        torch.cuda.current_stream().wait_stream(side)
        return found

    def make_on(self, number: int, size: int, gpus: list[int]) -> list[torch.Tensor]:
        """A tensor on each of several GPUs, with one number more each."""
        return [self.make(number + place, size, gpu) for place, gpu in enumerate(gpus)]

    def look_on(self, values: list[torch.Tensor], number: int) -> Any:
        """On which GPU each lies, and whether it is whole."""
        found = [(value.device.index, bool((value == number + place).all())) for place, value in enumerate(values)]
        for value in values:
            value.fill_(-2)
        return found

    def bring_to(self, value: torch.Tensor, gpu: int) -> Any:
        """A CPU tensor is brought to a GPU by the method itself, which drops it before that has happened."""
        with torch.cuda.device(gpu):
            torch.cuda._sleep(2_000_000)  # type: ignore[no-untyped-call]
            near = value.to(f"cuda:{gpu}", non_blocking=True)
            return value.is_pinned(), near.sum().reshape(1)

    def bring_aside(self, value: torch.Tensor) -> Any:
        """A CPU tensor is brought to the GPU on a side stream, which rejoins; the method drops it before that has happened."""
        side = self._side = self._side or torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(2_000_000)  # type: ignore[no-untyped-call]
            total = value.to("cuda", non_blocking=True).sum().reshape(1)
        torch.cuda.current_stream().wait_stream(side)
        return value.is_pinned(), total

    def keep(self, value: Any) -> bool:
        """All that it got until now is as it was, and its own to write to."""
        assert all(torch.equal(one, other) for one, other in self._kept)
        value.add_(1)
        self._kept.append((value, value.clone()))
        return all(torch.equal(one, other) for one, other in self._kept)

    def drop(self) -> None:
        self._kept.clear()

    def pinned_slots(self) -> list[str]:
        """Slots of rings that are pinned for its GPUs; the garbage collector knows the object that has them."""
        found = [each for each in gc.get_objects() if type(each) is HostCopies]
        labels = [label for each in found for label in each.home.driver.ledger.held("mapped")]
        return [label for label in labels if "slots of" in label]

    def be_busy_until(self, path: str) -> None:
        """From now on the device that the CPU stands for has something to do until there is such a file."""
        from crossfade.device.host_driver import HostDriver

        HostDriver.is_idle = lambda driver, stream: os.path.exists(path)  # type: ignore[method-assign, assignment]

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def work(self, value: torch.Tensor, seconds: float) -> int:
        """Returns while its GPU still works."""
        torch.cuda._sleep(int(seconds * 1.5e9))  # type: ignore[no-untyped-call]
        value.add_(1)
        return value.numel()
