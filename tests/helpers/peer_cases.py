"""What each rank of a CPU group does in the tests of `crossfade.peers`, and what it must get, by plain torch."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from crossfade.errors import ChannelBroken, ChannelTimeout
from crossfade.peers.collectives import (
    SUMMABLE,
    all_gather,
    all_reduce,
    all_reduce_coalesced,
    all_to_all,
    broadcast,
    reduce_scatter,
    reduce_scatter_coalesced,
)
from crossfade.peers.group import PeerGroup
from crossfade.peers.opening import open_group
from tests.helpers.footprint import footprint, held_more, names_left, shared_names

FUNCTIONS: dict[str, Callable[..., torch.Tensor]] = {
    "all_gather": all_gather,
    "all_to_all": all_to_all,
    "reduce_scatter": reduce_scatter,
    "all_reduce": all_reduce,
}
NOT_SUMMED = ("bool", "uint8", "int8", "complex64", "complex128")


def make(shape: Sequence[int], dtype: str, seed: int, layout: str = "plain") -> torch.Tensor:
    """A tensor that follows from the seed."""
    wide = (*shape[:-1], 2 * shape[-1]) if layout == "strided" and shape else tuple(shape)
    wide = wide[::-1] if layout == "transposed" else wide
    kind = getattr(torch, dtype)
    source = torch.Generator().manual_seed(seed)
    if kind.is_floating_point or kind.is_complex:
        value = torch.randn(wide, generator=source, dtype=torch.complex128 if kind.is_complex else torch.float64).to(
            kind
        )
    else:
        value = torch.randint(0, 2 if dtype == "bool" else 100, wide, generator=source).to(kind)
    if layout == "transposed":
        return value.permute(*reversed(range(value.dim())))
    return value[..., ::2] if layout == "strided" and shape else value


def expected(name: str, inputs: Sequence[torch.Tensor], rank: int) -> torch.Tensor:
    """What a rank must get, bit by bit."""
    num_ranks = len(inputs)
    if name == "all_gather":
        return torch.cat([each if each.dim() else each.reshape(1) for each in inputs])
    if name == "all_to_all":
        return torch.cat([each.chunk(num_ranks)[rank] if len(each) else each for each in inputs])
    kind = inputs[0].dtype
    wide = torch.float32 if kind in (torch.float16, torch.bfloat16) else kind
    total = inputs[0].to(wide)
    for each in inputs[1:]:
        total = total + each.to(wide)
    total = total.to(kind)
    return total if name == "all_reduce" or not len(total) else total.chunk(num_ranks)[rank]


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal types, shapes and bytes."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    flat_a, flat_b = (
        each.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8) for each in (a, b)
    )
    return torch.equal(flat_a, flat_b)


def check(
    group: PeerGroup,
    name: str,
    length: int,
    rest: tuple[int, ...] = (),
    dtype: str = "float32",
    *,
    seed: int = 0,
    layout: str = "plain",
    out: str = "none",
    lane: int = 0,
) -> None:
    """One call on all ranks, against plain torch. ``length`` is that of one rank's part."""
    rank, num_ranks = group.rank, group.num_ranks
    shape = (length * (1 if name in ("all_gather", "all_reduce") else num_ranks), *rest)
    inputs = [make(shape, dtype, 1000 * seed + k, layout) for k in range(num_ranks)]
    wanted, own = expected(name, inputs, rank), inputs[rank]
    target: torch.Tensor | None = None
    if out == "given":
        target = torch.zeros_like(wanted, memory_format=torch.contiguous_format)
    elif out == "strided":
        target = torch.zeros((*wanted.shape, 2), dtype=wanted.dtype)[..., 0]
    elif out == "in place" and name == "all_reduce":
        target = own
    elif out == "in place" and name == "all_gather":
        target = torch.zeros_like(wanted, memory_format=torch.contiguous_format)
        place = target[rank * length : (rank + 1) * length]
        place.copy_(own)
        own = place
    elif out == "in place" and name == "reduce_scatter":
        own = own.contiguous()
        target = own[rank * length : (rank + 1) * length]
    before = own.clone()
    got = FUNCTIONS[name](own, group, target, lane=lane)
    what = f"{name} of {dtype} {shape}, seed {seed}, {layout}, out {out}, lane {lane}"
    assert target is None or got is target, what
    assert same_bits(got, wanted), what
    assert out == "in place" or same_bits(own, before), what


