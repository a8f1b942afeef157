"""The text form of a plan: what ``print(plan)`` shows, golden tests compare, and parses back to an equal plan.

::

    plan max_inflight=2 returns=value
    input i0 = *
    node n0 = Sender.make(i0) -> n0
    node n1 = Receiver.take(n0) -> n1
    channel i0: driver -> Sender | shm depth=2 buffer_bytes=0
    channel n0: Sender -> Receiver | gloo depth=3 buffer_bytes=0
    channel n1~shm of n1: Receiver -> driver | shm depth=2 buffer_bytes=0
    output n1
    # rings take 7.0 KiB: n0 3.0 KiB, i0 2.0 KiB, n1~shm 2.0 KiB
    driver   | write i0         |         |        |               |         |              | read n1~shm | free n1
    Sender   |                  | read i0 | run n0 | send n0 @send | free i0
    Receiver | recv n0 @recv +1 |         |        |               | run n1  | write n1~shm | free n0

The grid has one row per party. A step's column is the length of the longest chain of steps of the same round that must
be over before it, so that messages run from left to right; plans with a cycle, and those which would be mostly empty
cells, are written without gaps. A channel whose id is not its value's is written ``channel n0~gloo of n0: ...``. Lines
that start with ``#`` are for people: the parser skips them.
Collectives come after the nodes: ``collective c0 = allreduce(sum) over gloo: A(n0) -> c0.0; B(n1) -> c0.1``.
Where actors have GPUs, ``device A = 0, 1`` says which, a channel may end in ``slots=2 turn=1 device=cuda posted``, and comments say
of each channel and of each collective between GPUs what it does on which stream. ``static n0, i0`` lists values of static shape.
``communicator m0 = A, B`` is a user-defined communicator, with its actors in the order of their ranks; its channels have
``| communicator m0 depth=2 ...``, and its collectives ``over communicator m0``.
``host node0 = driver, A`` says which parties are on a host, where there are several hosts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise

from crossfade.plan.actions import MAIN, PUTS, TAKES, Action, Verb
from crossfade.plan.device_streams import DeviceStream, stream_in, stream_out
from crossfade.plan.specs import BarePlan, ChannelSpec, CollectiveSpec, NodeSpec
from crossfade.types import CollectiveKind, TargetDevice, Transport

Mark = tuple[str, int]
"""A step: the party's name and the position in its program."""

SMALLEST_SLOT_BYTES = 1024
"""What a slot takes where the plan sets nothing aside."""
MAX_CELLS_PER_ACTION = 16
"""A grid with more cells than this, for each action, is written without gaps."""
NUM_RINGS_SHOWN = 8


def values_used(plan: BarePlan, action: Action, actor: str) -> tuple[str, ...]:
    """Ids of the values that must be in the actor's registers for its action; none for an id that does not exist."""
    if action.verb in TAKES:
        return ()
    if action.verb in PUTS:
        channel = plan.channel.get(action.target)
        return () if channel is None else (channel.value,)
    if action.verb is Verb.FREE:
        return (action.target,)
    if action.verb is Verb.RUN:
        node = plan.node.get(action.target)
        return () if node is None else node.inputs
    collective = plan.collective.get(action.target)
    return () if collective is None else collective.inputs_of(actor)


def format_plan(plan: BarePlan, mark: Mark | None = None) -> str:
    """The plan as text, sound or not; `parse_plan` gives an equal plan back. ``mark`` is a step to point at with a comment line, if
    it exists.
    """
    lines = [f"plan max_inflight={plan.max_inflight} returns={'list' if plan.returns_list else 'value'}"]
    lines += [f"device {party} = {', '.join(map(str, gpus))}".rstrip() for party, gpus in plan.devices.items()]
    lines += _format_hosts(plan.hosts)
    lines += [f"input {each.value} = {each.key}" for each in plan.inputs]
    lines += map(_format_node, plan.nodes)
    lines += [f"communicator {each.id} = {', '.join(each.parties)}".rstrip() for each in plan.communicators]
    lines += map(_format_collective, plan.collectives)
    lines += map(_format_channel, plan.channels)
    lines += [f"output {value}" for value in plan.outputs]
    lines += [f"static {', '.join(plan.static)}"] if plan.static else []
    lines += _format_rings(plan.channels)
    lines += [
        f"# {_on_devices(plan, each, reader)}"
        for each in plan.channels
        if each.transport.moves_device_memory
        for reader in each.readers
    ]
    lines += [f"# {_on_streams(plan, each)}" for each in plan.collectives if each.transport.moves_device_memory]
    lines += _format_grid(plan, _columns(plan), mark)
    return "\n".join(lines)


