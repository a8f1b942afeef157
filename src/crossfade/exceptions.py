"""All errors, under their own names and under those that they have in ``ray.exceptions``.

Each of Ray's names catches what crossfade raises where Ray would raise that error: ``RayChannelTimeoutError`` is `TimedOut`, so it
catches a ``get`` and an ``execute`` that took too long.
"""

from __future__ import annotations

from crossfade import errors
from crossfade.errors import *  # noqa: F403
from crossfade.not_here import refuse_others

__all__ = [
    "ActorUnavailableError",
    "RayActorError",
    "RayCgraphCapacityExceeded",
    "RayChannelError",
    "RayChannelTimeoutError",
    "RayError",
    "RaySystemError",
    "RayTaskError",
]
__all__ += errors.__all__

RayError = errors.CrossfadeError
RayTaskError = errors.TaskError
RayActorError = errors.ActorError
ActorUnavailableError = errors.ActorDiedError
RayChannelError = errors.ChannelError
RayChannelTimeoutError = errors.TimedOut
RayCgraphCapacityExceeded = errors.CapacityExceeded
RaySystemError = errors.SystemFault

refuse_others(__name__)
