"""Errors of any type in a pickle, with all that they have.

Python pickles an error as its type, called with ``args`` again. That fails where ``__init__`` takes something else, and loses what
an error keeps outside of ``args`` and ``__dict__``. So such errors are taken apart, and put together without their ``__init__``.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from types import FunctionType, GetSetDescriptorType, MemberDescriptorType
from typing import Any, TypeVar

__all__ = ["ByParts", "fill", "members_of", "new_of", "whole"]

_Error = TypeVar("_Error", bound=BaseException)


def new_of(kind: type[_Error], args: tuple[object, ...]) -> _Error:
    """An instance without its ``__init__``. A few builtins (MemoryError) allow only the root's ``__new__`` in a mixed class."""
    try:
        return kind.__new__(kind, *args)
    except TypeError:
        return BaseException.__new__(kind, *args)


def fill(
    error: BaseException, args: tuple[object, ...], attributes: Mapping[str, Any], members: Mapping[str, Any]
) -> None:
    """Gives an error what another one has: its ``args``, its ``__dict__``, and what `members_of` found."""
    for name, value in members.items():
        with suppress(Exception):
            setattr(error, name, value)
    error.__dict__.update(attributes)
    error.args = args


def members_of(error: BaseException) -> dict[str, Any]:
    """What an error keeps outside ``__dict__`` and ``args``: an OSError its errno and file names, an ImportError its name. The
    object of an AttributeError stays where it is.
    """
    found: dict[str, Any] = {}
    for base in type(error).__mro__:
        if base is BaseException:
            break
        for name, member in vars(base).items():
            if isinstance(member, MemberDescriptorType | GetSetDescriptorType) and name != "obj" and name[:2] != "__":
                with suppress(Exception):  # one that is not set
                    found.setdefault(name, getattr(error, name))
    return found


def _needs_parts(kind: type[BaseException]) -> bool:
    """Whether Python's way to pickle its errors, which calls the type with ``args``, may fail, since ``__init__`` takes what it
    likes, or lose something.
    """
    own = ("__reduce__", "__reduce_ex__", "__getstate__", "__setstate__")
    is_lost = isinstance(kind.__init__, FunctionType) or issubclass(kind, AttributeError | NameError)
    return is_lost and not any(isinstance(getattr(kind, name, None), FunctionType) for name in own)


class ByParts:
    """An error in a pickle that is put together without its ``__init__``."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __reduce__(self) -> Any:
        error = self.error
        return _put_together, (type(error), error.args, vars(error), members_of(error))


def whole(error: BaseException | None) -> BaseException | ByParts | None:
    """What to pickle, so that the error arrives with all that it has."""
    return ByParts(error) if error is not None and _needs_parts(type(error)) else error


def _put_together(
    kind: type[BaseException], args: tuple[object, ...], attributes: Mapping[str, Any], members: Mapping[str, Any]
) -> BaseException:
    error = new_of(kind, args)
    fill(error, args, attributes, members)
    return error
