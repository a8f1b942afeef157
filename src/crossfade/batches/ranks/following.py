"""Runs that are compared between ranks when they have ended, one run late.

To compare each collective before it starts costs a round trip through the store each time, so only the first run of a kind does
that (`Agreement.compare`). All runs are summed up: a rank says how many collectives it has issued in each group, with a checksum
of their order, and looks at what the rank before it in the group has said. All ranks agree if each agrees with the one
before it, and one message and one answer of the store are enough, however many ranks there are. A rank looks when it has ended
its next run; the other one has said its sums by then, so hardly anybody waits::

    rank 0   run 0 | says 0 | run 1 | says 1, looks for 0 | run 2 | says 2, looks for 1 | ...
    rank 1     run 0 | says 0 | run 1 | says 1, looks for 0 | run 2 | ...

It is the run before that is compared, also where the other rank has said more, so that both raise in the same call. Sums are those
of all runs so far: a rank that has gone on so far that the run is not there any more is compared when this one has come there. A
rank that raises says so too, and those that have ended the same run raise in their turn.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple
from zlib import crc32

from crossfade.errors import BatchesError

Ranks = tuple[int, ...]
"""Of a group, in its order."""
Issued = tuple[int, str, int]
"""A part's collective: the part, the name, the bytes (0 where ranks may give different ones)."""
_STOPPED, _PAUSE_S = "stopped", 2e-4
_NUM_SAID = 4
"""Runs that a rank's word has. One of two ranks can be three runs further on when the other one looks for its last run."""


class _Sum(NamedTuple):
    """What a rank has issued in one group, in all runs."""

    number: int = 0
    checksum: int = 0
    last: str = "nothing"

    def after(self, issued: Sequence[Issued], text: bytes) -> _Sum:
        """With those of one more run, which are this text too."""
        part, name, size_bytes = issued[-1]
        size = f" of {size_bytes} bytes" if size_bytes else ""
        checksum = crc32(text, self.checksum)
        return _Sum(self.number + len(issued), checksum, f"batch {part}, {name}{size}")


_Sums = dict[Ranks, _Sum]
_Said = dict[int, _Sums]
"""By the run."""


