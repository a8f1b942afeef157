"""Two actors that no session has, and calls of one of them as nodes."""

from __future__ import annotations

from typing import Any

from crossfade.graph.nodes import ActorInfo, MethodNode, bind

ACTOR = ActorInfo("Worker0", "Worker", "s", {"forward": 1, "backward": 1, "split": 2, "_private": 1})
OTHER = ActorInfo("Worker1", "Worker", "s", {"forward": 1})


def call(*args: Any, **kwargs: Any) -> MethodNode:
    """A node of the first one's ``forward``."""
    node = bind(ACTOR, "forward", args, kwargs)
    assert isinstance(node, MethodNode)
    return node