def _types(rank: int, num_ranks: int) -> None:
    group = open_group(device="cpu", buffer_bytes=4096)
    for name in FUNCTIONS:
        for dtype in (*SUMMABLE, *(() if "reduce" in name else NOT_SUMMED)):
            for length in (0, 1, 7, 2001):
                check(group, name, length, dtype=dtype, seed=length)
    scalars = [torch.tensor(float(k)) for k in range(num_ranks)]
    assert same_bits(all_gather(scalars[rank], group), torch.stack(scalars))
    assert all_reduce(scalars[rank], group).item() == sum(range(num_ranks))
    group.close()


def _shapes(rank: int, num_ranks: int) -> None:
    group = open_group(device="cpu", buffer_bytes=8192)
    for name in FUNCTIONS:
        for rest in ((), (3,), (5, 2), (0,), (2, 3, 4)):
            for layout in ("plain", "strided", "transposed"):
                for out in ("none", "given", "strided", "in place"):
                    check(group, name, 3, rest, seed=len(rest), layout=layout, out=out)
    group.close()


def _pieces(rank: int, num_ranks: int) -> None:
    """Buffers of 256 bytes a rank; again and again on two lanes, which can be replayed or not."""
    for is_replayable in (False, True):
        group = open_group(device="cpu", buffer_bytes=256 * num_ranks, num_lanes=2, is_replayable=is_replayable)
        for name in FUNCTIONS:
            for k, length in enumerate((1, 31, 1000) * 2):
                check(group, name, length, dtype="bfloat16", seed=k, lane=k % 2, out="given")
                check(group, name, length, dtype="float64", seed=k, lane=(k + 1) % 2, out="in place")
        group.close()


def _large(rank: int, num_ranks: int) -> None:
    group = open_group(device="cpu", buffer_bytes=1 << 20)
    for name in FUNCTIONS:
        check(group, name, 1_000_003, dtype="float32", seed=3)
        check(group, name, 300_001, dtype="float16", seed=4)
    group.close()


def random_calls(group: PeerGroup, seed: int, num_calls: int) -> None:
    """Calls that follow from the seed, alike on all ranks."""
    draw = random.Random(seed)
    for number in range(num_calls):
        name = draw.choice(list(FUNCTIONS))
        dtypes = SUMMABLE if "reduce" in name else (*SUMMABLE, *NOT_SUMMED)
        check(
            group,
            name,
            draw.choice((0, 1, 2, 5, draw.randrange(300))),
            draw.choice(((), (3,), (2, 2))),
            draw.choice(dtypes),
            seed=seed + number,
            layout=draw.choice(("plain", "strided", "transposed")),
            out=draw.choice(("none", "given", "strided", "in place")),
            lane=draw.randrange(2),
        )
        if draw.random() < 0.05:
            group.barrier(draw.randrange(2))


def _random(rank: int, num_ranks: int) -> None:
    group = open_group(device="cpu", buffer_bytes=256 * num_ranks, num_lanes=2, is_replayable=True)
    random_calls(group, 17 * num_ranks, 300)
    group.close()


def _against_gloo(rank: int, num_ranks: int) -> None:
    group = open_group(device="cpu", buffer_bytes=4096)
    own = make((num_ranks * 50, 3), "int64", rank)
    total, rows = own.clone(), [torch.empty_like(own) for _ in range(num_ranks)]
    dist.all_reduce(total)
    dist.all_gather(rows, own)
    assert same_bits(all_reduce(own, group), total)
    assert same_bits(all_gather(own, group), torch.cat(rows))
    assert same_bits(reduce_scatter(own, group), total.chunk(num_ranks)[rank])
    assert same_bits(all_to_all(own, group), torch.cat([each.chunk(num_ranks)[rank] for each in rows]))
    group.close()


