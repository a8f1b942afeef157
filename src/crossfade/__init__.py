"""crossfade hides communication behind computation in multi-GPU Python programs, and shows how much it hid.

The names below are the whole public interface. They are imported when first used, so that ``import crossfade`` is quick and
needs neither numpy nor torch.
"""

from __future__ import annotations

from importlib import import_module
from importlib.machinery import EXTENSION_SUFFIXES
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from crossfade.not_here import error_of, watch_imports

if TYPE_CHECKING:
    from crossfade import collective as collective
    from crossfade.api import ActorClass as ActorClass
    from crossfade.api import ActorHandle as ActorHandle
    from crossfade.api import CallRef as CallRef
    from crossfade.api import CompiledGraph as CompiledGraph
    from crossfade.api import CompiledRef as CompiledRef
    from crossfade.api import compile as compile  # noqa: A004
    from crossfade.api import dump as dump
    from crossfade.api import get as get
    from crossfade.api import get_actor as get_actor
    from crossfade.api import init as init
    from crossfade.api import is_initialized as is_initialized
    from crossfade.api import kill as kill
    from crossfade.api import method as method
    from crossfade.api import put as put
    from crossfade.api import remote as remote
    from crossfade.api import shutdown as shutdown
    from crossfade.api import wait as wait
    from crossfade.api.calibrate import calibrate as calibrate
    from crossfade.api.calibrate_tcp import calibrate_tcp as calibrate_tcp
    from crossfade.batches.entry import interleave as interleave
    from crossfade.batches.entry import interleaved as interleaved
    from crossfade.batches.entry import yield_point as yield_point
    from crossfade.errors import ActorDiedError as ActorDiedError
    from crossfade.errors import ActorError as ActorError
    from crossfade.errors import ActorStartError as ActorStartError
    from crossfade.errors import BatchesError as BatchesError
    from crossfade.errors import CapacityExceeded as CapacityExceeded
    from crossfade.errors import ChannelBroken as ChannelBroken
    from crossfade.errors import ChannelClosed as ChannelClosed
    from crossfade.errors import ChannelError as ChannelError
    from crossfade.errors import ChannelTimeout as ChannelTimeout
    from crossfade.errors import CrossfadeError as CrossfadeError
    from crossfade.errors import DeviceError as DeviceError
    from crossfade.errors import GetTimeoutError as GetTimeoutError
    from crossfade.errors import GraphClosed as GraphClosed
    from crossfade.errors import GraphError as GraphError
    from crossfade.errors import MissingDependency as MissingDependency
    from crossfade.errors import MutatedValueError as MutatedValueError
    from crossfade.errors import PlanError as PlanError
    from crossfade.errors import PlanSyntaxError as PlanSyntaxError
    from crossfade.errors import SessionError as SessionError
    from crossfade.errors import StaticShapeError as StaticShapeError
    from crossfade.errors import TaskError as TaskError
    from crossfade.errors import TeardownTimeout as TeardownTimeout
    from crossfade.errors import TimedOut as TimedOut
    from crossfade.errors import TraceError as TraceError
    from crossfade.errors import UnknownActor as UnknownActor
    from crossfade.errors import UnknownTransport as UnknownTransport
    from crossfade.graph.nodes import InputNode as InputNode
    from crossfade.graph.nodes import MultiOutputNode as MultiOutputNode
    from crossfade.plan.parse import parse_plan as parse_plan
    from crossfade.plan.picture import draw_timelines as draw_timelines
    from crossfade.plan.plan import Plan as Plan
    from crossfade.plan.timeline import Span as Span
    from crossfade.plan.timeline import Timeline as Timeline
    from crossfade.profile.recording import Recording as Recording
    from crossfade.profile.recording import record as record
    from crossfade.schedule.cost import CostModel as CostModel
    from crossfade.schedule.workload import Workload as Workload
    from crossfade.types import Transport as Transport

    compiled: bool
    """Whether the hot modules are C extensions, made of the same Python source (``CROSSFADE_COMPILE=1``)."""

_ROOMS = {
    "crossfade.api.calibrate": "calibrate",
    "crossfade.api.calibrate_tcp": "calibrate_tcp",
    "crossfade.api": (
        "ActorClass ActorHandle CallRef CompiledGraph CompiledRef compile dump get get_actor init is_initialized kill method "
        "put remote shutdown wait"
    ),
    "crossfade.batches.entry": "interleave interleaved yield_point",
    "crossfade.errors": (
        "ActorDiedError ActorError ActorStartError BatchesError CapacityExceeded ChannelBroken ChannelClosed "
        "ChannelError ChannelTimeout CrossfadeError DeviceError GetTimeoutError GraphClosed GraphError "
        "MissingDependency MutatedValueError PlanError PlanSyntaxError SessionError StaticShapeError TaskError "
        "TeardownTimeout TimedOut TraceError UnknownActor UnknownTransport"
    ),
    "crossfade.graph.nodes": "InputNode MultiOutputNode",
    "crossfade.plan.parse": "parse_plan",
    "crossfade.plan.picture": "draw_timelines",
    "crossfade.plan.plan": "Plan",
    "crossfade.plan.timeline": "Span Timeline",
    "crossfade.profile.recording": "Recording record",
    "crossfade.schedule.cost": "CostModel",
    "crossfade.schedule.workload": "Workload",
    "crossfade.types": "Transport",
}
# Ray's import paths, also reached as attributes, as in Ray.
_FACADES = ["actor", "collective", "dag", "exceptions", "experimental", "util"]
_ROOM_OF = {name: room for room, names in _ROOMS.items() for name in names.split()}

__all__ = sorted(_ROOM_OF)
__version__ = "0.1.0"

watch_imports()


def __getattr__(name: str) -> Any:
    if name in _ROOM_OF:
        import_module("crossfade.api")  # a program that binds a node will compile it
        value = globals()[name] = getattr(import_module(_ROOM_OF[name]), name)
        return value
    if name in _FACADES:
        return import_module(f"crossfade.{name}")
    if name == "compiled":
        value = globals()[name] = _is_compiled()
        return value
    raise error_of("crossfade", name)


def _is_compiled() -> bool:
    spec = find_spec("crossfade.channels.shm_ring")  # one of the modules in setup.py: all of them are compiled, or none
    return spec is not None and str(spec.origin).endswith(tuple(EXTENSION_SUFFIXES))


def __dir__() -> list[str]:
    return [*__all__, *_FACADES, "__version__", "compiled"]
