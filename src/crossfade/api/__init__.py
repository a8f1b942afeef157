"""What the user holds: the one place where graph, plan, schedule and engines meet."""

from crossfade.api.compiled import CompiledGraph, compile_graph
from crossfade.api.compiling import compile  # noqa: A004
from crossfade.api.dump import dump
from crossfade.api.getting import get
from crossfade.api.refs import CallRef, CompiledRef, put
from crossfade.api.remote import ActorClass, ActorHandle, get_actor, kill, method, remote
from crossfade.api.session import init, is_initialized, shutdown
from crossfade.api.signals import install_answer
from crossfade.api.wait import wait
from crossfade.graph.hook import install_compiler

__all__ = [
    "ActorClass",
    "ActorHandle",
    "CallRef",
    "CompiledGraph",
    "CompiledRef",
    "compile",
    "dump",
    "get",
    "get_actor",
    "init",
    "is_initialized",
    "kill",
    "method",
    "put",
    "remote",
    "shutdown",
    "wait",
]

install_compiler(compile_graph)
install_answer(dump)
