"""All errors, under their own names and under those that they have in ``ray.exceptions``.

Each of Ray's names catches what crossfade raises where Ray would raise that error: ``RayChannelTimeoutError`` is `TimedOut`, so it
catches a ``get`` and an ``execute`` that took too long.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from crossfade.errors import (
    ActorDiedError,
    ActorError,
    ActorStartError,
    CapacityExceeded,
    ChannelBroken,
    ChannelClosed,
    ChannelError,
    ChannelTimeout,
    CrossfadeError,
    DeviceError,
    GetTimeoutError,
    GraphClosed,
    GraphError,
    MissingDependency,
    MutatedValueError,
    PlanError,
    PlanSyntaxError,
    SessionError,
    StaticShapeError,
    SystemFault,
    TaskError,
    TeardownTimeout,
    TimedOut,
    UnknownActor,
    UnknownTransport,
)
from crossfade.not_here import refuse_others

__all__ = [
    "ActorDiedError",
    "ActorError",
    "ActorStartError",
    "ActorUnavailableError",
    "CapacityExceeded",
    "ChannelBroken",
    "ChannelClosed",
    "ChannelError",
    "ChannelTimeout",
    "CrossfadeError",
    "DeviceError",
    "GetTimeoutError",
    "GraphClosed",
    "GraphError",
    "MissingDependency",
    "MutatedValueError",
    "PlanError",
    "PlanSyntaxError",
    "RayActorError",
    "RayCgraphCapacityExceeded",
    "RayChannelError",
    "RayChannelTimeoutError",
    "RayError",
    "RaySystemError",
    "RayTaskError",
    "SessionError",
    "StaticShapeError",
    "TaskError",
    "TeardownTimeout",
    "TimedOut",
    "UnknownActor",
    "UnknownTransport",
]

RayError = CrossfadeError
RayTaskError = TaskError
RayActorError = ActorError
ActorUnavailableError = ActorDiedError
RayChannelError = ChannelError
RayChannelTimeoutError = TimedOut
RayCgraphCapacityExceeded = CapacityExceeded
RaySystemError = SystemFault

if not TYPE_CHECKING:
    __getattr__ = refuse_others(__name__)
