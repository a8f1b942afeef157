"""Point-to-point transfers between the ranks of a torch.distributed group: tagged, in any order, by copy engines."""

from crossfade.p2p.carrier import P2PStatistics
from crossfade.p2p.communicator import P2P
from crossfade.p2p.work import Work

__all__ = ["P2P", "P2PStatistics", "Work"]
