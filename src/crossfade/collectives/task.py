"""One round of a collective at one party: the tensors that go in and come out, and how far it is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from crossfade.collectives.table import Message, Status
from crossfade.collectives.terms import Offer, Terms, make_offer, result_shape
from crossfade.errors import Failure
from crossfade.types import CollectiveKind


@dataclass(slots=True, eq=False)
class Task:
    """From its start until its result is taken. Only the group's thread or the one that has its turn writes ``result``, last."""

    terms: Terms
    number: int  # of the collective in the plan
    rank: int
    num_outputs: int
    expected: tuple[torch.dtype, tuple[int, ...]] | None = (
        None  # of a broadcast: dtype and shape, at first the last round's
    )
    begin: Callable[[int], Callable[[int], None]] | None = None  # begins a span on a stream, and gives what ends it
    offer: Offer = field(default_factory=lambda: Offer(()))
    outs: Sequence[torch.Tensor] | None = None
    compute: int = 0  # the program's stream at the start
    ready: int = 0  # the event behind this party's tensors
    message: int = 0  # the offer's number in the table
    done: int = 0  # the event behind the exchange; 0 before it is enqueued
    is_taken: bool = False
    moved_ns: tuple[int, int] = (0, 0)
    result: Sequence[object] | None = None

    def prepare(self, values: Sequence[object], device: torch.device | None, *, are_packed: bool) -> Message:
        """Makes the offer, and allocates the results. A party without memory for that cannot take part.

        Results are allocated on ``device``, or where the tensors are if it is None; ``are_packed`` makes tensors contiguous.
        """
        terms = self.terms
        self.offer = make_offer(terms, self.rank, values, device)
        try:
            if terms.kind is CollectiveKind.BROADCAST and self.rank != terms.root:
                self.outs = [_empty(*self.expected, device)] if self.expected else None
            else:
                if are_packed:
                    self.offer = Offer(tuple(t.contiguous() for t in self.offer.tensors), self.offer.failure)
                shapes = [(t, result_shape(terms, t.shape)) for t in self.offer.tensors]
                self.outs = [_empty(t.dtype, shape, device or t.device) for t, shape in shapes]
        except RuntimeError as error:  # out of memory
            self.offer = Offer((), Failure.capture(error, actor=terms.parties[self.rank], node=terms.label))
        if self.offer.failure is None:
            return Message(Status.OFFER, self.number, self.offer.layout(device))
        return Message(Status.COMPLAINT, self.number, self.offer.complaint())

    def results(self, device: torch.device | None) -> tuple[Sequence[torch.Tensor], bool]:
        """The memory for the results, and whether it is new: a receiver of a broadcast may not have known the shape."""
        if self.terms.kind is CollectiveKind.BROADCAST and self.expected is not None:
            dtype, shape = self.expected
            if not self.outs or (self.outs[0].dtype, tuple(self.outs[0].shape)) != (dtype, shape):
                self.outs = [_empty(dtype, shape, device)]
                return self.outs, True
        return self.outs or [], False


def _empty(dtype: torch.dtype, shape: Sequence[int], device: torch.device | None) -> torch.Tensor:
    return torch.empty(tuple(shape), dtype=dtype, device=device)
