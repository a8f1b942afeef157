"""A communicator over named pipes, whose every send waits until the other side has received: the strictest that there is."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from crossfade.experimental.channel import Communicator


class FifoCommunicator(Communicator):
    """Ranks are the positions of the handles. The folder has the pipes, and ``log``: a line for each call, with its rank."""

    def __init__(self, folder: Path, actors: list[Any]) -> None:
        self._folder = folder
        self._actors = list(actors)
        self._rank: int | None = None
        self._fds: dict[str, int] = {}
        ranks = range(len(actors))
        for name in [f"{kind}-{source}-{target}" for kind in ("data", "ack") for source in ranks for target in ranks]:
            if not (folder / name).exists():
                os.mkfifo(folder / name)

    def log(self) -> list[str]:
        """What was called until now, in no order across actors."""
        path = self._folder / "log"
        return path.read_text().splitlines() if path.exists() else []

    def _note(self, what: str) -> None:
        with (self._folder / "log").open("a") as file:
            file.write(f"{self._rank} {what}\n")

    def _fd(self, name: str) -> int:
        if name not in self._fds:
            self._fds[name] = os.open(self._folder / name, os.O_RDWR)  # opens at once, and has no end
        return self._fds[name]

    def _put(self, data: bytes, peer: int) -> None:
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(self._fd(f"data-{self._rank}-{peer}"), rest) :]
        os.read(self._fd(f"ack-{peer}-{self._rank}"), 1)

    def _take(self, size_bytes: int, peer: int) -> bytes:
        data = b""
        while len(data) < size_bytes:
            data += os.read(self._fd(f"data-{peer}-{self._rank}"), size_bytes - len(data))
        os.write(self._fd(f"ack-{self._rank}-{peer}"), b"!")
        return data

    def initialize(self, rank: int) -> None:
        self._rank = rank
        self._note("initialize")

    def get_actor_handles(self) -> list[Any]:
        return self._actors

    def get_rank(self, actor: Any) -> int:
        return [each._ray_actor_id for each in self._actors].index(actor._ray_actor_id)

    def get_self_rank(self) -> int | None:
        return self._rank

    def send(self, value: Any, peer_rank: int) -> None:
        self._note(f"send {tuple(value.shape)} to {peer_rank}")
        self._put(value.numpy().tobytes(), peer_rank)

    def recv(self, shape: tuple[int, ...], dtype: Any, peer_rank: int, allocator: Any = None) -> Any:
        import torch

        self._note(f"recv {shape} from {peer_rank}")
        tensor = allocator(shape, dtype)
        data = bytearray(self._take(tensor.nbytes, peer_rank))
        tensor.copy_(torch.frombuffer(data, dtype=dtype).view(shape))
        return tensor

    @property
    def recv_stream(self) -> Any:
        raise NotImplementedError

    @property
    def send_stream(self) -> Any:
        raise NotImplementedError

    def _all(self, tensor: Any) -> list[Any]:
        import torch

        found = []
        for rank in range(len(self._actors)):
            for other in range(len(self._actors)):
                if self._rank == rank != other:
                    self._put(tensor.numpy().tobytes(), other)
            if rank == self._rank:
                found.append(tensor)
            else:
                data = bytearray(self._take(tensor.nbytes, rank))
                found.append(torch.frombuffer(data, dtype=tensor.dtype).view(tensor.shape))
        return found

    def _reduced(self, tensor: Any, op: Any) -> Any:
        import torch

        stacked = torch.stack(self._all(tensor))
        return {"sum": stacked.sum(0), "max": stacked.amax(0)}[str(op)]

    def allgather(self, send_buf: Any, recv_buf: Any) -> None:
        import torch

        self._note("allgather")
        recv_buf.copy_(torch.cat(self._all(send_buf)))

    def allreduce(self, send_buf: Any, recv_buf: Any, op: Any) -> None:
        self._note(f"allreduce {op}")
        recv_buf.copy_(self._reduced(send_buf, op))

    def reducescatter(self, send_buf: Any, recv_buf: Any, op: Any) -> None:
        self._note(f"reducescatter {op}")
        recv_buf.copy_(self._reduced(send_buf, op).chunk(len(self._actors))[self._rank])

    def destroy(self) -> None:
        self._note("destroy")
        for fd in self._fds.values():
            os.close(fd)

    def get_transport_name(self) -> str:
        return "cpu"

    @classmethod
    def generate_communicator_id(cls) -> str:
        return "fifo"


class Worker:
    """Makes tensors, and does little with them."""

    def ones(self, n: int) -> Any:
        import torch

        return torch.ones(n)

    def add(self, *tensors: Any) -> Any:
        return sum(tensors)

    def pair(self, n: int) -> Any:
        import torch

        return {"a": torch.full((n,), 2.0), "b": (torch.arange(n), torch.empty(0, 3)), "c": "text"}

    def total(self, value: Any) -> list[Any]:
        return [value["a"].sum().item(), value["b"][0].sum().item(), tuple(value["b"][1].shape), value["c"]]

    def maybe(self, n: int) -> Any:
        import torch

        if n == 3:
            raise ValueError("no 3 here")
        return torch.full((2,), float(n)) if n % 2 else n

    def echo(self, value: Any) -> Any:
        return value

    def pid(self) -> int:
        return os.getpid()


@pytest.fixture(autouse=True, scope="module")
def helper_travels_by_value() -> Iterator[None]:
    """Actors import nothing of the tests."""
    module = sys.modules[__name__]
    cloudpickle.register_pickle_by_value(module)
    yield
    cloudpickle.unregister_pickle_by_value(module)
