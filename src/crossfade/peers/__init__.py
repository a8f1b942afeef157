"""What the ranks of a torch.distributed group share: buffers and signals, and collectives over them that copy engines carry.

The collectives take tensors and a process group, or none for the default one; its buffers are opened by the first call (`groups`),
or by `opening` for those who set sizes. The way from there down: `steps` cuts a collective into *exchanges* and kernels, `exchange`
moves one block between every two ranks, `lane` keeps the buffers and signals that exchanges need. All of that stands on
`crossfade.device.driver`, so it runs on GPUs, on CPU groups over shared memory, and on the fake machine, which proves the ordering.
`replays` captures calls that come again, for the rooms above.

Importing this room imports neither torch nor triton: the names that it has itself are imported when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from crossfade.peers.collectives import (
        all_gather,
        all_reduce,
        all_reduce_coalesced,
        all_to_all,
        broadcast,
        reduce_scatter,
        reduce_scatter_coalesced,
    )
    from crossfade.peers.group import PeerGroup
    from crossfade.peers.groups import close_groups, group_of
    from crossfade.peers.opening import open_group

__all__ = [
    "PeerGroup",
    "all_gather",
    "all_reduce",
    "all_reduce_coalesced",
    "all_to_all",
    "broadcast",
    "close_groups",
    "group_of",
    "open_group",
    "reduce_scatter",
    "reduce_scatter_coalesced",
]

_FILES = {
    "collectives": "all_gather all_reduce all_reduce_coalesced all_to_all broadcast reduce_scatter reduce_scatter_coalesced",
    "group": "PeerGroup",
    "groups": "close_groups group_of",
    "opening": "open_group",
}
_FILE_OF = {name: file for file, names in _FILES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name not in _FILE_OF:
        raise AttributeError(f"module 'crossfade.peers' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"crossfade.peers.{_FILE_OF[name]}"), name)
    return value
