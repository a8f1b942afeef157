"""One way to do a whole operator, with its parameters; its text is what caches, ranks and people read."""

from __future__ import annotations

import re
from dataclasses import dataclass

__all__ = ["PLAIN", "Candidate"]

_NAME = re.compile(r"[a-z][a-z0-9_]*")
_TEXT = re.compile(r"([^()]*)(?:\((.*)\))?", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way, such as ``rounds(rounds=2)``.

    Attributes:
        name: what is done.
        parameters: name and value of each, in the order in which the text has them.

    Raises:
        ValueError: a name is no small identifier, or occurs twice, or a value is no integer.
    """

    name: str
    parameters: tuple[tuple[str, int], ...] = ()

    def __post_init__(self) -> None:
        names = [name for name, _ in self.parameters]
        for name in (self.name, *names):
            if not _NAME.fullmatch(name):
                raise ValueError(f"{name!r} is no name of a candidate or a parameter\nhint: small letters, digits, _")
        if len(set(names)) < len(names):
            raise ValueError(f"candidate {self.name} has a parameter twice: {', '.join(names)}")
        if any(type(value) is not int for _, value in self.parameters):
            raise ValueError(f"candidate {self.name} has a parameter that is no integer: {self.parameters!r}")

    def __str__(self) -> str:
        if not self.parameters:
            return self.name
        return f"{self.name}({', '.join(f'{name}={value}' for name, value in self.parameters)})"

    @classmethod
    def parse(cls, text: str) -> Candidate:
        """Reads what ``str`` gives.

        Raises:
            ValueError: it is something else.
        """
        matched = _TEXT.fullmatch(text)
        if matched is None:
            raise ValueError(f"{text!r} is no candidate\nhint: such as 'rounds(rounds=2)'")
        name, inside = matched.groups()
        pairs = [part.partition("=") for part in (inside or "").split(", ") if part]
        try:
            found = cls(name, tuple((key, int(value)) for key, _, value in pairs))
        except ValueError:
            found = None
        if found is None or str(found) != text:
            raise ValueError(f"{text!r} is no candidate\nhint: such as 'rounds(rounds=2)'")
        return found


PLAIN = Candidate("plain")
"""The vendor's product, then the vendor's collective. Every operator has it."""
