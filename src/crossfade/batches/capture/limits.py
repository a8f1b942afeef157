"""What must not be captured, with the reason."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from crossfade.batches.capture.held import WITHOUT_CAPTURE
from crossfade.batches.wrappers.obstacles import place_of, reduces_gradients
from crossfade.errors import BatchesError

_REDUCES = "reduces gradients as they come, which a graph's do not"


def why_not_captured(module: nn.Module, kinds: set[str], *, trains: bool) -> str:
    """Why no graph can be made of a module's calls, on GPUs; nothing if one can, as far as it is known before.

    ``kinds``: of devices, where the arguments are.
    """
    if "cpu" in kinds:
        return "an argument is on the CPU: a graph would keep its value as a constant"
    if any(not each.is_cuda for own in (module.parameters(), module.buffers()) for each in own):
        return "a parameter or buffer is not on the GPU: a graph would keep its value as a constant"
    if not trains:
        return ""
    for name, each in module.named_modules():
        if reduces_gradients(each):
            return f"{place_of(name, each)} {_REDUCES}"
    return ""


@contextmanager
def without_reducers() -> Iterator[None]:
    """Raises where a module is called that reduces gradients: what is captured need not be inside the modules that are known."""

    def look(module: nn.Module, _: object) -> None:
        if reduces_gradients(module):
            raise BatchesError(f"{type(module).__name__} {_REDUCES}", hint=WITHOUT_CAPTURE)

    hook = register_module_forward_pre_hook(look)
    try:
        yield
    finally:
        hook.remove()
