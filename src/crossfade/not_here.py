"""Names of Ray's that crossfade does not have, and what to do instead."""

from __future__ import annotations

__all__ = ["NAMES_OF_ACTORS", "NAMES_OF_RAY"]

_BOOKED = "crossfade.init(num_cpus=..., num_gpus=..., resources=...) says what there is"

NAMES_OF_RAY = {
    "ObjectRef": "crossfade.CallRef and crossfade.CompiledRef are the types of references",
    "available_resources": f"{_BOOKED}; an actor that does not fit is refused with what is free and who holds the rest",
    "cancel": "crossfade.kill(actor) ends an actor with all that it does; a reference that is not wanted may be dropped",
    "cluster_resources": f"{_BOOKED}; by default the cores and GPUs that this process may use",
    "get_gpu_ids": "an actor's first GPU is its torch.cuda.current_device(); graph.plan.devices says who has which",
    "get_runtime_context": "give an actor what it should know about itself to its constructor; os.getpid() tells actors apart",
    "nodes": "a session is on one machine, this one",
}
"""Of the module ``ray``, with hints."""

NAMES_OF_ACTORS = {
    "__ray_call__": "make it a method of the actor's class",
    "__ray_terminate__": "crossfade.kill(actor) ends it",
}
"""Of handles of actors, with hints."""
