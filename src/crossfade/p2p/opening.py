"""Opening a communicator: the ranks' boards, this rank's sides, and its pairs with all ranks."""

from __future__ import annotations

from itertools import count, permutations
from typing import TYPE_CHECKING, NamedTuple

from crossfade.device.borrowed import torch_or_raise
from crossfade.device.capabilities import check_pairs, judge, read_facts, require
from crossfade.device.driver import TimedDriver
from crossfade.device.host_driver import HostDriver
from crossfade.errors import DeviceError
from crossfade.host.memory import Memory
from crossfade.host.processes import open_pidfd
from crossfade.p2p.board import Alarm, BoardLayout, Inbox, LetterBox, format_board
from crossfade.p2p.copies import Copies, Ends
from crossfade.p2p.memory import OpenedMemories, Side
from crossfade.p2p.pair import Pair
from crossfade.p2p.windows import Counters
from crossfade.peers.rendezvous import Ranks, meet

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

__all__ = ["Opened", "open_ranks", "ranks_of"]

_HINT = "open it with device='cpu' and send CPU tensors, or use torch.distributed's own send and recv"


class Opened(NamedTuple):
    """What a communicator is made of."""

    rank: int
    sides: dict[bool, Side]  # by whether it is the host's memory
    pairs: list[Pair]  # by rank, this one's with itself among them
    alarms: list[Alarm]  # by rank
    names: list[str]  # by rank
    pidfds: dict[int, int]  # of the other ranks


def open_ranks(ranks: Ranks, device: torch.device, buffer_bytes: int, timeout_s: float) -> Opened:
    """Opens everything that the ranks share. All of them call it. ``device``: a GPU, and then the CPU as well, or the CPU."""
    rank, num_ranks = ranks.rank, ranks.num_ranks
    layout = BoardLayout(num_ranks)
    numbers = count()
    drivers: list[TimedDriver] = [HostDriver(timeout_s)]
    if device.type == "cuda":
        drivers.append(_cuda_driver(ranks, device))
    board = Memory.create("p2p", layout.size_bytes)
    own = format_board(board, layout)
    parties = meet(ranks, board)
    try:
        names = [f"rank {k} (process {party.pid})" for k, party in enumerate(parties)]
        mappings = [own if k == rank else party.memory.map(layout.letters_bytes) for k, party in enumerate(parties)]
        alarms = [Alarm(mapping) for mapping in mappings]
        sides = {side.is_host: side for side in (Side(driver, numbers, buffer_bytes) for driver in drivers)}
        pairs = []
        for k, party in enumerate(parties):
            ends = {}
            for is_host, side in sides.items():
                counters = Counters(
                    side.driver, board, layout.words_for(k, is_host=is_host), f"rank {rank}'s windows for rank {k}"
                )
                theirs = counters
                if k != rank:
                    place = layout.words_for(rank, is_host=is_host)
                    theirs = Counters(side.driver, party.memory, place, f"rank {k}'s windows for rank {rank}")
                memories = OpenedMemories(side.driver, names[k], side.exports if k == rank else None)
                ends[is_host] = Ends(side, counters, theirs, memories)
            outbox = LetterBox(mappings[k], layout.letters_of(rank), alarms[k])
            pairs.append(Pair(names[k], party.pid, Inbox(own, layout.letters_of(k)), outbox, Copies(ends, outbox)))
        pidfds = {k: open_pidfd(party.pid) for k, party in enumerate(parties) if k != rank}
    finally:
        for party in parties:
            party.memory.close()
    ranks.gather([0])  # all have come here
    return Opened(rank, sides, pairs, alarms, names, pidfds)


def ranks_of(group: ProcessGroup | None, device: torch.device) -> Ranks:
    """The ranks of a group, None for the default one. Raises a `DeviceError` if there is none, or this process is not in it."""
    distributed = torch_or_raise().distributed
    chosen = distributed.group.WORLD if group is None else group
    if chosen is None:
        raise DeviceError("there is no process group", hint="call torch.distributed.init_process_group first")
    if distributed.get_rank(chosen) < 0:
        raise DeviceError("this process is not in the group", hint="only the ranks of a group open it")
    is_gpu = device.type == "cuda" and "gloo" not in str(distributed.get_backend_config(chosen))
    return Ranks.of_group(chosen, device if is_gpu else torch_or_raise().device("cpu"))


def _cuda_driver(ranks: Ranks, device: torch.device) -> TimedDriver:
    """This rank's GPU, if every other rank's GPU can reach it."""
    from crossfade.device.cuda import CudaDriver

    torch = torch_or_raise()
    with torch.cuda.device(device):
        index = torch.cuda.current_device()
    facts = read_facts()
    require(judge(facts))
    devices = {row[0] for row in ranks.gather([index])}
    check_pairs(facts.links, permutations(devices, 2), hint=_HINT)
    return CudaDriver(index)
