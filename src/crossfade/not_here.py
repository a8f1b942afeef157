"""Hints for names of Ray's that crossfade does not have: what to use instead, and how a program that looks for one gets the hint.

The modules at Ray's import paths are listed here. A name that one of them does not have is an `AttributeError` with a hint, and a
`ModuleNotFoundError` with the same hint where it is imported: ``from crossfade.dag import FunctionNode``, or, as a module,
``import crossfade.util.collective``.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from types import ModuleType
from typing import Any

__all__ = ["NAMES_OF_ACTORS", "NAMES_OF_RAY", "error_of", "refuse_others", "watch_imports"]

_BOOKED = "crossfade.init(num_cpus=..., num_gpus=..., resources=...) says what there is"
_ONE_HOST = "on one host leave it out; on a Ray cluster take Ray's own"
_MOST_SHOWN = 12
_COMPILED = (
    "graphs are compiled, and their nodes are bound methods of actors: a function becomes a method of an actor's class"
)
_MOVED = "channels are made by compile(); node.with_tensor_transport(...) says how values move"
_NOT_RAISED = "nothing here raises it; RayError catches everything that crossfade raises"

NAMES_OF_RAY = {
    "ObjectRef": "crossfade.CallRef and crossfade.CompiledRef are the types of references",
    "available_resources": f"{_BOOKED}; an actor that does not fit is refused with what is free and who holds the rest",
    "cancel": "crossfade.kill(actor) ends an actor with all that it does; a reference that is not wanted may be dropped",
    "cluster_resources": f"{_BOOKED}; by default the cores and GPUs that this process may use",
    "get_gpu_ids": "an actor's first GPU is its torch.cuda.current_device(); graph.plan.devices says who has which",
    "get_runtime_context": "give an actor what it should know about itself to its constructor; os.getpid() tells actors apart",
    "nodes": "a session is on one machine, this one; on a Ray cluster ray.nodes() tells",
}
"""Of the module ``ray``, with hints."""

NAMES_OF_ACTORS = {
    "__ray_call__": "make it a method of the actor's class",
    "__ray_terminate__": "crossfade.kill(actor) ends it",
}
"""Of handles of actors, with hints."""

_NAMES: dict[str, dict[str, str]] = {
    "crossfade": NAMES_OF_RAY,
    "crossfade.actor": {},
    "crossfade.collective": {},
    "crossfade.dag": {
        "ClassNode": "start actors with Cls.remote(...), and bind their methods",
        "CollectiveOutputNode": "what allreduce.bind(...) and its like give are nodes: DAGNode",
        "DAGInputData": "parts of the input are inp[0], inp['x'] and inp.x",
        "DAGOperationFuture": _MOVED,
        "FunctionNode": _COMPILED,
        "GPUFuture": _MOVED,
        "class_node": "crossfade.dag has ClassMethodNode",
        "collective_node": "what allreduce.bind(...) and its like give are nodes: DAGNode",
        "dag_node": "crossfade.dag has DAGNode",
        "function_node": _COMPILED,
        "plot": "graph.visualize(...) draws a graph",
        "vis_utils": "graph.visualize(...) draws a graph",
    },
    "crossfade.dag.compiled_dag_node": {},
    "crossfade.dag.context": {},
    "crossfade.dag.input_node": {"DAGInputData": "parts of the input are inp[0], inp['x'] and inp.x"},
    "crossfade.dag.output_node": {},
    "crossfade.exceptions": dict.fromkeys(
        (
            "AsyncioActorExit",
            "LocalRayletDiedError",
            "NodeDiedError",
            "ObjectFetchTimedOutError",
            "ObjectFreedError",
            "ObjectLostError",
            "ObjectReconstructionFailedError",
            "ObjectStoreFullError",
            "OutOfDiskError",
            "OutOfMemoryError",
            "OwnerDiedError",
            "PendingCallsLimitExceeded",
            "PlasmaObjectNotAvailable",
            "RuntimeEnvSetupError",
            "TaskCancelledError",
            "TaskUnschedulableError",
        ),
        _NOT_RAISED,
    )
    | {
        "ActorUnschedulableError": "an actor that does not fit is refused at once, with an ActorStartError",
        "ActorAlreadyExistsError": "a name that is taken is a SessionError",
        "ActorHandleNotFoundError": "a name that no living actor has is an UnknownActor, which is a ValueError too",
        "UserCodeException": "an error in a method is a TaskError, and of the method's own type too",
        "WorkerCrashedError": "the death of an actor's process is an ActorDiedError",
    },
    "crossfade.experimental": {
        "internal_kv": "the driver's program passes settings to the constructors of actors; there is no store of a cluster's",
        "tqdm_ray": "what actors print is shown with their names",
    },
    "crossfade.experimental.channel": dict.fromkeys(
        (
            "AwaitableBackgroundReader",
            "AwaitableBackgroundWriter",
            "BufferedSharedMemoryChannel",
            "CachedChannel",
            "Channel",
            "ChannelContext",
            "CompositeChannel",
            "IntraProcessChannel",
            "ReaderInterface",
            "SynchronousReader",
            "SynchronousWriter",
            "TorchTensorAcceleratorChannel",
            "WriterInterface",
        ),
        _MOVED,
    )
    | {
        "nccl_group": "with_tensor_transport(Transport.NCCL) moves tensors by NCCL",
    },
    "crossfade.experimental.channel.communicator": {},
    "crossfade.experimental.channel.cpu_communicator": {},
    "crossfade.experimental.channel.torch_tensor_type": {},
    "crossfade.experimental.collective": {
        "create_collective_group": "collectives are nodes of graphs: allreduce.bind([a.grad.bind(x), b.grad.bind(x)])",
    },
    "crossfade.experimental.compiled_dag_ref": {
        "CompiledDAGFuture": "await compiled_dag.execute_async(x) gives a CompiledDAGRef, and await on that the value",
    },
    "crossfade.experimental.util": {},
    "crossfade.experimental.util.types": {},
    "crossfade.util": {
        "ActorPool": "bind the methods of several actors in one graph, or call them and use crossfade.wait",
        "actor_pool": "bind the methods of several actors in one graph, or call them and use crossfade.wait",
        "collective": "crossfade.collective has collectives as nodes of graphs",
        "get_node_ip_address": _ONE_HOST,
        "placement_group": f"placement groups: {_ONE_HOST}",
        "queue": "bind methods in a graph: what one returns is the other's argument",
        "remove_placement_group": _ONE_HOST,
        "state": "crossfade.dump() says what every actor is doing",
    },
    "crossfade.util.scheduling_strategies": {},
}
"""The modules that have Ray's import paths; for each, the names that it does not have, with hints."""