def _sub_group(rank: int, num_ranks: int) -> None:
    members = [0, num_ranks - 1]
    part = dist.new_group(members)
    if rank in members:
        group = open_group(part, device="cpu", buffer_bytes=2048)
        assert (group.num_ranks, group.rank) == (2, members.index(rank))
        for name in FUNCTIONS:
            check(group, name, 100)
        group.close()
    dist.barrier()


def _heap(rank: int, num_ranks: int) -> None:
    group = open_group(device="cpu", buffer_bytes=256 * num_ranks, heap_bytes=1 << 16)
    out = group.empty(num_ranks * 100, 3, dtype=torch.float32)
    for seed in range(20):
        inputs = [make((100, 3), "float32", 10 * seed + k) for k in range(num_ranks)]
        assert same_bits(all_gather(inputs[rank], group, out), torch.cat(inputs))
        dist.barrier()
        whole = [make((num_ranks * 100, 3), "float32", 10 * seed + k) for k in range(num_ranks)]
        assert same_bits(all_to_all(whole[rank], group, out), expected("all_to_all", whole, rank))
        dist.barrier()
        assert same_bits(all_reduce(whole[rank], group, out), expected("all_reduce", whole, rank))
    del out
    group.close()


def _coalesced_apart(group: PeerGroup, num_ranks: int) -> None:
    """Nothing of one tensor may lie where another is written; columns of one matrix, which are packed, may."""
    x, y, both = torch.ones(4 * num_ranks), torch.full((4 * num_ranks,), 2.0), torch.empty(4 * num_ranks)
    for outs in ([y, x], [both, both], [both[1:], both[:-1]]):
        with pytest.raises(ValueError, match=r"(lies in out|overlap)(.|\n)*hint: give each tensor an out of its own"):
            all_reduce_coalesced([x[: len(outs[0])], y[: len(outs[1])]], group, outs)
    with pytest.raises(ValueError, match="lies in out"):
        reduce_scatter_coalesced([x, y], group, [y[:4], x[:4]])
    with pytest.raises(ValueError, match="argument 2 is"):
        all_reduce_coalesced([x, y], group, ())
    matrix = torch.empty(4 * num_ranks, 2)
    all_reduce_coalesced([x, y], group, [matrix[:, 0], matrix[:, 1]])
    assert torch.equal(matrix, torch.tensor([1.0, 2.0]).repeat(4 * num_ranks, 1) * num_ranks)
    all_reduce_coalesced([x, y], group, [x, y])
    assert torch.equal(torch.stack([x, y], 1), matrix)
    with pytest.raises(TypeError):
        broadcast(x, 0.5, group)  # type: ignore[arg-type]


def _coalesced(rank: int, num_ranks: int) -> None:
    """Several tensors in a call: of many lengths and types, more of them than lanes, and longer than buffers."""
    group = open_group(device="cpu", buffer_bytes=256 * num_ranks, num_lanes=3, heap_bytes=1 << 16)
    results: list[torch.Tensor] = []
    outs: list[torch.Tensor | None] = []
    lengths, types = (5, 0, 700, 64, 1, 333), ("float32", "int64", "float16", "float32", "bfloat16", "float64")
    shapes = [((num_ranks * length, 2), dtype) for length, dtype in zip(lengths, types, strict=True)]
    for lanes in (None, [1], [2, 0]):
        for name, function in (("all_reduce", all_reduce_coalesced), ("reduce_scatter", reduce_scatter_coalesced)):
            inputs = [
                [make(shape, dtype, 10 * k + i) for i, (shape, dtype) in enumerate(shapes)] for k in range(num_ranks)
            ]
            outs = [None] * len(shapes)
            if name == "all_reduce":
                outs[2] = group.empty(*shapes[2][0], dtype=torch.float16)
            results = function(inputs[rank], group, outs, lanes=lanes)
            for i, result in enumerate(results):
                assert same_bits(result, expected(name, [row[i] for row in inputs], rank)), (name, lanes, i)
            dist.barrier()
    assert all_reduce_coalesced([], group) == []
    for wrong in ([], [0, 0]):
        with pytest.raises(ValueError, match="at least one, and each once"):
            all_reduce_coalesced([torch.ones(3)], group, lanes=wrong)
    _coalesced_apart(group, num_ranks)
    del outs, results
    group.close()


