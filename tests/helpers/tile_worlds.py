"""W ranks' tile operators in one process, one rank after another: what their kernels must give, and what is checked on the way.

Operands are small integers, so every accumulator is exact in float32 and every expected bit is known.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from typing import Any

import torch

from crossfade.device.borrowed import device_of
from crossfade.device.driver import HOST
from crossfade.ops.signaled.launch import Epilogue, Loader, Parts, Product, Target
from crossfade.ops.signaled.operands import Operands, find_unit
from crossfade.ops.signaled.tiles import Block, Piece, Stretch, TileConfig, plan_tiles

SMALL = TileConfig(16, 32, 16, num_warps=4, num_stages=2)
"""Tiles that the interpreter does quickly."""


class Words:
    """The part of a driver that is used here: waits are over at once, or they are mistakes."""

    def __init__(self) -> None:
        self.num_waits = 0

    def name_range(self, address: int, size_bytes: int, label: str) -> None:
        """Nothing."""

    def write_value(self, stream: int, address: int, value: int) -> None:
        ctypes.c_uint32.from_address(address).value = value

    def write_values(self, stream: int, addresses: list[int], value: int) -> None:
        for address in addresses:
            self.write_value(stream, address, value)

    def wait_value(self, stream: int, address: int, value: int) -> None:
        found = ctypes.c_uint32.from_address(address).value
        assert found == value, f"a stream waits for {value} and finds {found}"
        self.num_waits += 1

    def record_event(self, event: int, stream: int) -> None:
        """Nothing: all is done in its order."""

    def wait_event(self, stream: int, event: int) -> None:
        """Nothing."""

    def copy(self, target: int, source: int, size_bytes: int, stream: int) -> None:
        ctypes.memmove(target, source, size_bytes)

    def wait_and_reset(self, stream: int, address: int, value: int, reset: int) -> None:
        self.wait_value(stream, address, value)
        ctypes.c_uint32.from_address(address).value = reset


def integers(rows: int, columns: int, kind: str, seed: int, most: int = 3) -> Any:
    """Small integers, laid out by rows."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-most, most + 1, (rows, columns), generator=generator).to(getattr(torch, kind))


def by_columns(tensor: Any) -> Any:
    """The same values, laid out by columns."""
    return tensor.T.contiguous().T


def spaced(tensor: Any, more: int) -> Any:
    """The same values with room between rows, filled with NaN."""
    wide = torch.full((tensor.shape[0], tensor.shape[1] + more), float("nan"), dtype=tensor.dtype)
    wide[:, : tensor.shape[1]] = tensor
    return wide[:, : tensor.shape[1]]


def rounded(total: Any, kind: str) -> Any:
    """As float32 is rounded where it lies: by the interpreter, bfloat16 is cut off."""
    if kind == "bfloat16" and not total.is_cuda:
        return (total.contiguous().view(torch.int32) >> 16).to(torch.int16).view(torch.bfloat16)
    return total.to(getattr(torch, kind))


def poisoned(rows: int, columns: int, kind: str, device: int = HOST) -> Any:
    """What nobody may read, and everybody must have overwritten."""
    return torch.full((rows, columns), float("nan"), dtype=getattr(torch, kind), device=device_of(device))


