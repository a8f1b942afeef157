"""How a collective moves its bytes: what a benchmark can sweep. All ranks must choose alike, but for the streams."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from crossfade.device.copies import EDGE_BYTES, stagger


class Direction(StrEnum):
    """Who copies."""

    PULL = "pull"
    """The rank that gets the bytes. The other one first copies them into shared memory; they land in the output."""
    PUSH = "push"
    """The rank that has the bytes. They land in shared memory, and the other one copies them into the output."""


@dataclass(frozen=True, slots=True)
class Tuning:
    """Choices, none of which changes a result.

    Attributes:
        direction: who copies, where there is a choice (what is reduced is always pushed).
        num_streams: streams that share the copies of one exchange, the caller's among them.
        chunk_bytes: the longest copy, a multiple of 16; None for no limit.
        is_staggered: begin with the next rank, so that no two ranks begin with the same one; otherwise all begin with rank 0.
        is_interleaved: a chunk for each peer in turn, in place of one peer after the other.
        is_batched: set, and wait for, the signals of all peers in one call; otherwise each by itself, as early as possible.
        one_shot_bytes: up to here an all-reduce sends the whole tensor to all and takes one exchange, not two.
    """

    direction: Direction = Direction.PULL
    num_streams: int = 1
    chunk_bytes: int | None = None
    is_staggered: bool = True
    is_interleaved: bool = False
    is_batched: bool = True
    one_shot_bytes: int = 256 << 10

    def __post_init__(self) -> None:
        object.__setattr__(self, "direction", Direction(self.direction))
        if self.num_streams < 1:
            raise ValueError(f"num_streams is {self.num_streams}\nhint: 1 is the caller's stream alone")
        if self.chunk_bytes is not None and (self.chunk_bytes <= 0 or self.chunk_bytes % EDGE_BYTES):
            raise ValueError(f"chunk_bytes is {self.chunk_bytes}\nhint: take a positive multiple of {EDGE_BYTES}")

    def order(self, rank: int, num_ranks: int) -> list[int]:
        """The other ranks, in the order in which this one serves them."""
        if self.is_staggered:
            return stagger(rank, num_ranks)
        return [other for other in range(num_ranks) if other != rank]


DEFAULT = Tuning()
