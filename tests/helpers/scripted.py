"""A script that calls Python. (Without annotations that are texts, which torch.jit does not read.)"""

import torch
from torch import Tensor, nn

from crossfade.batches import yield_point


class Scripted(nn.Module):
    """Adds one. Others may run in a method of it that is Python's."""

    @torch.jit.ignore  # type: ignore[untyped-decorator]
    def collective(self, x: Tensor) -> Tensor:
        yield_point()
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.collective(x) + 1  # type: ignore[no-any-return]
