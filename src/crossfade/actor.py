"""Ray's import path of the types of actors, for annotations and ``isinstance``."""

from crossfade.api.remote import ActorClass, ActorHandle, ActorMethod

__all__ = ["ActorClass", "ActorHandle", "ActorMethod"]