class Follower:
    """One rank's side.

    Attributes:
        waited_s: how long it has waited for others, in all.

    Args:
        store: of torch.distributed; with a prefix of its own.
        ranks: of the group of all that compare, in whose subgroups collectives are issued.
        rank: this one.
        limit: how long it waits for the others.
    """

    def __init__(self, store: Any, ranks: Ranks, rank: int, limit: timedelta) -> None:
        self._store = store
        self._ranks = ranks
        self._rank = rank
        self._limit = limit
        self._is_alone = len(ranks) == 1
        self.waited_s = 0.0
        self._run = -1
        self._sums: _Sums = {}
        self._said: _Said = {}  # of the last runs that did not raise
        self._texts: dict[Ranks, tuple[Sequence[Issued], bytes]] = {}  # of what was issued last
        self._ahead: dict[int, _Said] = {}  # of ranks that were further on
        self._before: set[int] = set()
        self._add_group(ranks)
        store.compare_set(_STOPPED, "", "[]")
        store.set(f"said {rank}", "[]")

    def _add_group(self, ranks: Ranks) -> None:
        before = ranks[ranks.index(self._rank) - 1]
        if before != self._rank and before in self._ranks:
            self._before.add(before)

    def begin(self) -> None:
        """A run begins. All ranks have equally many."""
        self._run += 1

    def end(self, order: Mapping[Ranks, Sequence[Issued]]) -> None:
        """The run has ended; this rank has issued these. Looks at the run before.

        Raises:
            BatchesError: the ranks have disagreed, one of the others has raised, or one does not come in time.
        """
        self._sums = self._with(order)
        before = max(self._said, default=None)
        self._said = dict([*self._said.items(), (self._run, self._sums)][-_NUM_SAID:])
        if self._is_alone:
            return
        said = json.dumps([(run, list(sums.items())) for run, sums in self._said.items()])
        try:
            self._store.set(f"said {self._rank}", said)
            if before is not None:
                for rank, known in list(self._ahead.items()):
                    self._compare(rank, before, known)
                self._wait_for(before)
        except RuntimeError:  # the store is gone: the process that had it has ended, and waits for nobody
            self._is_alone = True

    def fail(self, error: BaseException, order: Mapping[Ranks, Sequence[Issued]]) -> BatchesError | None:
        """The run has raised, after these: tells the others. Gives the error that says what has led to it, if that is known."""
        if self._is_alone:
            return None
        cause: BatchesError | None = None
        with suppress(RuntimeError):  # the store may be what has failed
            stopped, answers = self._look()
            if stopped and stopped[0] == self._run and stopped[1] != self._rank:
                error.add_note(f"crossfade: rank {stopped[1]} raised in the same run: {stopped[2]}")
            for rank, said in answers.items():
                cause = cause or self._why_alone(rank, said, self._with(order))
            self._stop(str(cause or f"{type(error).__name__}: {error}"))
        return cause

    def _why_alone(self, rank: int, said: _Said, own: _Sums) -> BatchesError | None:
        """A rank that has ended this run, and has issued less in it than this one so far."""
        if self._run not in said:
            return None
        for ranks, one in own.items():
            other = said[self._run].get(ranks, _Sum())
            if rank in ranks and other.number < one.number:
                return self._disagreement(self._run, ranks, rank, one, other)
        return None

    def _with(self, order: Mapping[Ranks, Sequence[Issued]]) -> _Sums:
        sums = dict(self._sums)
        for ranks, issued in order.items():
            self._add_group(ranks)
            sums[ranks] = sums.get(ranks, _Sum()).after(issued, self._text_of(ranks, issued))
        return sums

    def _text_of(self, ranks: Ranks, issued: Sequence[Issued]) -> bytes:
        """What is issued, as text. It is kept, since the next run of the kind issues the same; comparing is ten times as fast."""
        before, text = self._texts.get(ranks, ((), b""))
        if issued != before:
            text = repr(issued).encode()
            self._texts[ranks] = issued, text
        return text

    def _wait_for(self, run: int) -> None:
        """Until the ranks before this one have ended a run; compares on the way."""
        begin_s: float | None = None  # of the wait, if there is one
        end_s = time.monotonic() + self._limit.total_seconds()
        while True:
            stopped, answers = self._look()
            for rank, said in answers.items():
                self._compare(rank, run, said)
            if stopped and stopped[0] in self._said and stopped[1] != self._rank:
                raise BatchesError(f"rank {stopped[1]} has raised: {stopped[2]}", hint="its own traceback says where")
            late = [rank for rank, said in answers.items() if max(said, default=-1) < run]
            now_s = time.monotonic()
            if not late:
                self.waited_s += 0.0 if begin_s is None else now_s - begin_s
                return
            begin_s = now_s if begin_s is None else begin_s
            if now_s > end_s:
                limit = f"{self._limit.total_seconds():g} s"
                raise self._told(
                    f"the ranks disagree: rank {self._rank} has ended run {run}; {limit} later ranks {late} have not"
                )
            time.sleep(_PAUSE_S)

    def _look(self) -> tuple[Any, dict[int, _Said]]:
        """Who has raised, and what the ranks before this one have said last."""
        others = sorted(self._before)
        stopped, *answers = map(json.loads, self._store.multi_get([_STOPPED, *(f"said {rank}" for rank in others)]))
        said = [
            {run: {tuple(ranks): _Sum(*each) for ranks, each in sums} for run, sums in answer} for answer in answers
        ]
        return stopped, dict(zip(others, said, strict=True))

    def _compare(self, rank: int, run: int, said: _Said) -> None:
        if run not in said:
            if min(said, default=run) > run:
                self._ahead.setdefault(rank, said)
            return
        self._ahead.pop(rank, None)
        own, theirs = self._said[run], said[run]
        for ranks in own.keys() | theirs.keys():
            one, other = own.get(ranks, _Sum()), theirs.get(ranks, _Sum())
            if {rank, self._rank} <= set(ranks) and one != other:
                raise self._disagreement(run, ranks, rank, one, other)

    def _disagreement(self, run: int, ranks: Ranks, rank: int, ours: _Sum, theirs: _Sum) -> BatchesError:
        return self._told(
            f"the ranks disagree in run {run}, in the group of ranks {ranks}: rank {self._rank} has come to {ours.number} "
            f"collectives in all, the last one '{ours.last}', rank {rank} to {theirs.number}, the last one '{theirs.last}'; what "
            "this run and later ones gave is not valid"
        )

    def _told(self, said: str) -> BatchesError:
        self._stop(said)
        return BatchesError(
            said, hint="each rank has to issue the same collectives in the same order, also without crossfade"
        )

    def _stop(self, said: str) -> None:
        self._store.set(_STOPPED, json.dumps((self._run, self._rank, said)))
