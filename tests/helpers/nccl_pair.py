"""Both ends of an NCCL channel in one process, with gloo in NCCL's place and CPU tensors in that of device tensors."""

from __future__ import annotations

import datetime
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist

from crossfade.device.context import DeviceContext
from crossfade.edges.by_nccl import IncomingNccl, OutgoingNccl
from crossfade.edges.host_copies import Joiner
from crossfade.edges.nccl_link import NcclLink
from crossfade.edges.reader import DeviceReader
from crossfade.edges.writer import DeviceWriter
from crossfade.host.memory import Memory
from tests.helpers.copy_pair import Edge, host_home, pair_of
from tests.helpers.threads import together

LIMIT_S = 20.0


class _Nothing:
    """What is enqueued on a device: no host waits for it."""

    def wait(self) -> None:
        pass


class StandIn:
    """A group of gloo's with the ways of NCCL's: what is sent goes in order in the background, and no host waits for that."""

    def __init__(self, store: Any, rank: int, home: DeviceContext, address: str = "127.0.0.1") -> None:
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
        options._timeout = datetime.timedelta(seconds=LIMIT_S)
        self._group: Any = dist.ProcessGroupGloo(store, rank, 2, options)
        self._queue: SimpleQueue[tuple[list[torch.Tensor], int, int] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self.num_sent = self.num_received = 0
        self.ended = ""

    def _run(self) -> None:
        while (sent := self._queue.get()) is not None:
            try:
                self._group.send(*sent).wait()
            except RuntimeError:
                return  # the other side is gone

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Any:
        self.num_sent += 1
        self._queue.put((tensors, rank, tag))
        return _Nothing()

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Any:
        self.num_received += 1
        return self._group.recv(tensors, rank, tag)

    def shutdown(self) -> None:
        self._end("shutdown")

    def abort(self) -> None:
        self._end("abort")

    def _end(self, how: str) -> None:
        self.ended = how
        self._queue.put(None)
        self._thread.join(LIMIT_S)
        self._group = None


def open_links(
    pair: tuple[str, str], homes: Sequence[Sequence[DeviceContext]], make_group: Any = StandIn
) -> list[NcclLink]:
    """Both sides of a link, each with the devices on which it sends or receives."""
    store = Memory.create("store", 0)
    try:
        return together(lambda index: NcclLink(store, pair, pair[index], homes[index], make_group), range(2))
    finally:
        store.close()


@contextmanager
def open_nccl_channels(
    depth: int,
    num_readers: int,
    num_channels: int = 1,
    make_home: Callable[[], DeviceContext] = host_home,
    make_group: Any = StandIn,
    num_sources: int = 1,
) -> Iterator[list[tuple[DeviceWriter, list[DeviceReader]]]]:
    """Channels from one writer to the same readers, over one link to each. On leaving, nothing may be held."""
    edges = [Edge(depth, num_readers, num_sources=num_sources, make_home=make_home) for _ in range(num_channels)]
    sources, targets = edges[0].sources, edges[0].targets
    links = [open_links(("a", f"b{index}"), (sources, homes), make_group) for index, homes in enumerate(targets)]
    channels = []
    for number, edge in enumerate(edges):
        name = f"c{number}"
        writer = DeviceWriter(OutgoingNccl(edge.ring_writer(name), sources, [link[0] for link in links]))
        readers = []
        for index, (_, link) in enumerate(links):
            reader = DeviceReader(edge.ring_reader(index, name), IncomingNccl(name, index, link, Joiner(None)))
            link.readers.append(reader)
            readers.append(reader)
        channels.append((writer, readers))
    with ExitStack() as stack:
        for edge, channel in zip(edges, channels, strict=True):
            stack.enter_context(edge.opened(*channel))
        ends: list[Any] = [end for writer, readers in channels for end in (writer, *readers)]
        stack.callback(lambda: [end.close() for end in ends])
        yield channels
    for edge in edges:
        edge.close_homes([True] * len(edge.homes))


@contextmanager
def open_nccl_ends(depth: int, num_readers: int, **options: Any) -> Iterator[tuple[DeviceWriter, list[DeviceReader]]]:
    with open_nccl_channels(depth, num_readers, **options) as channels:
        yield channels[0]


open_nccl_pair = pair_of(open_nccl_ends)
