"""Opening a communicator: the ranks' boards, this rank's sides, and its pairs with all ranks."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from functools import cache, partial
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple

from crossfade.device.borrowed import torch_or_raise
from crossfade.device.capabilities import judge, read_facts, read_topology, require
from crossfade.device.driver import HOST, TimedDriver
from crossfade.device.host_driver import HostDriver
from crossfade.device.watchdog import DeathReport, Watchdog
from crossfade.errors import ChannelBroken, DeviceError
from crossfade.host.memory import Memory
from crossfade.host.processes import open_pidfd
from crossfade.host.tcp import Stream, open_streams
from crossfade.p2p.board import Alarm, BoardLayout, NearLetters, SendMark, format_board
from crossfade.p2p.copies import Copies
from crossfade.p2p.far import FarCopies
from crossfade.p2p.memory import OpenedMemories, Side
from crossfade.p2p.pair import Pair
from crossfade.p2p.payload import Transport, Waits
from crossfade.p2p.pull_streams import Budget
from crossfade.p2p.windows import Counters, Ends
from crossfade.p2p.wire import Wire
from crossfade.peers.rendezvous import Party, Ranks, meet_near
from crossfade.topology import LinkKind

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

_NUM_LANDED = 8
"""Where streams wait ahead, a value may take this part of the memory for values that are copied first."""

_NUM_QUEUES = 8
"""What CUDA takes where ``CUDA_DEVICE_MAX_CONNECTIONS`` does not say it."""

_HINT = "leave out transport='copy': values go through the host's memory then"


class Opened(NamedTuple):
    """What a communicator is made of."""

    rank: int
    sides: dict[bool, Side]  # by whether it is the host's memory
    pairs: list[Pair]  # by rank, this one's with itself among them
    own_alarm: Alarm
    alarms: list[Alarm | None]  # by rank; None for those of other hosts
    pidfds: dict[int, int]  # of the other ranks of this host

    watchdog: Watchdog | None  # releases the streams of this rank's GPU that wait for a rank that has died

    def close(self) -> None:
        """Gives everything back; nothing may be under way."""
        if self.watchdog is not None:
            for pidfd in self.pidfds.values():
                self.watchdog.forget(pidfd)
            self.watchdog.close()
        for pidfd in self.pidfds.values():
            os.close(pidfd)
        for pair in self.pairs:
            pair.carrier.close()
        for side in self.sides.values():
            side.close()


def open_ranks(
    ranks: Ranks, device: torch.device, transport: Transport, waits: Waits, buffer_bytes: int, timeout_s: float
) -> Opened:
    """Opens everything that the ranks share. All of them call it. ``device``: a GPU, and then the CPU as well, or the CPU."""
    rank, num_ranks = ranks.rank, ranks.num_ranks
    numbers = count()
    drivers: list[TimedDriver] = [HostDriver(timeout_s)]
    if device.type == "cuda":
        drivers.append(_cuda_driver(device))
    layout = BoardLayout(num_ranks)
    board = Memory.create("p2p", layout.size_bytes)
    own = format_board(board, layout)
    parties = meet_near(ranks, board)
    try:
        if transport is Transport.TCP:
            parties = _alone(parties, rank)
        is_direct = [transport is not Transport.STAGED] * num_ranks
        if device.type == "cuda":
            is_direct = _find_direct(ranks, parties, drivers[-1].device, transport)
        if len({asked for (asked,) in ranks.gather([int(waits is Waits.STREAM)])}) > 1:
            raise ValueError("some ranks were opened with waits='stream', and some without\nhint: all give the same")
        is_ahead = waits is Waits.STREAM and device.type == "cuda"
        sides = {}
        for driver in drivers:
            landed_bytes = buffer_bytes // _NUM_LANDED if is_ahead and driver.device != HOST else 0
            budget = _budget_of(driver.device) if landed_bytes else None
            more: dict[str, Any] = {"landed_bytes": landed_bytes, "pull_budget": budget, "is_ahead": is_ahead}
            sides[driver.device == HOST] = Side(driver, numbers, buffer_bytes, **more)
        far = [k for k, party in enumerate(parties) if party is None]
        streams = open_streams(rank, far, ranks.gather, timeout_s) if _is_anywhere(ranks, far) else {}
        own_alarm = Alarm(own)
        alarms: list[Alarm | None] = []
        pairs = []
        for k, party in enumerate(parties):
            if party is None:
                alarms.append(None)
                pairs.append(_open_far(streams[k], k, sides.values(), own_alarm))
                continue
            mapping = own if k == rank else party.memory.map(layout.letters_bytes)
            alarms.append(Alarm(mapping))
            name = f"rank {k} (process {party.pid})"
            rows = own, layout.letters_of(k), mapping, layout.letters_of(rank)
            letters = NearLetters(*rows, Alarm(mapping))
            # Not with itself: what a rank sends to itself, its own host must send.
            mark = SendMark(*rows) if is_ahead and k != rank else None
            ends = {}
            for is_host, side in sides.items():
                is_staged = k != rank and not is_direct[k] and is_host == (device.type == "cpu")
                boards = (
                    (board, layout.words_for(k, is_host=is_host)),
                    (party.memory, layout.words_for(rank, is_host=is_host)),
                )
                ends[is_host] = _open_ends(side, boards, name, is_own=k == rank, is_staged=is_staged)
            pairs.append(Pair(name, party.pid, letters, Copies(ends, letters), mark))
        pidfds = {k: open_pidfd(party.pid) for k, party in enumerate(parties) if party is not None and k != rank}
    finally:
        for party in parties:
            if party is not None:
                party.memory.close()
    ranks.gather([0])  # all have come here
    return Opened(rank, sides, pairs, own_alarm, alarms, pidfds, _watch(sides.get(False), pairs, pidfds))


@cache
def _budget_of(device: int) -> Budget:
    """For this process's pull streams on a GPU, by the hardware queues that CUDA spreads its streams over."""
    connections = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "")
    return Budget(int(connections) if connections.isdecimal() else _NUM_QUEUES)


