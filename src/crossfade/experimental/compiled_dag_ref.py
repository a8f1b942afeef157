"""Ray's import path of the references that ``execute`` gives."""

from crossfade.api import CompiledRef

__all__ = ["CompiledDAGRef"]

CompiledDAGRef = CompiledRef
