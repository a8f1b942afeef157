"""Graphs whose values go between the driver, actors with GPUs and one without: on GPUs, or with the CPU in their place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

import crossfade
from tests.helpers.input_workers import CPU, GPU, batch, plain

__all__ = [
    "LIMIT_S",
    "SIZES",
    "aside",
    "beside_each_other",
    "brought_by_itself",
    "fan_out",
    "get",
    "late_inputs",
    "there_and_back",
    "unpacked",
]

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