def format_excerpt(plan: BarePlan, mark: Mark, num_columns: int = 12, num_rows: int = 12) -> str:
    """The part of the grid around one step, for plans that are too big to print; it does not parse as a plan.

    It has about ``num_columns`` columns and at most ``num_rows`` of the parties that do something in them, the step's
    own among them.
    """
    columns = _columns(plan)
    actor, index = mark
    first = max(0, columns[actor][index] - num_columns // 2)
    window = range(first, first + num_columns)
    busy = [name for name, places in columns.items() if name != actor and any(place in window for place in places)]
    shown = {actor, *busy[: num_rows - 1]}
    num_hidden = len(busy) + 1 - len(shown)
    some = {name: places for name, places in columns.items() if name in shown}
    head = f"# columns {first} to {window[-1]}" + (f", without {num_hidden} busy parties" if num_hidden else "")
    return "\n".join([head, *_format_grid(plan, some, mark, window)])


def _format_hosts(hosts: Mapping[str, str]) -> list[str]:
    parties: dict[str, list[str]] = {}
    for party, host in hosts.items():
        parties.setdefault(host, []).append(party)
    return [f"host {host} = {', '.join(on_it)}" for host, on_it in parties.items()]


def _format_node(node: NodeSpec) -> str:
    call = f"{node.actor}.{node.method}({', '.join(node.inputs)})"
    return f"node {node.id} = {call} -> {', '.join(node.outputs)}".rstrip()


def _format_collective(collective: CollectiveSpec) -> str:
    how = collective.op or (f"root={collective.root}" if collective.kind is CollectiveKind.BROADCAST else "")
    parties = zip(collective.parties, collective.inputs, collective.outputs, strict=True)
    whom = "; ".join(
        f"{party}({', '.join(inputs)}) -> {', '.join(outputs)}".rstrip() for party, inputs, outputs in parties
    )
    return (
        f"collective {collective.id} = {collective.kind}({how}) over {_format_transport(collective)}: {whom}".rstrip()
    )


def _format_transport(spec: ChannelSpec | CollectiveSpec) -> str:
    return f"{spec.transport} {spec.communicator}".rstrip()


def _format_channel(channel: ChannelSpec) -> str:
    of = "" if channel.id == channel.value else f" of {channel.value}"
    ends = f"{channel.writer} -> {', '.join(channel.readers)}".rstrip()
    how = f"{_format_transport(channel)} depth={channel.depth} buffer_bytes={channel.buffer_bytes}"
    how += "".join(f" {name}={number}" for name in ("slots", "turn") if (number := getattr(channel, name)))
    how += f" device={channel.device}" if channel.device is not TargetDevice.DEFAULT else ""
    how += " posted" if channel.is_posted else ""
    return f"channel {channel.id}{of}: {ends} | {how}"


_ON_STREAMS = {
    Transport.COPY: "pushed on {}, waited for on {}",
    Transport.STAGED: "sent on {}, received on {}, through the host",
    Transport.NCCL: "sent on {}, received on {}",
}
_POSTED = "sent on {}, received on {}, into the reader's own memory"


def _on_devices(plan: BarePlan, channel: ChannelSpec, reader: str) -> str:
    """What a channel between two GPUs does to bring a value to one reader, in words."""
    ends = " -> ".join(f"{party}{_gpus(plan.devices.get(party, ()))}" for party in (channel.writer, reader))
    size = f"of {_human(channel.buffer_bytes)}" if channel.buffer_bytes else "as large as its values"
    slots = f"{channel.slots or channel.depth} slots {size}"
    arrives_on = stream_in(channel.transport, is_posted=channel.is_posted)
    streams = (channel.writer, stream_out(channel.transport)), (reader, arrives_on)
    how = _POSTED if channel.is_posted else _ON_STREAMS[channel.transport]
    how = how.format(*(f"{party}'s stream {stream}" for party, stream in streams))
    return f"{channel.id}: {ends} by {channel.transport}: {how}" + ("" if channel.is_posted else f"; {slots}")


def _on_streams(plan: BarePlan, collective: CollectiveSpec) -> str:
    """On which streams a collective between GPUs runs, in words."""
    parties = ", ".join(f"{party}{_gpus(plan.devices.get(party, ()))}" for party in collective.parties)
    return f"{collective.id}: {parties} by {collective.transport}: on the stream {DeviceStream.COLL} of each"


def _gpus(gpus: tuple[int, ...]) -> str:
    return f" (GPU {', '.join(map(str, gpus))})" if gpus else ""


def ring_bytes(channel: ChannelSpec) -> int:
    """Memory of the host that a channel's ring takes when no value is larger than what is set aside."""
    on_host_bytes = 0 if channel.transport is Transport.COPY else channel.buffer_bytes
    return channel.depth * max(on_host_bytes, SMALLEST_SLOT_BYTES)


def _format_rings(channels: Iterable[ChannelSpec]) -> list[str]:
    """A comment with what the rings take in all, and what the biggest take."""
    sizes_bytes = {each.id: ring_bytes(each) for each in channels}
    if not sizes_bytes:
        return []
    biggest = sorted(sizes_bytes, key=sizes_bytes.__getitem__, reverse=True)[:NUM_RINGS_SHOWN]
    shown = [f"{channel_id} {_human(sizes_bytes[channel_id])}" for channel_id in biggest]
    if len(biggest) < len(sizes_bytes):
        shown.append(f"and {len(sizes_bytes) - len(biggest)} others")
    return [f"# rings take {_human(sum(sizes_bytes.values()))}: {', '.join(shown)}"]


def _human(size_bytes: int) -> str:
    size, unit = float(size_bytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if abs(size) < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size_bytes} B" if unit == "B" else f"{size:.1f} {unit}"


def _format_grid(
    plan: BarePlan, columns: dict[str, list[int]], mark: Mark | None, window: range | None = None
) -> Iterator[str]:
    """One line per party of ``columns``, and one more below the marked step; only the columns of ``window``."""
    cells = {
        actor: {
            place: str(action)
            for place, action in zip(places, plan.programs[actor], strict=True)
            if window is None or place in window
        }
        for actor, places in columns.items()
    }
    widths: dict[int, int] = {}
    for row in cells.values():
        for place, cell in row.items():
            widths[place] = max(widths.get(place, 0), len(cell))
    name_width = max(map(len, cells), default=0)
    first = 0 if window is None else window.start
    for actor, row in cells.items():
        places = range(first, max(row, default=first - 1) + 1)
        line = " | ".join(row.get(place, "").ljust(widths.get(place, 0)) for place in places)
        yield f"{actor.ljust(name_width)} | {line}".rstrip()
        if mark is not None and mark[0] == actor and 0 <= mark[1] < len(columns[actor]):
            before = range(first, columns[actor][mark[1]])
            num_spaces = name_width + 3 + sum(widths.get(place, 0) + 3 for place in before)
            yield f"#{' ' * (num_spaces - 1)}^ <-- here"


def _columns(plan: BarePlan) -> dict[str, list[int]]:
    columns = _levels(plan)
    num_actions = sum(map(len, plan.programs.values()))
    if columns is None or sum(places[-1] for places in columns.values() if places) > MAX_CELLS_PER_ACTION * num_actions:
        return {actor: list(range(len(actions))) for actor, actions in plan.programs.items()}
    return columns


def _levels(plan: BarePlan) -> dict[str, list[int]] | None:
    """For each action the length of the longest chain that must be over before it; None where there is a cycle."""
    starts, num_steps = {}, 0
    for actor, actions in plan.programs.items():
        starts[actor] = num_steps
        num_steps += len(actions)
    befores: dict[int, list[int]] = {step: [] for step in range(num_steps)}
    for before, step in _waits(plan, starts):
        befores[step].append(before)
    levels = [0] * num_steps
    try:
        for step in TopologicalSorter(befores).static_order():
            levels[step] = max((levels[before] + 1 for before in befores[step]), default=0)
    except CycleError:
        return None
    return {actor: levels[starts[actor] : starts[actor] + len(actions)] for actor, actions in plan.programs.items()}


def _waits(plan: BarePlan, starts: dict[str, int]) -> Iterator[tuple[int, int]]:
    """Pairs (step, step that waits for it) of one round: program order, messages and collectives to where they are waited for."""
    written, met = _sources(plan, starts)
    firsts = set(starts.values())
    for actor, actions in plan.programs.items():
        yield from pairwise(range(starts[actor], starts[actor] + len(actions)))
        coming = _coming(plan, actor, starts[actor], written, met)
        for step, action in enumerate(actions, starts[actor]):
            if action.verb is Verb.COLL and action.stream == MAIN and action.target in plan.collective:
                # it ends when the others have come that far
                yield from ((other - 1, step) for other in met[action.target] if other != step and other not in firsts)
            is_waited_for = action.verb is Verb.READ or (action.verb is Verb.RECV and action.stream == MAIN)
            if is_waited_for and not action.ahead and action.target in written:
                yield written[action.target], step
            for value in values_used(plan, action, actor):
                yield from ((source, step) for source in coming.pop(value, ()))


def _sources(plan: BarePlan, starts: dict[str, int]) -> tuple[dict[str, int], dict[str, list[int]]]:
    """The step that writes or sends, by channel, and the steps at which its parties do a collective."""
    written: dict[str, int] = {}
    met: dict[str, list[int]] = {}
    for actor, actions in plan.programs.items():
        for step, action in enumerate(actions, starts[actor]):
            if action.verb in (Verb.WRITE, Verb.SEND):
                written[action.target] = step
            elif action.verb is Verb.COLL:
                met.setdefault(action.target, []).append(step)
    return written, met


def _coming(
    plan: BarePlan, actor: str, start: int, written: dict[str, int], met: dict[str, list[int]]
) -> dict[str, list[int]]:
    """The steps that the first use of a value waits for: of values that a receive, or a collective beside ``main``, brings."""
    coming: dict[str, list[int]] = {}
    for step, action in enumerate(plan.programs[actor], start):
        if action.verb is Verb.COLL and action.stream != MAIN and action.target in plan.collective:
            others = [other for other in met[action.target] if other != step]
            coming.update(dict.fromkeys(plan.collective[action.target].outputs_of(actor), others))
        channel = plan.channel.get(action.target)
        if action.verb is Verb.RECV and channel is not None and channel.id in written:
            coming[channel.value] = [written[channel.id]]
    return coming
