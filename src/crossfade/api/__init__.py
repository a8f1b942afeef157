"""What the user holds: the one place where graph, plan, schedule and engines meet."""

from crossfade.api.compiled import CompiledGraph, compile_graph
from crossfade.api.dump import dump
from crossfade.api.refs import CallRef, CompiledRef, get
from crossfade.api.remote import ActorClass, ActorHandle, kill, method, remote
from crossfade.api.session import init, is_initialized, shutdown
from crossfade.api.signals import install_answer
from crossfade.graph.hook import install_compiler

__all__ = [
    "ActorClass",
    "ActorHandle",
    "CallRef",
    "CompiledGraph",
    "CompiledRef",
    "dump",
    "get",
    "init",
    "is_initialized",
    "kill",
    "method",
    "remote",
    "shutdown",
]

install_compiler(compile_graph)
install_answer(dump)
