"""Algorithms with their parameters, as values: what is chosen, measured, printed and kept on disk.

A candidate's text is its name and its parameters, ``rounds(rounds=2)``, or the name alone where it has none; `Candidate.parse`
reads both. `PARAMETERS` lists all names; the files of the operators say which function each name stands for.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Self

from crossfade.ops.algorithms import fused
from crossfade.ops.calls.job import Operator, Shape
from crossfade.ops.calls.products import fits, least_rounds

if TYPE_CHECKING:
    from crossfade.peers.group import PeerGroup


class Parameter(NamedTuple):
    """A parameter of an algorithm."""

    default: int  # what it is if it is not given
    least: int = 1  # the smallest value
    is_shown: bool = True  # also where it has its default


PARAMETERS: Mapping[str, Mapping[str, Parameter]] = {
    "plain": {},
    "rounds": {
        "rounds": Parameter(1),
        "lag": Parameter(0, least=0, is_shown=False),
        "taper": Parameter(1, is_shown=False),
    },
    "fused": {},
}
"""The parameters of every algorithm, by its name."""

_TEXT = re.compile(r"(\w+)\s*(?:\(\s*((?:\w+\s*=\s*\d+\s*,?\s*)*)\))?")
_PAIR = re.compile(r"(\w+)\s*=\s*(\d+)")


@dataclass(frozen=True, slots=True)
class Candidate:
    """An algorithm for an operator, with its parameters. Equal candidates give equal bits, and are hashable.

    Args:
        name: one of `PARAMETERS`.
        parameters: (name, value) pairs in any order; those that are left out have their defaults.

    Attributes:
        name: of the algorithm.
        parameters: all of them, in the order of `PARAMETERS`.

    Raises:
        ValueError: there is no such algorithm or parameter, or it is given twice, or a value is too small.
    """

    name: str
    parameters: tuple[tuple[str, int], ...] = ()

    def __post_init__(self) -> None:
        known = PARAMETERS.get(self.name)
        if known is None:
            raise ValueError(f"there is no candidate '{self.name}'\nhint: one of {', '.join(PARAMETERS)}")
        given = dict(self.parameters)
        if len(given) < len(self.parameters):
            names = ", ".join(name for name, _ in self.parameters)
            raise ValueError(f"'{self.name}' has a parameter twice: {names}\nhint: give each once")
        for name in given:
            if name not in known:
                has = f"has {', '.join(known)}" if known else "has no parameters"
                raise ValueError(f"'{self.name}' has no parameter '{name}'\nhint: it {has}")
        whole = tuple((name, given.get(name, known[name].default)) for name in known)
        for name, value in whole:
            if value < known[name].least:
                raise ValueError(f"{name} of '{self.name}' is {value}\nhint: {known[name].least} is the least")
        object.__setattr__(self, "parameters", whole)

    @classmethod
    def of(cls, name: str, **parameters: int) -> Self:
        """The candidate with these parameters."""
        return cls(name, tuple(parameters.items()))

    @property
    def arguments(self) -> dict[str, int]:
        """The parameters, by name."""
        return dict(self.parameters)

    def __str__(self) -> str:
        known = PARAMETERS[self.name]
        inside = ", ".join(
            f"{name}={value}" for name, value in self.parameters if known[name].is_shown or value != known[name].default
        )
        return f"{self.name}({inside})" if inside else self.name

    @classmethod
    def parse(cls, text: str) -> Self:
        """What `str` gave.

        Raises:
            ValueError: it is no candidate's text.
        """
        match = _TEXT.fullmatch(text.strip())
        if match is None:
            raise ValueError(f"'{text}' is no candidate\nhint: such as plain, or rounds(rounds=2)")
        return cls(match[1], tuple((name, int(value)) for name, value in _PAIR.findall(match[2] or "")))


PLAIN = Candidate("plain")
BASELINES = frozenset({"plain", "fused"})
"""Names of algorithms that are torch's and NCCL's own."""


_ROUNDS = (1, 2, 4)
_SUM_ROUNDS = ((2, 1, 1), (2, 0, 3), (2, 1, 3), (4, 1, 1))
"""(rounds, lag, taper) that are tried for an all-reduce too."""
_LEAST_LENGTH = 16
"""Of a round's part: shorter ones are never worth a launch."""
_TILE_ROWS = 128


def candidates_for(shape: Shape, group: PeerGroup) -> list[Candidate]:
    """The candidates that are worth a try, the same on all ranks; `PLAIN` comes first where torch.distributed has the group."""
    found = [] if group.process_group is None else [PLAIN]
    if group.is_staged:  # kernels reach no other rank's memory there
        return found
    if found and fused.is_offered(shape, group):
        found.append(Candidate("fused"))
    return [*found, *_rounds(shape, group)]


def _rounds(shape: Shape, group: PeerGroup) -> Iterator[Candidate]:
    """As few rounds as the buffers allow, and more while parts are not too short."""
    length = -(-shape.m // shape.num_ranks)
    row_bytes = (shape.k if shape.operator == Operator.ALL_GATHER else shape.n) * shape.item_bytes
    slot_bytes = group.lane().slot_bytes
    if shape.num_ranks == 1 or not fits(slot_bytes, row_bytes):
        return
    least = least_rounds(slot_bytes, length, row_bytes)
    for rounds in sorted({least, *(rounds for rounds in _ROUNDS if rounds > least)}):
        if rounds == least or length >= rounds * _LEAST_LENGTH:
            yield Candidate.of("rounds", rounds=rounds)
    if shape.operator == Operator.ALL_REDUCE and least == 1:
        for rounds, lag, taper in _SUM_ROUNDS:
            if length >= rounds * taper * _TILE_ROWS:
                yield Candidate.of("rounds", rounds=rounds, lag=lag, taper=taper)