def _replays(rank: int, num_ranks: int) -> None:
    """A captured graph, replayed with other inputs and between calls that are not captured."""
    group = open_group(device="cpu", buffer_bytes=256 * num_ranks, is_replayable=True)
    driver: Any = group.memory.driver
    stream = group.current_stream()
    own = torch.zeros(num_ranks * 200)
    driver.begin_capture(stream)
    outs = {name: FUNCTIONS[name](own, group) for name in FUNCTIONS}
    graph = driver.end_capture(stream)
    for seed in range(10):
        inputs = [make((num_ranks * 200,), "float32", 10 * seed + k) for k in range(num_ranks)]
        own.copy_(inputs[rank])
        driver.launch(graph, stream)
        group.check()
        for name, out in outs.items():
            assert same_bits(out, expected(name, inputs, rank)), name
        check(group, "all_reduce", 33, seed=seed)
    driver.destroy_graph(graph)
    group.close()


def _statistics(rank: int, num_ranks: int) -> None:
    group = open_group(device="cpu", buffer_bytes=4096)
    all_gather(torch.zeros(16), group)
    all_reduce(torch.zeros(4), group)
    all_reduce(torch.zeros(0), group)
    group.barrier()
    counted = group.lane().statistics()
    assert counted.num_calls == 4
    assert counted.num_exchanges == 3
    assert counted.num_bytes == (num_ranks - 1) * (64 + 16)
    group.close()


def _leaves_nothing(rank: int, num_ranks: int) -> None:
    def use() -> None:
        for more in ({"heap_bytes": 4096}, {"is_staged": True}):
            group = open_group(device="cpu", buffer_bytes=1 << 16, num_lanes=2, **more)
            check(group, "all_reduce", 5000)
            group.close()
            group.close()

    use()
    shared = shared_names()
    before = footprint(os.getpid())
    for _ in range(20):
        use()
    grown = held_more(before)
    assert grown.pop("private_bytes", 0) < 2 << 20
    grown.pop("shared_bytes", None)
    assert not grown
    assert not {name for name in names_left(shared) if "crossfade" in name}


def _arguments_differ(rank: int, num_ranks: int) -> None:
    before = footprint(os.getpid()).num_descriptors
    with pytest.raises(ValueError, match="the ranks' buffer_bytes differ: 4096, 8192"):
        open_group(device="cpu", buffer_bytes=4096 << rank)
    assert footprint(os.getpid()).num_descriptors == before


def _one_never_comes(rank: int, num_ranks: int) -> None:
    """A wait ends after the time limit; from then on the lane is broken, and close gives everything back."""
    before = footprint(os.getpid())
    group = open_group(device="cpu", buffer_bytes=4096, timeout_s=0.3)
    if rank == 0:
        with pytest.raises(ChannelTimeout, match="full from rank"):
            all_reduce(torch.zeros(4), group)
        with pytest.raises(ChannelBroken, match=r"ended half-way \(ChannelTimeout\)"):
            group.check()
        group.close()
    dist.barrier()
    if rank:
        with suppress(ChannelTimeout):  # the first rank has set its signals in the first exchange
            group.close()
    grown = held_more(before)
    assert not {"num_descriptors", "num_threads", "num_ring_mappings"} & set(grown), grown
    dist.barrier()


def on_cpu(case: Callable[[int, int], None], device: str) -> None:
    case(dist.get_rank(), dist.get_world_size())


_OF_RANKS: dict[str, Callable[[int, int], None]] = {
    "types": _types,
    "shapes": _shapes,
    "pieces": _pieces,
    "large": _large,
    "random": _random,
    "against gloo": _against_gloo,
    "sub-group": _sub_group,
    "heap": _heap,
    "coalesced": _coalesced,
    "replays": _replays,
    "statistics": _statistics,
    "leaves nothing": _leaves_nothing,
    "arguments differ": _arguments_differ,
    "one never comes": _one_never_comes,
}
CASES = {name: partial(on_cpu, case) for name, case in _OF_RANKS.items()}
