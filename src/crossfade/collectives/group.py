"""Collectives of device tensors: hosts meet in a table, then enqueue; nobody waits for a GPU.

    start        allocate what comes out | record `ready` on the compute stream | say the offer to all
    once all     have said theirs: wait `ready` | exchange | record `done`, on a stream of the group's own
    try_finish   as soon as that is enqueued: the compute stream waits `done`, and the program gets the tensors

Where the program only writes to others what comes out, the compute stream does not wait: it goes on with the next execution.
Another stream of the group's waits in its place, and is torch's current one while such a write is enqueued.

Because everybody draws the same conclusion from the same offers, each party enqueues its part of an exchange only when it is known
that all others enqueue theirs, or have done so (PL-5). Whoever comes last enqueues at once. For those who came early a
thread of the group does, should their main thread be busy: what others send behind an exchange may be the very thing for
which a method waits. A main thread that is at hand does it itself, which is quicker, and before each method it sees to it that
nothing is left for the thread to enqueue (`DeviceGroup.enqueue_all`).

Where the device is the CPU (`device.host_driver`) an exchange runs in whoever enqueues it, and waits for the others. So there it is
always the thread that does it, and the program goes on (PL-2). That is the one difference between the two.

CPU tensors, where the device is a GPU, are brought to it and back by the thread: nobody can use them before they are there.

**Memory.** What comes out is allocated in `start`, on the compute stream and before `ready`, so that no kernel that still uses that
memory is overtaken. Only who receives a broadcast may learn the shape later: that memory belongs to the group's stream, and
torch is told who uses it. What goes in is held until `done` has happened.

**Spans.** What is recorded of a collective lies between two events on the group's stream: from the moment when this party's
tensors are there (and what the group did before is done) to the moment when what comes out is. It shows waits for others as well.

**Ends.** A party that says that it has ended starts nothing more, and still does its part of what all have offered; others who
hear of it end as well, so for each offer it becomes sure that it is met or that it is not. A party gives its buffers back when
all others have said that their streams have done with them, or have died. All this is the thread's work, which closing does not
wait for beyond a time limit.
"""

from __future__ import annotations

import select
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from crossfade.collectives.end import DeviceCollective, Mover, Task
from crossfade.collectives.table import Said, Status, Table
from crossfade.collectives.terms import (
    STAGED,
    Meeting,
    Offer,
    conclude,
    layout_of,
    make_offer,
    result_shape,
    staged_in,
)
from crossfade.device.borrowed import device_of
from crossfade.device.home import DeviceHome
from crossfade.errors import ChannelBroken, ChannelError, CrossfadeError, Failure
from crossfade.host.doorbell import Bell
from crossfade.types import CollectiveKind

__all__ = ["DeviceGroup"]

_STAGED = STAGED.encode()
_SLICE_S = 0.05
_PAUSE_S = 0.0005


