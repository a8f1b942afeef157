"""An actor's methods, by name: those of its class, and one that every actor has."""

from __future__ import annotations

from typing import Any

__all__ = ["READY", "method_of"]

READY = "__ray_ready__"  # a method of every actor, as in Ray: it gives True, once the actor is made


def method_of(instance: object, name: str) -> Any:
    """The method of that name, of an actor's instance."""
    return _ready if name == READY else getattr(instance, name)


def _ready() -> bool:
    return True
