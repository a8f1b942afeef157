"""The ways to send a tensor to the other rank of a pair that `benchmarks.p2p_transfers` measures side by side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from crossfade.p2p import P2P

__all__ = ["Op", "Pinned", "Side", "Waits", "open_side"]


class Waits(Protocol):
    """A transfer that has begun."""

    def wait(self) -> Any:
        """What torch's current stream does next comes after the transfer."""


class Op(NamedTuple):
    """One transfer of a batch."""

    is_send: bool
    tensor: torch.Tensor
    tag: int


class Side(Protocol):
    """One way. ``checks``: the receiver's tensor has the value afterwards. ``has_tags``: tensors may be received in any order."""

    checks: bool
    has_tags: bool

    def isend(self, tensor: torch.Tensor, tag: int) -> Waits:
        """Begins to send to the other rank."""

    def irecv(self, tensor: torch.Tensor, tag: int) -> Waits:
        """Begins to receive from the other rank."""

    def send(self, tensor: torch.Tensor, tag: int) -> None:
        """The call that sends and waits."""

    def recv(self, tensor: torch.Tensor, tag: int) -> None:
        """The call that receives and waits."""

    def batch(self, ops: Sequence[Op]) -> Sequence[Waits]:
        """Begins several transfers by one call, where there is one."""

    def close(self) -> None:
        """Collective."""


class Direct:
    """crossfade's communicator."""

    checks = has_tags = True

    def __init__(self, other: int, device: torch.device, transport: str, waits: str = "host") -> None:
        self._p2p = P2P(device=device, transport=transport, waits=waits)
        self._other = other

    def isend(self, tensor: torch.Tensor, tag: int) -> Waits:
        return self._p2p.isend(tensor, self._other, tag)

    def irecv(self, tensor: torch.Tensor, tag: int) -> Waits:
        return self._p2p.irecv(tensor, self._other, tag)

    def send(self, tensor: torch.Tensor, tag: int) -> None:
        self._p2p.send(tensor, self._other, tag)

    def recv(self, tensor: torch.Tensor, tag: int) -> None:
        self._p2p.recv(tensor, self._other, tag)

    def batch(self, ops: Sequence[Op]) -> Sequence[Waits]:
        return [self.isend(tensor, tag) if is_send else self.irecv(tensor, tag) for is_send, tensor, tag in ops]

    def close(self) -> None:
        self._p2p.close()


class ByGroup:
    """torch.distributed's calls on a group of some backend."""

    checks = True

    def __init__(self, other: int, backend: str) -> None:
        if backend == "crossfade":
            import crossfade.p2p.backend  # noqa: F401
        self._group: Any = dist.new_group(backend=backend)
        self._other = other
        self.has_tags = backend != "nccl"
        # nccl opens its connection at the first transfer, and wants both ranks in one batch there
        token = torch.zeros(1, device="cuda" if backend == "nccl" else "cpu")
        for work in self.batch([Op(True, token, 0), Op(False, token.clone(), 0)]):
            work.wait()

    def isend(self, tensor: torch.Tensor, tag: int) -> Waits:
        return _begun(dist.isend(tensor, self._other, self._group, tag))

    def irecv(self, tensor: torch.Tensor, tag: int) -> Waits:
        return _begun(dist.irecv(tensor, self._other, self._group, tag))

    def send(self, tensor: torch.Tensor, tag: int) -> None:
        dist.send(tensor, self._other, self._group, tag)

    def recv(self, tensor: torch.Tensor, tag: int) -> None:
        dist.recv(tensor, self._other, self._group, tag)

    def batch(self, ops: Sequence[Op]) -> Sequence[Waits]:
        made = [
            dist.P2POp(dist.isend if is_send else dist.irecv, tensor, self._other, self._group, tag)
            for is_send, tensor, tag in ops
        ]
        return [_begun(work) for work in dist.batch_isend_irecv(made)]

    def close(self) -> None:
        dist.destroy_process_group(self._group)


