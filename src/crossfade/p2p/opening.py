"""Opening a communicator: the ranks' boards, this rank's sides, and its pairs with all ranks."""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING, NamedTuple

from crossfade.device.borrowed import torch_or_raise
from crossfade.device.capabilities import judge, read_facts, read_topology, require
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
from crossfade.topology import LinkKind
from crossfade.types import Transport

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

__all__ = ["Opened", "open_ranks", "ranks_of"]

_HINT = "leave out transport='copy': values go through the host's memory then"


class Opened(NamedTuple):
    """What a communicator is made of."""

    rank: int
    sides: dict[bool, Side]  # by whether it is the host's memory
    pairs: list[Pair]  # by rank, this one's with itself among them
    alarms: list[Alarm]  # by rank
    names: list[str]  # by rank
    pidfds: dict[int, int]  # of the other ranks


def open_ranks(ranks: Ranks, device: torch.device, transport: Transport, buffer_bytes: int, timeout_s: float) -> Opened:
    """Opens everything that the ranks share. All of them call it. ``device``: a GPU, and then the CPU as well, or the CPU."""
    rank, num_ranks = ranks.rank, ranks.num_ranks
    layout = BoardLayout(num_ranks)
    numbers = count()
    drivers: list[TimedDriver] = [HostDriver(timeout_s)]
    is_direct = [k == rank or transport is not Transport.STAGED for k in range(num_ranks)]
    if device.type == "cuda":
        drivers.append(_cuda_driver(device))
        is_direct = _find_direct(ranks, drivers[-1].device, transport)
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
                is_staged = not is_direct[k] and is_host == (device.type == "cpu")
                shared = side.staged if is_staged else side.direct
                counters = Counters(
                    side.driver, board, layout.words_for(k, is_host=is_host), f"rank {rank}'s windows for rank {k}"
                )
                theirs = counters
                if k != rank:
                    place = layout.words_for(rank, is_host=is_host)
                    theirs = Counters(side.driver, party.memory, place, f"rank {k}'s windows for rank {rank}")
                memories = OpenedMemories(shared.memory, names[k], shared.exports if k == rank else None)
                ends[is_host] = Ends(shared, counters, theirs, memories)
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


def _cuda_driver(device: torch.device) -> TimedDriver:
    """This rank's GPU. Raises a `DeviceError` if it cannot do what transfers need."""
    from crossfade.device.cuda import CudaDriver

    require(judge(read_facts()))
    torch = torch_or_raise()
    with torch.cuda.device(device):
        return CudaDriver(torch.cuda.current_device())


def _find_direct(ranks: Ranks, device: int, transport: Transport) -> list[bool]:
    """For each rank, whether its GPU and this one reach each other's memory and may use that. Collective.

    GPUs are told apart by UUID, since a process may see only some of the host's. Both ranks of a pair must come to one answer.
    """
    own = [_number_of(gpu.uuid) for gpu in read_topology().devices]
    links = read_facts().links
    theirs = [number for (number,) in ranks.gather([own[device]])]
    seen = [own.index(number) if number in own else None for number in theirs]
    reached = [there == device or links.get((device, there or 0)) is LinkKind.NVLINK for there in seen]
    rows = ranks.gather([transport is not Transport.STAGED and each for each in reached])
    direct = [bool(rows[ranks.rank][k] and rows[k][ranks.rank]) or k == ranks.rank for k in range(ranks.num_ranks)]
    if transport is Transport.COPY and not all(direct):
        far = ", ".join(f"rank {k}" for k, is_direct in enumerate(direct) if not is_direct)
        raise DeviceError(f"no NVLink connects this rank's GPU and that of {far}, or one of them is hidden", hint=_HINT)
    return direct


def _number_of(uuid: str) -> int:
    return int(uuid.removeprefix("GPU-").replace("-", "")[:15], 16)