@dataclass
class World:
    """One product of every rank, cut alike. On a GPU, pieces are sent on a stream of their own, and all ranks share the device."""

    blocks: list[Block]  # by rank
    n: int  # columns, depth
    k: int
    kind: str = "float16"  # element type
    is_b_transposed: bool = False  # how b lies
    num_rounds: int = 1  # of each plan
    piece_rows: int | None = None  # of each plan
    lag: int = 0  # of each plan
    bias: Any = None  # is added to each sum
    config: TileConfig = SMALL  # of the kernels
    is_captured: bool = False  # what is enqueued is captured
    device: int = HOST  # the GPU, or `HOST` for the interpreter
    driver: Any = field(default_factory=Words)  # of the GPU

    def __post_init__(self) -> None:
        self.num_ranks, self.m = len(self.blocks), self.blocks[-1].end
        self.loader, where = Loader(self.device), device_of(self.device)
        self.a = [integers(self.m, self.k, self.kind, 10 + r, 9).to(where) for r in range(self.num_ranks)]
        self.b = [integers(self.k, self.n, self.kind, 50 + r, 9).to(where) for r in range(self.num_ranks)]
        if self.bias is not None:
            self.bias = self.bias.to(where)
        if self.is_b_transposed:
            self.b = [by_columns(b) for b in self.b]
        self.products = [self._product(r) for r in range(self.num_ranks)]
        # What is sent, and W slots of every rank, one row of blocks each.
        self.staging = [poisoned(self.m, self.n, self.kind, self.device) for _ in range(self.num_ranks)]
        self.slot_rows = max(block.end - block.begin for block in self.blocks)
        rows = self.num_ranks * self.slot_rows
        self.slots = [poisoned(rows, self.n, self.kind, self.device) for _ in range(self.num_ranks)]
        self.outs = [poisoned(self.m, self.n, self.kind, self.device) for _ in range(self.num_ranks)]
        self.stream = self.push = self.event = 0
        if self.device != HOST:
            self.stream, self.push = (self.driver.create_stream(name) for name in ("compute", "push"))
            self.event = self.driver.create_event()
            torch.cuda.synchronize(self.device)

    def _product(self, rank: int) -> Product:
        rows, columns = self.config[:2]
        plan = plan_tiles(
            self.n,
            self.blocks,
            rank,
            tile_rows=rows,
            tile_columns=columns,
            num_rounds=self.num_rounds,
            piece_rows=self.piece_rows,
            lag=self.lag,
            swath=2,
        )
        operands = Operands.of(self.a[rank], self.b[rank])
        product = Product(self.loader, self.driver, operands, plan, self.config, out_unit=find_unit(self.n))
        product.load(self.counted, self.final(rank))
        return product

    @property
    def counted(self) -> Epilogue:
        """Of the other ranks' blocks."""
        return Epilogue(has_signals=True)

    def final(self, rank: int) -> Epilogue:
        """Of the own block."""
        return Epilogue(has_bias=self.bias is not None, rank=rank, num_parts=self.num_ranks)

    def poison(self) -> None:
        """Nothing that was computed or sent is left."""
        for tensors in (self.staging, self.slots, self.outs):
            for tensor in tensors:
                tensor.fill_(float("nan"))

    def do_others(self, rank: int, number: int) -> None:
        """Launches the other ranks' runs of a round, and sends each piece when its counter says that it may be sent."""
        product = self.products[rank]
        stretch = product.plan.stretch(number, is_own=False)
        target = Target(self.staging[rank].data_ptr(), self.n)
        operands = self.a[rank], self.b[rank]
        product.launch(self.stream, stretch, *operands, target, self.counted, is_captured=self.is_captured)
        for piece in stretch.pieces:
            product.counters.wait(self.push, piece, is_captured=self.is_captured)
            self.send(rank, piece)

    def send(self, rank: int, piece: Piece) -> None:
        """A piece goes to its owner's slot."""
        at = rank * self.slot_rows + piece.begin - self.blocks[piece.rank].begin
        rows = self.staging[rank][piece.begin : piece.end]
        target = self.slots[piece.rank][at : at + len(rows)]
        self.driver.copy(target.data_ptr(), rows.data_ptr(), rows.nbytes, self.push)

    def do_own(self, rank: int, number: int) -> None:
        """Launches the own run of a round, which adds what has come."""
        self._finish(rank, self.products[rank].plan.stretch(number, is_own=True), self.final(rank))

    def _finish(self, rank: int, stretch: Stretch, epilogue: Epilogue) -> None:
        block = self.blocks[rank]
        self.products[rank].launch(
            self.stream,
            stretch,
            self.a[rank],
            self.b[rank],
            Target(self.outs[rank][block.begin :].data_ptr(), self.n, block.begin),
            epilogue,
            Parts(self.slots[rank].data_ptr(), self.slot_rows * self.n * 2, block.begin),
            0 if self.bias is None else self.bias.data_ptr(),
            is_captured=self.is_captured,
        )

    def run(self) -> None:
        """All rounds of all ranks."""
        for number in range(self.num_rounds):
            for rank in range(self.num_ranks):
                self.do_others(rank, number)
            self.driver.record_event(self.event, self.push)
            self.driver.wait_event(self.stream, self.event)
            for rank in range(self.num_ranks):
                self.do_own(rank, number)

    def expected(self, rank: int) -> Any:
        """This rank's block: its accumulator as it is, the others' rounded, added in the order of the ranks, rounded once."""
        rows = slice(self.blocks[rank].begin, self.blocks[rank].end)
        total = torch.zeros(())
        for k in range(self.num_ranks):
            exact = self.a[k][rows].float() @ self.b[k].float()
            part = exact if k == rank else rounded(exact, self.kind).float()
            total = part if k == 0 else total + part
        if self.bias is not None:
            total = total + self.bias.float()
        return rounded(total, self.kind)

    def check(self) -> None:
        """Every rank has its block bit for bit, and nothing else of the result was written."""
        for rank, block in enumerate(self.blocks):
            rows = slice(block.begin, block.end)
            wanted, found = self.expected(rank), self.outs[rank][rows]
            assert torch.equal(found.view(torch.int16), wanted.view(torch.int16)), rank
            others = torch.cat([self.outs[rank][: block.begin], self.outs[rank][block.end :]])
            assert bool(others.isnan().all()), rank