def error_of(module: str, name: str) -> AttributeError:
    """Makes the error for a name that one of these modules does not have."""
    return AttributeError(_message(module, name))


def refuse_others(module: str) -> None:
    """Gives one of these modules a ``__getattr__`` for names that it lacks. Imports from it are watched from now on. (Where a
    ``__getattr__`` is written in the module, type checkers accept any name.)
    """

    def refuse(name: str) -> Any:
        if f"{module}.{name}" in _NAMES:  # submodules are attributes too, as in Ray
            return import_module(f"{module}.{name}")
        raise error_of(module, name)

    names = vars(sys.modules[module])
    names.setdefault("__path__", [])  # without it, `from module import name` would not ask `_Watch`
    names["__getattr__"] = refuse


def watch_imports() -> None:
    """Makes failing imports from these modules raise an error with a hint. No other import is affected."""
    sys.meta_path.append(_Watch())


class _Watch:
    """A finder behind all others, so it is asked only for modules that no other finder has found."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        parent, _, child = name.rpartition(".")
        if parent in _NAMES and not child.startswith("__"):
            raise ModuleNotFoundError(
                _message(parent, child)
            )  # without `name=`, with which Python would replace the message


def _message(module: str, name: str) -> str:
    problem = f"module {module!r} has no attribute {name!r}"
    hint = "" if name.startswith("__") else _NAMES[module].get(name) or _nearest(module, name)
    return f"{problem}\nhint: {hint}" if hint else problem


def _nearest(module: str, name: str) -> str:
    from crossfade.hints import nearest

    inside = [each.removeprefix(f"{module}.") for each in _NAMES if each.startswith(f"{module}.")]
    known = [*getattr(sys.modules.get(module), "__all__", ()), *(each for each in inside if "." not in each)]
    shown = (
        f"it has {', '.join(known)}" if len(known) <= _MOST_SHOWN else "docs/from_ray.md lists what is here of Ray's"
    )
    return nearest(name, known, shown)