def _watch(side: Side | None, pairs: Sequence[Pair], pidfds: Mapping[int, int]) -> Watchdog | None:
    """``side``: of the GPU."""
    if side is None:
        return None
    watchdog = Watchdog(side.driver)
    for rank, pidfd in pidfds.items():
        pair = pairs[rank]
        mark = partial(pair.carrier.suspect, died(pair.name))
        watchdog.watch(pair.name, pidfd, pair.carrier.signals, side.awaiting, _ignore, before_release=mark)
    return watchdog


def died(name: str) -> ChannelBroken:
    """The error for what needed a rank that is dead."""
    return ChannelBroken(f"{name} died")


def _ignore(report: DeathReport) -> None: ...


def _is_anywhere(ranks: Ranks, far: Sequence[int]) -> bool:
    """Whether any rank has one on another host. Collective."""
    return any(number for (number,) in ranks.gather([len(far)]))


def _alone(parties: list[Party | None], rank: int) -> list[Party | None]:
    """As if all other ranks were on other hosts."""
    for k, party in enumerate(parties):
        if party is not None and k != rank:
            party.memory.close()
    return [party if k == rank else None for k, party in enumerate(parties)]


def _open_ends(
    side: Side, boards: tuple[tuple[Memory, int], tuple[Memory, int]], name: str, *, is_own: bool, is_staged: bool
) -> Ends:
    """What transfers of one kind with a rank of this host need. ``boards``: this rank's counters towards it, and the reverse."""
    shared = side.staged if is_staged else side.direct
    own = theirs = Counters(side.driver, *boards[0], f"this rank's windows for {name}")
    if not is_own:
        theirs = Counters(side.driver, *boards[1], f"windows of {name} for this rank")
    return Ends(shared, side.short, own, theirs, OpenedMemories((side.direct, side.staged), name, is_own=is_own))


def _open_far(stream: Stream, rank: int, sides: Iterable[Side], alarm: Alarm) -> Pair:
    """The pair with a rank of another host. ``alarm``: this rank's own."""

    def enter_thread() -> None:
        for side in sides:
            side.driver.enter_thread()

    name = f"rank {rank} (of another host)"
    wire = Wire(stream, name, alarm.ring, enter_thread)
    return Pair(name, None, wire, FarCopies(wire))


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


def _find_direct(ranks: Ranks, parties: Sequence[Party | None], device: int, transport: Transport) -> list[bool]:
    """For each rank, whether its GPU and this one reach each other's memory and may use that. Collective.

    GPUs are told apart by UUID, since a process may see only some of the host's. Both ranks of a pair must come to one answer.
    """
    own = [_number_of(gpu.uuid) for gpu in read_topology().devices]
    links = read_facts().links
    theirs = [number for (number,) in ranks.gather([own[device]])]
    seen = [own.index(number) if number in own else None for number in theirs]
    reached = [there == device or links.get((device, there or 0)) is LinkKind.NVLINK for there in seen]
    rows = ranks.gather([int(transport is not Transport.STAGED and each) for each in reached])
    direct = [bool(rows[ranks.rank][k] and rows[k][ranks.rank]) or k == ranks.rank for k in range(ranks.num_ranks)]
    apart = [k for k, party in enumerate(parties) if party is not None and not direct[k]]
    if transport is Transport.COPY and apart:
        names = ", ".join(f"rank {k}" for k in apart)
        text = f"no NVLink connects this rank's GPU and that of {names}, or one of them is hidden from the other rank"
        raise DeviceError(text, hint=_HINT)
    return direct


def _number_of(uuid: str) -> int:
    return int(uuid.removeprefix("GPU-").replace("-", "")[:15], 16)
