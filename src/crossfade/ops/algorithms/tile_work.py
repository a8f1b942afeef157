"""What a product by tiles needs beside its operands: kernels that are loaded, counters, and the steps of schedule.py. Made once.

To make one is set-up: it may wait for the device, and is no part of a captured graph. It is kept with its group, for each lane and
each shape by itself, and used again by calls whose operands lie alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from crossfade.ops.algorithms.schedule import Run, Send, Step
from crossfade.ops.calls.job import Job, refuse_in_capture
from crossfade.ops.signaled.launch import Epilogue, Parts, Product, Target, loader_of
from crossfade.ops.signaled.operands import KIND_BYTES, Operands, find_unit, has_descriptors
from crossfade.ops.signaled.tiles import Stretch, TileConfig, TilePlan, even_blocks, plan_tiles
from crossfade.peers.lane import Epoch

if TYPE_CHECKING:
    from torch import Tensor

    from crossfade.peers.group import PeerGroup

_WORKS = "tile works"


class _WorkKey(NamedTuple):
    """Calls with equal keys share what is prepared."""

    lane: int  # calls of one lane come one after the other
    operands: Operands  # shapes and layouts
    num_rounds: int
    piece_rows: int
    lag: int
    reserve_sms: int
    out_unit: int  # how outputs are aligned
    has_bias: bool  # this rank adds one
    has_copy: bool  # the own rows go into a buffer of the lane too


def work_of(
    job: Job, address: int, *, num_rounds: int, piece_rows: int, lag: int, reserve_sms: int, has_copy: bool
) -> TileWork:
    """What is prepared for a call, or is prepared now."""
    group = job.group
    device = group.memory.driver.device
    operands = Operands.of(job.a, job.b, has_descriptors=has_descriptors(device))
    places = [address, job.out.data_ptr(), 0 if job.bias is None else job.bias.data_ptr()]
    unit = find_unit(operands.n, *(place // KIND_BYTES for place in places))
    has_bias = job.bias is not None
    key = _WorkKey(job.lane, operands, num_rounds, piece_rows, lag, reserve_sms, unit, has_bias, has_copy)
    works: dict[_WorkKey, TileWork] = group.belongings.setdefault(_WORKS, {})
    work = works.get(key)
    if work is None:
        refuse_in_capture(group, f"{job.name} by tiles has to load kernels")
        work = works[key] = TileWork(group, key)
    return work


class TileWork:
    """The prepared product of one shape on one lane (see `work_of`)."""

    def __init__(self, group: PeerGroup, key: _WorkKey) -> None:
        memory, operands = group.memory, key.operands
        loader = loader_of(group)
        config = TileConfig()
        self.plan: TilePlan = plan_tiles(
            operands.n,
            even_blocks(operands.m, memory.num_ranks),
            memory.rank,
            tile_rows=config.num_rows,
            tile_columns=config.num_columns,
            piece_rows=key.piece_rows or None,
            num_rounds=key.num_rounds,
            lag=key.lag,
        )
        self._row_bytes = operands.n * KIND_BYTES
        self._rank, self._slot_bytes = memory.rank, group.lane(key.lane).slot_bytes
        self._product = Product(
            loader, memory.driver, operands, self.plan, config, out_unit=key.out_unit, reserve_sms=key.reserve_sms
        )
        self._others = Epilogue(has_bias=key.has_bias, has_signals=True)
        self._own = Epilogue(
            has_bias=key.has_bias, rank=memory.rank, num_parts=memory.num_ranks, num_also=int(key.has_copy)
        )
        self._product.load(self._others, self._own)
        own_memory = memory.buffers[memory.rank]
        self._also, self._also_base = loader.table([own_memory]), own_memory

    def steps(self, job: Job, stream: int, products: Tensor, own_address: int) -> list[Step]:
        """The launches of one call."""
        address = products.data_ptr()
        is_captured = job.group.is_capturing()
        made = []
        for stretch in self.plan.stretches:
            to = Target(own_address, job.num_columns, self.plan.own_block.begin) if stretch.is_own else None
            target = to or Target(address, job.num_columns)
            launch = partial(self._launch, job, products, stream, stretch, target, is_captured)
            if stretch.is_own:
                made.append(Step(stretch.round, None, None, launch))
            else:
                made.append(Step(stretch.round, self._sends(stretch, address, is_captured), launch))
        return made

    def _sends(self, stretch: Stretch, address: int, is_captured: bool) -> list[Send]:
        found = []
        for piece in stretch.pieces:
            first = self.plan.blocks[piece.rank].begin
            wait = partial(self._product.counters.wait, piece=piece, is_captured=is_captured)
            place, size = (piece.begin - first) * self._row_bytes, (piece.end - piece.begin) * self._row_bytes
            found.append(Send(piece.rank, address + piece.begin * self._row_bytes, place, size, wait))
        return found

    def _launch(
        self,
        job: Job,
        products: Tensor,
        stream: int,
        stretch: Stretch,
        target: Target,
        is_captured: bool,
        parts: Epoch | None = None,
        sums: Epoch | None = None,
    ) -> None:
        epilogue, arrived = self._others, Parts()
        if parts is not None:
            epilogue = self._own
            arrived = Parts(parts.buffers[self._rank], self._slot_bytes, self.plan.own_block.begin)
            if epilogue.num_also:
                assert sums is not None, "copies go into the buffer of the second exchange"
                offset = sums.buffers[self._rank] - self._also_base
                target = target._replace(also=self._also.data_ptr(), also_offset=offset)
        bias = 0 if job.bias is None else job.bias.data_ptr()
        launch = partial(
            self._product.launch,
            stream,
            stretch,
            job.a,
            job.b,
            target,
            epilogue,
            arrived,
            bias,
            is_captured=is_captured,
        )
        job.group.do(partial(_with, products, launch))

    def runs(self, address: int) -> list[Mapping[int, Run]]:
        """For each round, every rank's rows of a result whose row 0 lies at ``address``."""
        found: list[Mapping[int, Run]] = []
        for number in range(self.plan.num_rounds):
            rows: dict[int, Run] = {}
            for block in self.plan.blocks:
                begin, end = self.plan.run(block.rank, number)
                place = (begin - block.begin) * self._row_bytes
                rows[block.rank] = Run(address + begin * self._row_bytes, place, (end - begin) * self._row_bytes)
            found.append(rows)
        return found


def _with(kept: Tensor, launch: Callable[[], None]) -> None:
    launch()
