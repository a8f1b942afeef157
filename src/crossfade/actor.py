"""Ray's import path of the types of actors, for annotations and ``isinstance``."""

from __future__ import annotations

from crossfade.api.remote import ActorClass, ActorHandle, ActorMethod
from crossfade.not_here import refuse_others

__all__ = ["ActorClass", "ActorHandle", "ActorMethod"]

refuse_others(__name__)