class DeviceGroup:
    """One party's part in what a set of parties does together.

    Args:
        table: where they meet.
        mover: moves their tensors.
        home: the party's device.
        parties: everybody, in the order of the table.
        bells: everybody's doorbell.
        pidfds: of the others' processes, by name.
        give_back: closes all of these; called last of all.
    """

    def __init__(
        self,
        table: Table,
        mover: Mover,
        home: DeviceHome,
        parties: Sequence[str],
        bells: Mapping[str, Bell],
        pidfds: Mapping[str, int],
        give_back: Callable[[], None],
    ) -> None:
        self.home = home
        self.device = device_of(home.device)
        self._table = table
        self._mover = mover
        self._parties = tuple(parties)
        me = next(party for party in parties if party not in pidfds)
        self._bell = bells[me]
        self._bells = [bells[party] for party in parties if party != me]
        self._pidfds = dict(pidfds)
        self._give_back = give_back
        self._ends: list[DeviceCollective] = []
        self._queue: deque[Task] = deque()
        self._kept: deque[Task] = deque()
        self._spare_events: list[int] = []
        self._turn = threading.Lock()  # of who enqueues
        self._guard = threading.Lock()  # of the queue's beginning and end
        self._moved = threading.Condition()  # told when something was enqueued, or never will be
        self._release = threading.Lock()  # of who lets streams go, or gives back what they wait on
        self._reason = ""
        self._is_closing = self._is_ending = self._is_let_go = False
        self._stream = home.driver.create_stream(f"collectives of {', '.join(parties)}", is_urgent=True)
        self._torch_stream: Any = None if home.is_host else _as_torch(self._stream, home.device)
        self._leaving: int | None = None
        """The stream on which what comes out is there for those who only write it to others; made for the first of them."""
        self._thread = threading.Thread(target=self._run, name="crossfade-collectives", daemon=True)
        self._thread.start()

    def collective(self, meeting: Meeting, number: int, rank: int, num_outputs: int) -> DeviceCollective:
        """This party's end of collective ``number`` of the plan, in which it has the given rank and gets so many values."""
        end = DeviceCollective(self, meeting, number, rank, num_outputs)
        self._ends.append(end)
        return end

    # Starting

    def start(self, end: DeviceCollective, values: Sequence[object]) -> None:
        """Offers, and goes on as far as that is possible now."""
        offer, outs = self._prepare(end, make_offer(end.meeting, end.rank, values, self.device))
        compute = self.home.compute_stream()
        if offer.failure is None:
            said = Said(Status.OFFER, end.number, offer.layout(self.device))
        else:
            said = Said(Status.COMPLAINT, end.number, offer.complaint())
        with self._guard:
            if self._is_ending:
                end.raise_if_ended()
                raise ChannelBroken(f"{end.meeting.label} is broken: another party closed it")
            self.home.driver.record_event(end.ready, compute)
            self._queue.append(Task(end, offer, self._table.say(said), outs, compute))
            self._table.await_some(True)
        if self.home.is_host:
            if self.can_move():
                self._table.own.wake.post()
            return
        for bell in self._bells:
            bell.ring_if_asleep()
        self.pump()

    def _prepare(self, end: DeviceCollective, offer: Offer) -> tuple[Offer, list[torch.Tensor] | None]:
        """In one piece each, with memory for what comes out; without that this party cannot take part."""
        if offer.failure is not None:
            return offer, None
        meeting = end.meeting
        is_given = meeting.kind is CollectiveKind.BROADCAST and end.rank != meeting.root
        try:
            if is_given:
                return offer, [self._empty(*end.expected)] if end.expected else None
            offer = Offer(tuple(tensor.contiguous() for tensor in offer.tensors))
            return offer, [self._empty(t.dtype, result_shape(meeting, t.shape)) for t in offer.tensors]
        except RuntimeError as error:  # out of memory
            failure = Failure.capture(error, actor=meeting.parties[end.rank], node=meeting.label)
            return Offer((), failure), None

    def _empty(self, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
        return torch.empty(tuple(shape), dtype=dtype, device=self.device)

    # Meeting and moving

    def can_move(self) -> bool:
        """A cheap look: whether everybody has come to what was started first."""
        try:
            return self._table.has_all(self._queue[0].number)
        except IndexError:
            return False

    def _may_move(self) -> bool:
        return self.can_move() and not self._reason

    def pump(self) -> None:
        """Enqueues all that everybody has come to, in the order in which it was started."""
        while self._may_move():
            if not self._turn.acquire(False):
                return  # whoever has the turn looks once more behind it
            is_for_thread = False
            try:
                while self._may_move() and not is_for_thread:
                    if self._do(self._queue[0]):
                        self._drop_first()
                    else:
                        is_for_thread = True
            except Exception as error:
                self._give_up(str(error) if isinstance(error, CrossfadeError) else f"{type(error).__name__}: {error}")
            finally:
                self._turn.release()
            if is_for_thread:
                self._table.own.wake.post()  # now that it can have the turn
                return

    def enqueue_all(self) -> None:
        """Before a method: waits until this party's part of all that everybody has come to is enqueued.

        A value that the method uses may have been sent behind such an exchange. If the method then loads a kernel, the driver waits
        for the device, and may hold up the very thread that has still to enqueue what the device waits for.
        """
        if not self._queue or self.home.is_host:  # there the thread does not enqueue an exchange, but runs it
            return
        self.pump()
        with self._moved:
            while self._is_behind():
                self._moved.wait(_SLICE_S)

    def _is_behind(self) -> bool:
        with self._guard:
            return not self._reason and any(not t.done and self._table.has_all(t.number) for t in self._queue)

    def _tell_moved(self) -> None:
        with self._moved:
            self._moved.notify_all()

    def _drop_first(self) -> None:
        with self._guard:
            self._queue.popleft()
            if not self._queue:
                self._table.await_some(False)
        self._tell_moved()

    def _do(self, task: Task) -> bool:
        """Does one; False if it is not for this thread."""
        end, meeting = task.end, task.end.meeting
        said = self._table.read_all(task.number)
        if any(each.number != end.number for each in said):
            numbers = [each.number for each in said]
            raise ChannelError(f"PL-1: {meeting.label} met with collectives number {numbers}")
        by_rank = [said[self._parties.index(party)] for party in meeting.parties]
        complaints = [each.text if each.status == Status.COMPLAINT else None for each in by_rank]
        failure = conclude(meeting, [each.text for each in by_rank], complaints)
        with self._guard:
            self._collect()
        layout, start_ns = by_rank[meeting.root].text, time.monotonic_ns()
        is_staged = _STAGED in layout
        if failure is not None:
            end.give(None, [failure] * end.num_outputs)
        elif is_staged and threading.current_thread() is not self._thread:
            return False
        else:
            if meeting.kind is CollectiveKind.BROADCAST:
                end.expected = layout_of(layout)
            if is_staged:
                end.give(None, self._stage(task, layout))
            else:
                end.give(task, self._enqueue(task))
        end.count(task.offer, start_ns)
        return True

    def _enqueue(self, task: Task) -> list[torch.Tensor]:
        end, driver = task.end, self.home.driver
        with self._on_stream():
            driver.wait_event(self._stream, end.ready)
            outs = task.outs = self._outs(task)
            end_span = end.begin(self._stream)
            try:
                self._mover.move(end.meeting, end.rank, task.offer.tensors, outs)
            finally:
                if end_span is not None:
                    end_span(sum(tensor.nbytes for tensor in task.offer.tensors or outs))
            task.done = self._spare_events.pop() if self._spare_events else driver.create_event()
            driver.record_event(task.done, self._stream)
        self._kept.append(task)
        self._tell_moved()
        return outs

    def _stage(self, task: Task, layout: bytes) -> list[torch.Tensor]:
        """CPU tensors are brought to the device and what comes out of them back, which this thread waits for."""
        with self._on_stream():
            task.offer = Offer(tuple(tensor.to(self.device) for tensor in task.offer.tensors))
            outs = self._enqueue(task)
            task.is_taken = True
            torch.cuda.current_stream(self.device).synchronize()
            return [o.cpu() if is_staged else o for o, is_staged in zip(outs, staged_in(layout), strict=True)]

    def _outs(self, task: Task) -> list[torch.Tensor]:
        """The memory that was made in `start`, if the shape is as it was expected there."""
        end = task.end
        if end.meeting.kind is not CollectiveKind.BROADCAST or end.expected is None:
            return task.outs or []
        dtype, shape = end.expected
        if task.outs and (task.outs[0].dtype, tuple(task.outs[0].shape)) == (dtype, shape):
            return task.outs
        out = self._empty(dtype, shape)
        if not self.home.is_host:
            out.record_stream(_as_torch(task.compute, self.home.device))
        return [out]

    @contextmanager
    def _on_stream(self) -> Iterator[None]:
        if self._torch_stream is None:
            yield
        else:
            with torch.cuda.stream(self._torch_stream):
                yield

    def _collect(self) -> None:
        """Lets go of what exchanges have done with; the caller holds the guard."""
        while self._kept and self._kept[0].is_taken and self.home.driver.has_happened(self._kept[0].done):
            self._spare_events.append(self._kept.popleft().done)

    def way_out(self) -> tuple[int, Callable[[], AbstractContextManager[None]]]:
        """The stream for what is only written to others, and what makes it torch's current one."""
        if self._leaving is None:
            self._leaving = self.home.driver.create_stream(f"what leaves collectives of {', '.join(self._parties)}")
        stream = _as_torch(self._leaving, self.home.device)
        return self._leaving, lambda: torch.cuda.stream(stream)

    def take(self, task: Task) -> None:
        """The program takes what came out: its stream waits for it, or the one on which it leaves."""
        with self._guard:
            if task.done:
                leaving = task.end.leaving
                self.home.driver.wait_event(self.home.compute_stream() if leaving is None else leaving, task.done)
            task.is_taken = True
            self._collect()

    # Ending

    def break_off(self, reason: str) -> None:
        """A party is gone."""
        self._end_with(reason)
        self._table.own.wake.post()

    def _end_with(self, reason: str) -> None:
        self._reason = self._reason or reason
        for end in self._ends:
            end.broken = end.broken or reason
        self._tell_moved()

    def _give_up(self, reason: str) -> None:
        """This party has not done its part: the others must not wait for it."""
        self._end_with(reason)
        self._table.give_up()
        with self._release:
            if not self._is_let_go:
                self._is_let_go = True
                self._mover.let_go(reason)
        self._table.own.wake.post()
        for bell in self._bells:  # their thread may wait in the exchange
            bell.ring()

    def look_for_faults(self) -> None:
        """Gives up if another party has: it does not do its part of an exchange that this one may be in."""
        if self._table.has_given_up() and not self._reason:
            self._give_up(self._who_died() or "another party could not go on")

    def _who_died(self) -> str:
        """Asks the system: others who heard of a death first may end before this party hears of it."""
        poller = select.poll()
        with self._release:
            if self._is_let_go:
                return ""
            for pidfd in self._pidfds.values():
                poller.register(pidfd, select.POLLIN)
            dead = {pidfd for pidfd, _ in poller.poll(0)}
        names = [name for name, pidfd in self._pidfds.items() if pidfd in dead]
        return f"the process of {' and '.join(names)} is gone" if names else ""

    @property
    def is_over(self) -> bool:
        """Whether everything was done and given back."""
        return not self._thread.is_alive()

    def ask_to_end(self) -> None:
        """Nothing more is started here; others hear of it."""
        self._is_closing = True
        self._table.own.wake.post()

    def close(self, deadline: float) -> None:
        """Waits for the thread, up to a moment of the monotonic clock; `ask_to_end` comes before. It goes on if it has to."""
        self._thread.join(max(0.0, deadline - time.monotonic()))

    def _run(self) -> None:
        if not self.home.is_host:
            torch.cuda.set_device(self.home.device)
        self.home.driver.enter_thread()
        while not (self._is_closing or self._reason or self._table.has_ended()):
            self._table.own.wake.wait()
            self._pump_and_ring()
        self._leave()

    def _pump_and_ring(self) -> None:
        if self.can_move():
            self.pump()
            self._ring()

    def _ring(self) -> None:
        self._table.fence()
        self._bell.ring_if_asleep()

    def _leave(self) -> None:
        """The thread's last work. A main thread may still take results, and is told that there are no more."""
        with self._guard:
            self._is_ending = True
        self._table.end()
        poller = select.poll()
        for pidfd in self._pidfds.values():
            poller.register(pidfd, select.POLLIN)
        while self._queue and not self._reason:
            self._pump_and_ring()
            if self._table.has_given_up() or self._is_first_over() or poller.poll(0):
                break
            if not self.can_move():
                self._table.own.wake.wait(_SLICE_S)
        self.look_for_faults()
        reason = self._reason or self._who_died()
        if reason:
            self._give_up(reason)
        self._end_with(self._who_died() or "another party closed it")
        self._ring()
        with self._turn:
            self._finish(poller)

    def _is_first_over(self) -> bool:
        """Whether it is sure that not everybody comes to what was started first."""
        with self._guard:
            return bool(self._queue) and self._table.is_over(self._queue[0].number)

    def _finish(self, poller: Any) -> None:
        """Waits for this party's stream, then for the others'; gives everything back."""
        driver, names = self.home.driver, {pidfd: name for name, pidfd in self._pidfds.items()}
        with self._guard:  # whoever takes results meanwhile lets go of some
            kept = list(self._kept)
        while not all(driver.has_happened(task.done) for task in kept):
            time.sleep(_PAUSE_S)
        self._table.finish()
        while True:
            dead = {names[pidfd] for pidfd, _ in poller.poll(0)}
            if not [party for party in self._table.unfinished(self._parties) if party not in dead]:
                break
            self._table.own.wake.wait(_SLICE_S)
        with self._release:
            self._is_let_go = True
            self._mover.close()
        with self._guard:
            events = [*self._spare_events, *(task.done for task in self._kept), *(end.ready for end in self._ends)]
            for task in self._kept:
                task.done = 0  # it has happened
            self._kept.clear()
            self._queue.clear()
        for event in events:
            driver.destroy_event(event)
        for stream in (self._stream, self._leaving):
            if stream is not None:
                driver.destroy_stream(stream)
        self._give_back()


def _as_torch(stream: int, device: int) -> Any:
    return torch.cuda.ExternalStream(stream, device=device)  # type: ignore[no-untyped-call]
