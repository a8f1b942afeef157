"""Collectives of parts by process groups of their own.

Collectives of one group run in order: behind the other part's, which may not be ready.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist

from crossfade.batches.carriers.carrier import MethodCall, Work, group_name

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_inside: Any = dist.distributed_c10d
_cuda: Any = torch.cuda

_COPIES: WeakKeyDictionary[ProcessGroup, dict[tuple[int, int | None], ref[ProcessGroup]]] = WeakKeyDictionary()
"""Copies of groups, by part and blocks; all handles of a process share them. torch keeps them: a group that outlives
destroy_process_group ends its threads at any later time."""


_NUMBERS: dict[tuple[str, ...], Iterator[int]] = {}
"""Of copies of the group of this name and these ranks. They continue where a group is made again over its store."""


class _Names:
    """Names groups as the threads say that make them. torch's own names count the groups that a rank is in: ranks that are in other
    groups too would wait for each other under two names.

    (No lock is held meanwhile: making a group waits for its other ranks, whose threads may make another one first.)
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._names: dict[int, str] = {}  # by thread
        self._before: Any = None  # what names groups else

    @contextmanager
    def use(self, name: str) -> Iterator[None]:
        """A group that this thread makes inside has this name."""
        thread = threading.get_ident()
        with self._lock:
            if not self._names:
                self._before, _inside._process_group_name = _inside._process_group_name, self._name_of
            self._names[thread] = name
        try:
            yield
        finally:
            with self._lock:
                del self._names[thread]
                if not self._names:
                    _inside._process_group_name = self._before

    def _name_of(self, *args: Any, **kwargs: Any) -> Any:
        return self._names.get(threading.get_ident()) or self._before(*args, **kwargs)


_NAMES = _Names()


@contextmanager
def _by_itself(ranks: list[int]) -> Iterator[None]:
    """A group of these ranks is made inside, by none but them. Where the default group is bound to a device, torch would split the
    new communicator off that group's, which all of its ranks have to do, and do at once.
    """
    default = _inside._get_default_group()
    bound = default.bound_device_id
    if bound is None or len(ranks) == default.size():
        yield
        return
    default.bound_device_id = None
    try:
        yield
    finally:
        default.bound_device_id = bound


class ProcessGroups:
    """Communicators of torch's own backend (NCCL, gloo). Part 0 has the module's own groups, the others have copies of them.

    Attributes:
        max_ctas: the most blocks that a kernel of NCCL may take; part 0 has copies too then. None for NCCL's choice.
    """

    num_not_replayed = 0

    def __init__(self, max_ctas: int | None = None) -> None:
        self.max_ctas = max_ctas

    def of_part(self, group: ProcessGroup, part: int) -> ProcessGroup:
        """The part's own copy of a group, which is made when it is first asked for. All ranks of the group ask in one order."""
        if part == 0 and self.max_ctas is None:
            return group
        kind = part, self.max_ctas
        copies = _COPIES.get(group)
        known = copies.get(kind) if copies is not None else None
        copy = known() if known is not None else None
        if copy is not None:
            return copy
        if group not in _inside._world.pg_map:
            return group
        copy = self._copy(group)
        _COPIES.setdefault(group, {})[kind] = ref(copy)
        return copy

    def _copy(self, group: ProcessGroup) -> ProcessGroup:
        ranks, backend, options = dist.get_process_group_ranks(group), str(dist.get_backend(group)), None
        limit = timeout_of(group)
        if self.max_ctas is not None and backend == "nccl":
            options = _inside.ProcessGroupNCCL.Options()
            options.config.max_ctas = self.max_ctas
            options._timeout = limit
        if _cuda.is_initialized():
            torch.cuda.synchronize()  # a communicator may be split off one that must have nothing to do then
        if backend not in ("nccl", "gloo"):  # one for each kind of device
            backend = str(_inside._world.pg_backend_config[group])
        number = next(_NUMBERS.setdefault((group.group_name, *map(str, ranks)), itertools.count()))
        with _NAMES.use(f"crossfade {group.group_name} {number}"), _by_itself(ranks):
            made: Any = dist.new_group(ranks, limit, backend, pg_options=options, use_local_synchronization=True)
        # new_group sorts the ranks: where that changes a rank's number in the group, roots and parts would be others.
        return made if dist.get_process_group_ranks(made) == ranks else group  # type: ignore[no-any-return,unused-ignore]

    def start(self, part: int, call: MethodCall) -> Any:
        if call.options is not None:
            call.options.asyncOp = True  # else NCCL would take the caller's stream, and gloo the caller's time
        return call.original(self.of_part(call.group, part), *call.args, **call.kwargs)

    def start_packet(
        self, part: int, packet: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, Work | None]:
        name = group_name(packet, args, kwargs)
        if name is not None:
            own = self.of_part(_inside._resolve_process_group(name), part).group_name
            args = tuple(own if each is name else each for each in args)
            kwargs = {key: own if each is name else each for key, each in kwargs.items()}
        return packet(*args, **kwargs), None


def timeout_of(group: Any) -> timedelta:
    """How long its collectives may take: torch's default for all backends where it does not say."""
    with suppress(AttributeError, RuntimeError):
        return group._get_backend(group._device_types[0]).options._timeout  # type: ignore[no-any-return]
    return _inside.default_pg_timeout  # type: ignore[no-any-return]
