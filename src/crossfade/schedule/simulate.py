"""A discrete-event simulator: what a plan's executions would look like in time, with no actor started.

What is simulated:

- **Values.** A read waits for the write of the same execution, a write for the release of the slot by every reader.
  Either is seen ``hop_us`` later by who polls, and ``wake_us`` after that by who had waited longer than ``spin_us``.
- **Transfers** (gloo), one per reader. A receiver takes one after another, in the order of its receives; a sender sends
  one after another to each receiver, in the order of its sends, but to several receivers at once. So a transfer starts
  when it is the first of both queues (`schedule.progress`). Who uses the value first waits for its arrival.
- **Collectives** start when all parties have, one after another in each set of parties (`schedule.meetings`): on the hosts those by
  gloo, on streams of the GPUs those between them, which take what `schedule.collective_costs` says.
- **Cores.** Work of all parties and background transfers share ``num_cores`` cores as ``schedule.cores`` says: work stays
  on the core where it started until another one has been idle for ``balance_us``. A transfer is work for a core of the
  receiver from its start to its end, and beside that work for a core of the sender. Who polls takes no core: polling
  gives way to work. On top of that come the cost model's slowdowns.
- **GPUs.** Where actors have some, a method's host only enqueues: its kernels run on the actor's stream ``compute``, values move on
  the streams that `plan.device_streams` names (`schedule.device_steps`), beside each other and slowed down by each other as
  `schedule.gpus` says.
- **Hosts.** Where the plan says on which host each party is, work shares the cores of its host, and what goes to another one is
  sent by its writer and then crosses the network (`schedule.network`), which takes no core.
- **The driver** is one thread that submits inputs and gets outputs, with a fixed number of executions in flight.

It takes O(log n) per action and execution, and a plan that stops is an error, never an endless loop.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from functools import partial

from crossfade.plan.actions import COLL_STREAM, Verb
from crossfade.plan.plan import ChannelSpec, CollectiveSpec, Plan
from crossfade.plan.timeline import Span, Timeline
from crossfade.schedule.causes import LINK, Happening, Piece, Trail, critical_path
from crossfade.schedule.cores import Cores
from crossfade.schedule.cost import CostModel
from crossfade.schedule.device_steps import is_pushed, push_of
from crossfade.schedule.gpus import GpuClock, Push
from crossfade.schedule.meetings import Meetings
from crossfade.schedule.network import Connections, Hosts, told_apart
from crossfade.schedule.progress import Cursor, Inbox, Inboxes, Process, Transfer, check_that_all_is_done
from crossfade.schedule.steps import NETWORK_STREAM, reached, strands_of
from crossfade.schedule.strands import Need
from crossfade.schedule.workload import Workload
from crossfade.types import Transport


def simulate(
    plan: Plan, workload: Workload, costs: CostModel, num_executions: int = 1, inflight: int | None = None
) -> Timeline:
    """The predicted timeline of a plan's first executions; ``inflight`` of them, by default ``max_inflight``, are under way at
    once.

    Spans are in microseconds since the first submission. Each action but ``free`` has a span on its actor's ``main`` stream, what a
    GPU does for it one on the GPU's stream, each transfer one at either end (streams ``send`` and ``recv``; between GPUs those of
    `plan.device_streams`), each collective one at each party (``coll``: by gloo while it runs, between GPUs from when that party's
    tensors are there), and each blocked party a ``wait`` whose ``what`` says for which fact. The driver's second half, getting
    outputs, is on the stream ``get``. Notes say what of the collectives between GPUs was not measured, and what stands for it.

    A `PlanError` says who waits for what if the plan stops for ever.
    """
    return Simulation(plan, workload, costs, num_executions, inflight).run()


class Simulation:
    """One run of the simulator; ``num_events`` tells how much there was to do."""

    def __init__(
        self, plan: Plan, workload: Workload, costs: CostModel, num_executions: int = 1, inflight: int | None = None
    ) -> None:
        inflight = plan.max_inflight if inflight is None else inflight
        if num_executions < 1 or inflight < 1:
            raise ValueError(
                f"num_executions={num_executions}, inflight={inflight}\n"
                "hint: simulate at least one execution, with at least one in flight"
            )
        plan, workload = told_apart(plan), workload.on(plan)
        self._plan, self._workload, self._costs = plan, workload, costs
        self._num_executions = num_executions
        self._hosts = Hosts(plan, costs)
        self._cores = Cores(costs.num_cores, costs.balance_us, self._hosts.num_cores)
        self._gpus = GpuClock(costs)
        self._connections = Connections(self._hosts, self._gpus)
        strands = strands_of(plan, workload, costs, inflight, self._hosts)
        self._processes: defaultdict[str, Process] = defaultdict(Process)
        self._cursors = [
            Cursor(each, self._processes[each.thread], self._hosts.index_of(each.actor), each.first_round)
            for each in strands
        ]
        self._inboxes = Inboxes(plan)
        self._meetings = Meetings(plan, self._cores, self._gpus, workload, costs, self._hosts, self._began, self._met)
        # when each fact became true, by its name and its execution, and what made it true.
        self._facts: dict[tuple[str, int], Happening] = {}
        self._trail = Trail()
        self._begun: dict[tuple[str, int], Happening | None] = {}  # the causes of collectives that are under way
        self._blocked: defaultdict[tuple[str, int], list[Cursor]] = defaultdict(list)
        self._ready: deque[Cursor] = deque()
        self._alarms: list[tuple[float, int, Callable[[], None]]] = []
        self._num_alarms = 0
        self._spans: list[Span] = []

    @property
    def num_events(self) -> int:
        """Entries that the simulator's heaps have seen."""
        return self._cores.num_events + self._gpus.num_events + self._num_alarms

    def run(self) -> Timeline:
        """Runs to the end, once. Errors: see ``simulate``."""
        self._ready.extend(cursor for cursor in self._cursors if cursor.enter(self._num_executions, 0.0))
        while True:
            while self._ready:
                self._advance(self._ready.popleft())
            alarm_us = self._alarms[0][0] if self._alarms else math.inf
            end_us, gpu_us = self._cores.next_end_us(), self._gpus.next_end_us()
            if alarm_us == end_us == gpu_us == math.inf:
                break
            if gpu_us < min(end_us, alarm_us):
                self._cores.advance(gpu_us)
                self._gpus.finish_next()
            elif end_us <= alarm_us:
                self._cores.finish_next()
            else:
                self._cores.advance(alarm_us)
                heapq.heappop(self._alarms)[-1]()
        check_that_all_is_done(self._cursors, self._inboxes, self._num_executions)
        return Timeline.of("predicted", self._spans, self._meetings.notes, self._plan.hosts)

    def critical_path(self) -> list[Piece]:
        """What the end of the last execution waited for, from the beginning on; after `run`."""
        return critical_path(self._trail.last)

    @property
    def moves(self) -> list[Happening]:
        """Transfers and collectives that are over; ``where`` is the link."""
        return self._trail.moves

    # Strands: one step after another.

    def _advance(self, cursor: Cursor) -> None:
        """Goes through what the step needs; works, or enters the next step, when all of it is there."""
        needs = cursor.needs
        while cursor.need < len(needs):
            if self._must_wait(cursor, needs[cursor.need]):
                return
        if cursor.waits_for:
            self._show_wait(cursor)
        if not cursor.worked:
            self._line_up(cursor)
            return
        cursor.index += 1
        if cursor.enter(self._num_executions, self._cores.now_us):
            self._ready.append(cursor)

    def _must_wait(self, cursor: Cursor, need: Need) -> bool:
        """Whether the cursor waits: for the fact, or until it is seen, from when on the need counts as met."""
        key = (need.fact, cursor.execution + need.offset)
        if key[1] < 0 or (need.only_if and not self._counts(need.only_if, key[1])):
            cursor.need += 1
            return False
        now_us, costs = self._cores.now_us, self._costs
        fact = self._facts.get(key)
        if fact is None:
            cursor.waits_for = need.fact
            self._blocked[key].append(cursor)
            if need.patience_us < math.inf:
                cursor.patient_since_us = min(cursor.patient_since_us, now_us)
                self._alarm(cursor.patient_since_us + need.patience_us, partial(self._lose_patience, cursor, key))
            return True
        cursor.need += 1
        is_hop = need.is_hop and fact.where != cursor.strand.actor
        seen_us = fact.end_us + (costs.hop_us if is_hop else 0.0) + need.latency_us
        process = cursor.process
        if seen_us > now_us and process.at_work is None and seen_us - process.awake_us > costs.spin_us:
            process.woken_us = seen_us = seen_us + costs.wake_us
        seen_us = max(seen_us, process.woken_us)
        process.awake_us = max(now_us, seen_us)
        if seen_us > cursor.seen_us:
            cursor.cause, cursor.seen_us = fact, seen_us
        if seen_us <= now_us:
            return False
        cursor.waits_for = need.fact
        self._alarm(seen_us, partial(self._ready.append, cursor))
        return True

    def _alarm(self, at_us: float, action: Callable[[], None]) -> None:
        self._num_alarms += 1
        heapq.heappush(self._alarms, (max(at_us, self._cores.now_us), self._num_alarms, action))

    def _counts(self, only_if: tuple[str, str], execution: int) -> bool:
        """Whether the first of two facts became true before the second."""
        first, second = (self._facts.get((fact, execution)) for fact in only_if)
        return second is None or (first is not None and first.end_us <= second.end_us)

    def _lose_patience(self, cursor: Cursor, key: tuple[str, int]) -> None:
        """The time is over for which it wanted to wait; if it still does, it continues."""
        if cursor in self._blocked.get(key, ()):
            self._blocked[key].remove(cursor)
            cursor.need += 1
            self._ready.append(cursor)

    def _line_up(self, cursor: Cursor) -> None:
        """The step's work, when the actor's thread is free for it: the driver has two strands and one thread."""
        process = cursor.process
        if process.at_work is None:
            self._work(process, cursor)
        else:
            process.lining_up.append(cursor)

    def _work(self, process: Process, cursor: Cursor) -> None:
        process.at_work = cursor
        step, cursor.work_since_us = cursor.step, self._cores.now_us
        if step.device is not None:
            self._gpus.start(step.device, cursor.work_since_us, partial(self._worked, process, cursor))
        elif cursor.strand.is_on_gpu:
            self._worked(process, cursor)
        else:
            computes = step.kind == "compute"
            factor = self._costs.slowdown.compute if computes and process.transfers else 1.0
            done = partial(self._worked, process, cursor)
            work = self._cores.start(step.work_us, done, factor, host=cursor.host)
            if computes:
                process.compute = work
                self._update_transfers(process)

    def _worked(self, process: Process, cursor: Cursor) -> None:
        step, execution, now_us = cursor.step, cursor.execution, self._cores.now_us
        strand, start_us = cursor.strand, cursor.work_since_us
        if step.kind is not None:
            self._show(strand.actor, strand.stream, step.label, step.what, step.kind, execution, start_us)
        if isinstance(step.device, Push):
            over = self._trail.add(self._gpus.link_of(step.device), LINK, start_us, now_us, cursor.cause)
        else:
            over = self._trail.add(strand.actor, step.kind or "", start_us, now_us, cursor.cause)
        cursor.cause, cursor.seen_us = over, now_us
        process.at_work, process.awake_us = None, now_us
        if process.compute is not None:
            process.compute = None
            self._update_transfers(process)
        if step.fact:
            self._happened(step.fact, execution)
        if step.transfer is not None:
            self._start_end(step.transfer, strand.actor, execution)
        if step.collective is not None:
            self._take_part(step.collective, strand.actor, execution, is_only_started=step.is_only_started)
        cursor.settle(now_us, worked=True)
        self._ready.append(cursor)
        if process.lining_up:
            following = process.lining_up.popleft()
            following.cause, following.seen_us = cursor.cause, now_us
            self._work(process, following)

    def _take_part(self, collective: CollectiveSpec, actor: str, execution: int, *, is_only_started: bool) -> None:
        if not is_only_started:
            self._meetings.join(collective, execution, actor)
        elif self._meetings.is_started_by_all(collective, execution):
            self._happened(f"started {collective.id}", execution)

    def _happened(self, fact: str, execution: int) -> None:
        assert self._trail.now_over is not None, "facts become true when something ends"
        self._facts[fact, execution] = self._trail.now_over
        blocked = self._blocked.pop((fact, execution), None)
        if blocked is not None:
            self._ready.extend(blocked)

    def _began(self, collective: CollectiveSpec, execution: int) -> None:
        self._begun[collective.id, execution] = self._trail.now_over

    def _met(self, collective: CollectiveSpec, execution: int, starts_us: Mapping[str, float]) -> None:
        for party, start_us in starts_us.items():
            label = f"{Verb.COLL} {collective.id}"
            self._show(party, COLL_STREAM, label, str(collective.kind), "communicate", execution, start_us)
        cause = self._begun.pop((collective.id, execution))
        where = f"{collective.kind} of {len(collective.parties)} actors by {collective.transport}"
        self._trail.add(where, LINK, cause.end_us if cause else 0.0, self._cores.now_us, cause)
        self._happened(f"over {collective.id}", execution)

    # Transfers: in the background of both actors.

    def _start_end(self, channel: ChannelSpec, actor: str, execution: int) -> None:
        """One end of a transfer has started: all those to the readers for a send, one for a receive."""
        if channel.transport is Transport.TCP:
            self._send_far(channel, execution)
        elif actor == channel.writer:
            for reader in channel.readers:
                inbox = self._inboxes.of(channel, reader)
                inbox.sent[actor].append(Transfer(channel, reader, execution))
                self._start_next(inbox)
        else:
            inbox = self._inboxes.of(channel, actor)
            inbox.awaited.append((channel.writer, channel.id, execution))
            self._start_next(inbox)

    def _send_far(self, channel: ChannelSpec, execution: int) -> None:
        """To each host of readers once."""
        for reader in self._hosts.firsts(channel):
            done = partial(self._came_far, channel, reader, execution, self._trail.now_over)
            self._connections.send(channel, reader, self._workload.size_bytes(channel.value), self._now_us, done)

    def _now_us(self) -> float:
        return self._cores.now_us

    def _came_far(
        self, channel: ChannelSpec, reader: str, execution: int, cause: Happening | None, start_us: float
    ) -> None:
        link = self._hosts.link(channel.writer, reader)
        before = self._trail.last_on(link)
        if cause is None or (before is not None and start_us > cause.end_us):
            cause = before  # it had to wait for the connection
        label, what = f"{Verb.WRITE} {channel.id}", f"{channel.writer} -> {self._hosts.of.get(reader, reader)}"
        self._show(channel.writer, NETWORK_STREAM, label, what, "communicate", execution, start_us)
        self._trail.add(link, LINK, start_us, self._cores.now_us, cause)
        self._happened(reached(channel, self._hosts.of.get(reader, "")), execution)

    def _start_next(self, inbox: Inbox) -> None:
        transfer = inbox.take()
        if transfer is None:
            return
        transfer.start_us, transfer.cause = self._cores.now_us, self._trail.now_over
        if is_pushed(self._plan, transfer.channel):
            push = push_of(self._plan, self._workload, transfer.channel, transfer.reader)
            self._gpus.start(push, transfer.start_us, partial(self._arrived, inbox, transfer))
            return
        size_bytes = self._workload.size_bytes(transfer.channel.value)
        times_us = (self._costs.transfer_time_us(size_bytes), self._costs.send_host_time_us(size_bytes))
        ends = transfer.channel.writer, transfer.reader
        done = partial(self._side_done, inbox, transfer)
        transfer.num_working = 3 if self._hosts.are_apart(*ends) else 2
        sender, receiver = map(self._hosts.index_of, ends)
        transfer.work = self._cores.start(times_us[0], done, self._factor(transfer), roams=True, host=receiver)
        self._cores.start(times_us[1], done, roams=True, host=sender)
        if transfer.num_working == 3:
            self._connections.send(transfer.channel, transfer.reader, size_bytes, self._now_us, lambda _: done())
        for process in self._ends(transfer):
            process.transfers.append(transfer)
            self._update_compute(process)

    def _side_done(self, inbox: Inbox, transfer: Transfer) -> None:
        """The receiver's or the sender's core, or the network, is done with it; the value is there when all are."""
        transfer.num_working -= 1
        if transfer.num_working == 0:
            self._arrived(inbox, transfer)

    def _arrived(self, inbox: Inbox, transfer: Transfer) -> None:
        channel, execution, start_us = transfer.channel, transfer.execution, transfer.start_us
        what = f"{channel.writer} -> {transfer.reader}"
        is_push = is_pushed(self._plan, channel)
        for actor, stream, verb in transfer.shown_at(is_on_gpus=is_push):
            self._show(actor, stream, f"{verb} {channel.id}", what, "communicate", execution, start_us)
        for process in self._ends(transfer) if transfer.work is not None else ():
            process.transfers.remove(transfer)
            self._update_compute(process)
        push = push_of(self._plan, self._workload, channel, transfer.reader) if is_push else None
        link = self._gpus.link_of(push) if push else self._hosts.link(channel.writer, transfer.reader)
        self._trail.add(link, LINK, start_us, self._cores.now_us, transfer.cause)
        self._happened(f"arrived {channel.id} at {transfer.reader}", execution)
        inbox.is_busy = False
        self._start_next(inbox)

    # Slowdowns: what runs beside what.

    def _ends(self, transfer: Transfer) -> tuple[Process, Process]:
        return self._processes[transfer.channel.writer], self._processes[transfer.reader]

    def _factor(self, transfer: Transfer) -> float:
        computes = any(process.compute is not None for process in self._ends(transfer))
        return self._costs.slowdown.transfer if computes else 1.0

    def _update_transfers(self, process: Process) -> None:
        for transfer in process.transfers:
            if transfer.work is not None:
                self._cores.slow_down(transfer.work, self._factor(transfer))

    def _update_compute(self, process: Process) -> None:
        if process.compute is not None:
            self._cores.slow_down(process.compute, self._costs.slowdown.compute if process.transfers else 1.0)

    # What is seen of it.

    def _show(self, actor: str, stream: str, label: str, what: str, kind: str, execution: int, start_us: float) -> None:
        self._spans.append(Span(actor, stream, label, what, kind, execution, start_us, self._cores.now_us))

    def _show_wait(self, cursor: Cursor) -> None:
        if cursor.step.kind is not None and self._cores.now_us > cursor.since_us:
            step, strand = cursor.step, cursor.strand
            self._show(
                strand.actor, strand.stream, step.label, cursor.waits_for, "wait", cursor.execution, cursor.since_us
            )
