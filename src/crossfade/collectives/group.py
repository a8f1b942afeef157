"""A group of parties does collectives together: they meet in a table, then tensors are moved; no host waits for a GPU.

    start        allocate the results | record `ready` on the compute stream | publish the offer to all
    once all     have published theirs: wait `ready` | exchange | record `done`, on a stream of the group's own
    try_finish   as soon as that is enqueued: the compute stream waits `done`, and the program gets the tensors

If the program only writes the results to others, the compute stream does not wait: it resumes with the next execution. Another
stream of the group's waits in its place, and is torch's current one while such a write is enqueued.

Because all parties draw the same conclusion from the same offers, each enqueues its part of an exchange only when all others are
known to enqueue theirs, or have done so (PL-5). The party that comes last enqueues at once. For those that came early a thread of
the group does, in case their main thread is busy: values that others send behind an exchange may be the very ones for which a
method waits. A main thread that is at hand does it itself, which is quicker, and before each method it makes sure that nothing is
left for the thread to enqueue (`Group.enqueue_all`).

That holds for movers that only enqueue. A mover that blocks (CPU tensors) is called by the thread alone, and the program
resumes (PL-2). A mover that runs the user's code is called by the program alone, when it asks for the result (`Caller`).

CPU tensors of a party whose device is a GPU are copied to it and back by the thread.

**Memory.** Results are allocated in `start`, on the compute stream and before `ready`, so that no kernel that still uses that
memory is overtaken. Only a receiver of a broadcast may learn the shape later: that memory belongs to the group's stream, and
torch is informed of its users. Inputs are kept until `done` has happened.

**Spans.** The recorded span of a collective lies between two events on the group's stream: from the moment when this party's
tensors are there (and the group's work before is done) to the moment when the results are. It includes waits for other parties.

**Ends.** A party that has ended starts nothing more, and still does its part of every offer that all have made; others that
learn of it end as well, so for each offer it becomes sure that it is met or that it is not. A party gives its buffers back when
all others have declared that their streams are done with them, or have died. The thread does all this, and closing does not wait
for it beyond a time limit.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

import torch

from crossfade.collectives.parties import Parties
from crossfade.collectives.protocol import Caller, Mover
from crossfade.collectives.streams import GroupStreams
from crossfade.collectives.table import RendezvousTable, Status
from crossfade.collectives.task import Task
from crossfade.collectives.terms import STAGED, Offer, conclude, layout_of, staged_in
from crossfade.device.context import DeviceContext
from crossfade.edges.life import Action, Event, Life, State
from crossfade.errors import ChannelBroken, ChannelError, CrossfadeError
from crossfade.types import CollectiveKind

_STAGED = STAGED.encode()
_SLICE_S = 0.05
_PAUSE_S = 0.0005
_OTHER_FAILED = "another party could not go on"
_DEATH_S = 0.2
"""So long after a broken connection the system may take to report the death of the process at its other end."""


class Group:
    """One party's part in the collectives of a set of parties.

    ``give_back`` closes the table, the parties and whatever the mover stands on; it is called last of all.
    """

    def __init__(
        self,
        table: RendezvousTable,
        mover: Mover,
        context: DeviceContext,
        parties: Parties,
        give_back: Callable[[], None],
    ) -> None:
        self.reason = ""  # why it is broken
        self._table = table
        self._mover = mover
        self._parties = parties
        self._give_back = give_back
        self.streams = GroupStreams(context, parties.label)
        self._device = None if mover.caller is Caller.PROGRAM else self.streams.device
        self._queue: deque[Task] = deque()
        self._kept: deque[Task] = deque()
        self._turn = threading.Lock()  # of calling the mover
        self._guard = threading.Lock()  # of the queue's beginning and end
        self._moved = threading.Condition()  # notified when something was enqueued, or never will be
        self._release = threading.Lock()  # of aborting and closing the mover
        self._is_released = False  # the mover
        self.life = Life()
        self._thread = threading.Thread(target=self._run, name="crossfade-collectives", daemon=True)
        self._thread.start()

    # Starting

    def start(self, task: Task, values: Sequence[object]) -> None:
        """Offers values, and moves as much as is possible now. Raises a `ChannelBroken` if the group has ended."""
        message = task.prepare(values, self._device, are_packed=self._mover.caller is not Caller.GROUP)
        with self._guard:
            if self.life.state not in (State.OPEN, State.BROKEN):
                raise ChannelBroken(f"{task.terms.label} is broken: {self.reason or 'another party closed it'}")
            task.compute = self.streams.context.compute_stream()
            task.ready = self.streams.mark(task.compute)
            task.message = self._table.publish(message)
            self._queue.append(task)
            self._table.await_some(True)
        if self._mover.caller is Caller.GROUP:
            if self._can_move():
                self._table.own.wake.post()
            return
        for bell in self._parties.other_bells:
            bell.ring_if_asleep()
        if self._mover.caller is Caller.ANY:
            self._pump()

    # Meeting and moving

    def can_progress(self) -> bool:
        """A cheap look: whether `poll` would do something."""
        return self._mover.caller is not Caller.GROUP and self._can_move()

    def _can_move(self) -> bool:
        """Whether all parties have come to the first task."""
        try:
            return self._table.has_all(self._queue[0].message)
        except IndexError:
            return False

    def _may_move(self, last: Task | None) -> bool:
        return self._can_move() and not self.reason and (last is None or last.result is None)

    def poll(self, task: Task) -> None:
        """The program asks for a task's result: moves what it may."""
        if self._mover.caller is Caller.ANY:
            self._pump()
        elif self._mover.caller is Caller.PROGRAM:  # another party may not ask for later ones yet
            self._pump(task)

    def _pump(self, last: Task | None = None) -> None:
        """Moves the tensors of all tasks to which all parties have come, in the order of their starts, up to ``last``."""
        while self._may_move(last):
            if not self._turn.acquire(False):
                return  # the thread that has the turn looks once more behind it
            is_for_thread = False
            try:
                while self._may_move(last) and not is_for_thread:
                    if self._do(self._queue[0]):
                        self._drop_first()
                    else:
                        is_for_thread = True
            except Exception as error:
                self._fail(error)
            finally:
                self._turn.release()
            if is_for_thread:
                self._table.own.wake.post()  # now that it can have the turn
                return

    def _fail(self, error: Exception) -> None:
        """The mover, or a device, has refused."""
        if self._mover.caller is Caller.PROGRAM:  # its error is the program's, which then ends the group
            self._end_with(str(error))
        elif isinstance(error, CrossfadeError):
            self._on(Event.FAULT, str(error))
        else:
            reason = "" if self._table.has_given_up() else f"{type(error).__name__}: {error}"
            self._on(Event.FAULT, self._parties.death(_DEATH_S) or reason or _OTHER_FAILED)

    def enqueue_all(self) -> None:
        """Before a method: waits until this party's part of all exchanges that are complete is enqueued.

        A value that the method uses may have been sent behind such an exchange. If the method then loads a kernel, the driver waits
        for the device, and may hold up the very thread that has still to enqueue an exchange for which the device waits.
        """
        if not self._queue or self._mover.caller is not Caller.ANY:
            return
        self._pump()
        with self._moved:
            while self._is_behind():
                self._moved.wait(_SLICE_S)

    def _is_behind(self) -> bool:
        with self._guard:
            return not self.reason and any(not t.done and self._table.has_all(t.message) for t in self._queue)

    def _notify_moved(self) -> None:
        with self._moved:
            self._moved.notify_all()

    def _drop_first(self) -> None:
        with self._guard:
            self._queue.popleft()
            if not self._queue:
                self._table.await_some(False)
        self._notify_moved()

    def _do(self, task: Task) -> bool:
        """Does one task; False if it is for the group's thread."""
        terms = task.terms
        messages = self._table.read_all(task.message)
        if any(each.number != task.number for each in messages):
            numbers = [each.number for each in messages]
            raise ChannelError(f"PL-1: {terms.label} met with collectives number {numbers}")
        by_rank = [messages[self._parties.names.index(party)] for party in terms.parties]
        complaints = [each.text if each.status == Status.COMPLAINT else None for each in by_rank]
        failure = conclude(terms, [each.text for each in by_rank], complaints)
        with self._guard:
            self._collect()
        layout, start_ns = by_rank[terms.root].text, time.monotonic_ns()
        result: Sequence[object]
        if failure is not None:
            self.streams.give_back(task.ready)
            task.ready, result = 0, [failure] * task.num_outputs
        elif _STAGED in layout and threading.current_thread() is not self._thread:
            return False
        else:
            if terms.kind is CollectiveKind.BROADCAST:
                task.expected = layout_of(layout)
            result = self._stage(task, layout) if _STAGED in layout else self._enqueue(task)
        task.moved_ns = start_ns, time.monotonic_ns()
        task.result = result  # last: the program looks for it
        return True

    def _enqueue(self, task: Task) -> Sequence[torch.Tensor]:
        streams = self.streams
        with streams.current():
            streams.driver.wait_event(streams.exchange, task.ready)
            tensors = [tensor.contiguous() for tensor in task.offer.tensors]
            outs, is_new = task.results(self._device)
            if is_new:
                self.streams.uses(outs[0], task.compute)
            end_span = None if task.begin is None else task.begin(streams.exchange)
            try:
                self._mover.move(task.terms, task.rank, tensors, outs)
            finally:
                if end_span is not None:
                    end_span(sum(tensor.nbytes for tensor in tensors or outs))
            task.done = streams.mark(streams.exchange)
        self._kept.append(task)
        self._notify_moved()
        return outs

    def _stage(self, task: Task, layout: bytes) -> Sequence[torch.Tensor]:
        """Copies CPU tensors to the device and their results back, for which this thread waits."""
        with self.streams.current():
            task.offer = Offer(tuple(tensor.to(self.streams.device) for tensor in task.offer.tensors))
            outs = self._enqueue(task)
            torch.cuda.current_stream(self.streams.device).synchronize()
            return [o.cpu() if is_staged else o for o, is_staged in zip(outs, staged_in(layout), strict=True)]

    def _collect(self) -> None:
        """Drops the tensors of exchanges that are done and taken; the caller holds the guard."""
        while self._kept and self._kept[0].is_taken and self.streams.driver.has_happened(self._kept[0].done):
            task = self._kept.popleft()
            self.streams.give_back(task.ready, task.done)

    def take(self, task: Task, stream: int | None) -> None:
        """The program takes a result: the compute stream waits for it, or the given one."""
        with self._guard:
            if task.done:
                self.streams.driver.wait_event(
                    self.streams.context.compute_stream() if stream is None else stream, task.done
                )
            task.is_taken = True
            self._collect()

    # Ending

    def break_off(self, reason: str) -> None:
        """A party is gone."""
        self._on(Event.PEER_DIED, reason)
        self._table.own.wake.post()

    def _on(self, event: Event, reason: str = "") -> None:
        """Something happened: the group does what its life asks for (``edges.life``). Any thread may call it."""
        with self._guard:
            actions = self.life.on(event)
        for action in actions:
            match action:
                case Action.REFUSE:
                    self._end_with(reason)
                case Action.END:
                    self._give_up(reason)
                case Action.RELEASE:
                    self._release_all()

    def _end_with(self, reason: str) -> None:
        self.reason = self.reason or reason
        self._notify_moved()

    def _give_up(self, reason: str) -> None:
        """This party has not done its part: the others must not wait for it."""
        self._end_with(reason)
        self._table.give_up()
        with self._release:
            if not self._is_released:
                self._is_released = True
                self._mover.abort(reason)
        self._table.own.wake.post()
        for bell in self._parties.other_bells:  # their thread may wait in the exchange
            bell.ring()

    def look_for_faults(self) -> None:
        """Gives up if another party has: it does not do its part of an exchange that this one may be in."""
        if self._table.has_given_up() and not self.reason:
            self._on(Event.FAULT, self._parties.death() or _OTHER_FAILED)

    @property
    def is_over(self) -> bool:
        """Whether everything was done and given back."""
        return not self._thread.is_alive()

    def ask_to_end(self) -> None:
        """Nothing more is started here, and the others learn of it."""
        self._on(Event.CLOSE)
        self._table.own.wake.post()

    def finish(self, deadline: float) -> None:
        """After `ask_to_end`: moves what all have offered and only the program may move, up to ``deadline`` (monotonic clock)."""
        while self._mover.caller is Caller.PROGRAM and self._is_awaited() and time.monotonic() < deadline:
            self._pump()
            time.sleep(_PAUSE_S)

    def close(self, deadline: float) -> None:
        """After `ask_to_end`: waits for the thread up to ``deadline`` (monotonic clock). The thread resumes if it has to."""
        self._thread.join(max(0.0, deadline - time.monotonic()))

    def _run(self) -> None:
        self.streams.enter_thread()
        while self.life.state is State.OPEN and not (self.reason or self._table.has_ended()):
            self._table.own.wake.wait()
            self._pump_and_ring()
        self._leave()

    def _pump_and_ring(self) -> None:
        if self._can_move():
            if self._mover.caller is not Caller.PROGRAM:
                self._pump()
            self._ring()

    def _ring(self) -> None:
        self._table.fence()
        self._parties.own_bell.ring_if_asleep()

    def _leave(self) -> None:
        """The thread's last work. The program may still take results, and learns that no more follow."""
        self._on(Event.CLOSE)
        self._table.end()
        while self._is_awaited():
            self._pump_and_ring()
            if not self._can_move() or self._mover.caller is Caller.PROGRAM:
                self._table.own.wake.wait(_SLICE_S)
        self.look_for_faults()
        reason = self.reason or self._parties.death()
        if reason:
            self._on(Event.FAULT, reason)
        self._end_with(self._parties.death() or "another party closed it")
        self._ring()
        with self._turn:
            self._finish()

    def _is_awaited(self) -> bool:
        """Whether all others may still come to what was started first."""
        if self.reason or self._table.has_given_up() or self._parties.alive.check():
            return False
        with self._guard:
            return bool(self._queue) and not self._table.is_over(self._queue[0].message)

    def _finish(self) -> None:
        """Waits for this party's stream, then for the others'; gives everything back."""
        streams = self.streams
        with self._guard:  # the program may take results meanwhile
            kept = list(self._kept)
        while not all(streams.driver.has_happened(task.done) for task in kept):
            time.sleep(_PAUSE_S)
        self._table.finish()
        while set(self._table.unfinished(self._parties.names)) - set(self._parties.alive.check()):
            self._table.own.wake.wait(_SLICE_S)
        self._on(Event.DRAINED)
        self._on(Event.UNREFERENCED)

    def _release_all(self) -> None:
        streams = self.streams
        with self._release:
            self._is_released = True
            self._mover.close()
        with self._guard:
            for task in (*self._kept, *self._queue):
                streams.give_back(task.ready, task.done)
                task.ready = task.done = 0
            self._kept.clear()
            self._queue.clear()
        streams.close()
        self._give_back()