def _begun(work: Any) -> Waits:
    assert work is not None, "both ranks are in the group"
    begun: Waits = work
    return begun


class _Nothing:
    def wait(self) -> None: ...


_NOTHING = _Nothing()


class BarePeer:
    """The limit of copies: the sender copies its tensor onto the other GPU, and nobody says anything to anybody."""

    checks = False
    has_tags = True

    def __init__(self, other: int, device: torch.device) -> None:
        from crossfade.device.cuda import CudaDriver

        self._driver = CudaDriver(torch.cuda.current_device())
        self._there = torch.device("cuda", other % torch.cuda.device_count())
        self._targets: dict[int, torch.Tensor] = {}
        torch.ones(1, device=self._there).copy_(torch.ones(1, device=device))  # peer access
        torch.cuda.synchronize()

    def isend(self, tensor: torch.Tensor, tag: int) -> Waits:
        if tensor.nbytes not in self._targets:
            self._targets = {tensor.nbytes: torch.empty(tensor.nbytes, dtype=torch.uint8, device=self._there)}
            torch.cuda.synchronize(self._there)
        target = self._targets[tensor.nbytes]
        stream = torch.cuda.current_stream().cuda_stream
        self._driver.copy(target.data_ptr(), tensor.data_ptr(), tensor.nbytes, stream)
        return _NOTHING

    def irecv(self, tensor: torch.Tensor, tag: int) -> Waits:
        return _NOTHING

    def send(self, tensor: torch.Tensor, tag: int) -> None:
        self.isend(tensor, tag)

    def recv(self, tensor: torch.Tensor, tag: int) -> None: ...

    def batch(self, ops: Sequence[Op]) -> Sequence[Waits]:
        return [self.isend(op.tensor, op.tag) for op in ops if op.is_send]

    def close(self) -> None:
        self._targets.clear()


class Pinned:
    """The limit of what goes through the host: the sender copies to pinned memory, the receiver from its own, at the same time."""

    checks = False
    has_tags = True

    def __init__(self) -> None:
        self._hosts: dict[int, torch.Tensor] = {}

    def _host(self, num_bytes: int) -> torch.Tensor:
        if num_bytes not in self._hosts:
            is_gpu = torch.cuda.is_available()
            self._hosts = {num_bytes: torch.empty(num_bytes, dtype=torch.uint8, pin_memory=is_gpu)}
        return self._hosts[num_bytes]

    def isend(self, tensor: torch.Tensor, tag: int) -> Waits:
        self._host(tensor.nbytes).copy_(tensor, non_blocking=True)
        return _NOTHING

    def irecv(self, tensor: torch.Tensor, tag: int) -> Waits:
        tensor.copy_(self._host(tensor.nbytes), non_blocking=True)
        return _NOTHING

    def send(self, tensor: torch.Tensor, tag: int) -> None:
        self.isend(tensor, tag)

    def recv(self, tensor: torch.Tensor, tag: int) -> None:
        self.irecv(tensor, tag)

    def batch(self, ops: Sequence[Op]) -> Sequence[Waits]:
        return [(self.isend if op.is_send else self.irecv)(op.tensor, op.tag) for op in ops]

    def close(self) -> None:
        self._hosts.clear()


def open_side(name: str, other: int, device: torch.device) -> Side:
    """A side by its name in tables. Collective."""
    match name:
        case "crossfade":
            return Direct(other, device, "auto")
        case "copies" | "staged":
            return Direct(other, device, "copy" if name == "copies" else name)
        case "copies, streams wait":
            return Direct(other, device, "copy", "stream")
        case "crossfade, backend":
            return ByGroup(other, "crossfade")
        case "gloo" | "NCCL":
            return ByGroup(other, name.lower())
        case "bare copy":
            return BarePeer(other, device)
        case "pinned copy":
            return Pinned()
    raise ValueError(f"there is no side '{name}'")
