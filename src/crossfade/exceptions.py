"""All errors, under their own names and under those that they have in ``ray.exceptions``.

Each of Ray's names catches what crossfade raises where Ray would raise that error: ``RayChannelTimeoutError`` is `TimedOut`, so it
catches a ``get`` and an ``execute`` that took too long.
"""

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
    TaskError,
    TeardownTimeout,
    TimedOut,
    UnknownActor,
    UnknownTransport,
)

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
