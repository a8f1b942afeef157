"""The text form of a plan: what ``print(plan)`` shows, golden tests compare, and parses back to an equal plan.

::

    plan max_inflight=10 returns=value
    input i0 = *
    node n0 = Sender0.make(i0) -> n0
    node n1 = Receiver0.take(n0) -> n1
    channel i0: driver -> Sender0 | shm depth=10 buffer_bytes=0
    channel n0: Sender0 -> Receiver0 | gloo depth=2 buffer_bytes=0
    channel n1: Receiver0 -> driver | shm depth=10 buffer_bytes=0
    output n1
    # rings take 22.0 KiB: i0 10.0 KiB, n0 2.0 KiB, n1 10.0 KiB
    driver    | write i0      |         |        |               | read n1  | free n1
    Sender0   |               | read i0 | run n0 | send n0 @send | free i0
    Receiver0 | recv n0 @recv |         |        |               | run n1   | write n1 ...

The grid has one row per party. A step's column is the length of the longest chain of steps of the same round that must
be over before it, so that messages run from left to right; plans with a cycle, and those which would be mostly empty
cells, are written without gaps. A channel whose id is not its value's is written ``channel n0~gloo of n0: ...``. Lines
that start with ``#`` are for people: the parser skips them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise

from crossfade.errors import PlanSyntaxError
from crossfade.plan.actions import MAIN, Action, Verb
from crossfade.plan.plan import ChannelSpec, InputSpec, NodeSpec, Plan
from crossfade.types import Transport

__all__ = ["format_excerpt", "format_plan", "parse_plan", "values_used"]

Mark = tuple[str, int]
"""A step: the party's name and the position in its program."""

SMALLEST_SLOT_BYTES = 1024
"""What a slot takes where the plan sets nothing aside."""
MAX_CELLS_PER_ACTION = 16
"""A grid with more cells than this, for each action, is written without gaps."""
NUM_RINGS_SHOWN = 8
LONGEST_LINE_SHOWN = 120


def values_used(plan: Plan, action: Action) -> tuple[str, ...]:
    """Ids of the values that must be in the actor's registers for the action; none for an id that does not exist."""
    match action.verb:
        case Verb.RUN:
            node = plan.node.get(action.target)
            return () if node is None else node.inputs
        case Verb.WRITE | Verb.SEND:
            channel = plan.channel.get(action.target)
            return () if channel is None else (channel.value,)
        case Verb.FREE:
            return (action.target,)
        case _:
            return ()


# Writing


def format_plan(plan: Plan, mark: Mark | None = None) -> str:
    """The plan as text, sound or not; ``parse_plan`` gives an equal plan back.

    Args:
        plan: the plan.
        mark: a step to point at with a comment line under its row, as (actor, index in its program). A step that does
            not exist is not pointed at.
    """
    lines = [f"plan max_inflight={plan.max_inflight} returns={'list' if plan.returns_list else 'value'}"]
    lines += [f"input {each.value} = {each.key}" for each in plan.inputs]
    lines += map(_format_node, plan.nodes)
    lines += map(_format_channel, plan.channels)
    lines += [f"output {value}" for value in plan.outputs]
    lines += _format_rings(plan.channels)
    lines += _format_grid(plan, _columns(plan), mark)
    return "\n".join(lines)


def format_excerpt(plan: Plan, mark: Mark, num_columns: int = 12, num_rows: int = 12) -> str:
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


def _format_node(node: NodeSpec) -> str:
    call = f"{node.actor}.{node.method}({', '.join(node.inputs)})"
    return f"node {node.id} = {call} -> {', '.join(node.outputs)}".rstrip()


def _format_channel(channel: ChannelSpec) -> str:
    of = "" if channel.id == channel.value else f" of {channel.value}"
    ends = f"{channel.writer} -> {', '.join(channel.readers)}".rstrip()
    how = f"{channel.transport} depth={channel.depth} buffer_bytes={channel.buffer_bytes}"
    return f"channel {channel.id}{of}: {ends} | {how}"


def _format_rings(channels: Iterable[ChannelSpec]) -> list[str]:
    """A comment with what the rings take in all, and what the biggest take."""
    sizes_bytes = {each.id: each.depth * max(each.buffer_bytes, SMALLEST_SLOT_BYTES) for each in channels}
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
    plan: Plan, columns: dict[str, list[int]], mark: Mark | None, window: range | None = None
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


def _columns(plan: Plan) -> dict[str, list[int]]:
    """The column of each action, by party."""
    columns = _levels(plan)
    num_actions = sum(map(len, plan.programs.values()))
    if columns is None or sum(places[-1] for places in columns.values() if places) > MAX_CELLS_PER_ACTION * num_actions:
        return {actor: list(range(len(actions))) for actor, actions in plan.programs.items()}
    return columns


def _levels(plan: Plan) -> dict[str, list[int]] | None:
    """For each action the length of the longest chain that must be over before it; None where there is a cycle."""
    starts, num_steps = {}, 0
    for actor, actions in plan.programs.items():
        starts[actor] = num_steps
        num_steps += len(actions)
    after: list[list[int]] = [[] for _ in range(num_steps)]
    num_before = [0] * num_steps
    for before, step in _waits(plan, starts):
        after[before].append(step)
        num_before[step] += 1
    levels = [0] * num_steps
    ready = [step for step in range(num_steps) if not num_before[step]]
    for step in ready:
        for later in after[step]:
            levels[later] = max(levels[later], levels[step] + 1)
            num_before[later] -= 1
            if not num_before[later]:
                ready.append(later)
    if len(ready) < num_steps:
        return None
    return {actor: levels[starts[actor] : starts[actor] + len(actions)] for actor, actions in plan.programs.items()}


def _waits(plan: Plan, starts: dict[str, int]) -> Iterator[tuple[int, int]]:
    """Pairs (step, step that waits for it) of one round: program order, and messages to where they are waited for."""
    written: dict[str, int] = {}
    for actor, actions in plan.programs.items():
        yield from pairwise(range(starts[actor], starts[actor] + len(actions)))
        for step, action in enumerate(actions, starts[actor]):
            if action.verb in (Verb.WRITE, Verb.SEND):
                written[action.target] = step
    for actor, actions in plan.programs.items():
        coming: dict[str, int] = {}
        for action in actions:
            channel = plan.channel.get(action.target)
            if action.verb is Verb.RECV and channel is not None and channel.id in written:
                coming[channel.value] = written[channel.id]
        for step, action in enumerate(actions, starts[actor]):
            is_waited_for = action.verb is Verb.READ or (action.verb is Verb.RECV and action.stream == MAIN)
            if is_waited_for and not action.ahead and action.target in written:
                yield written[action.target], step
            for value in values_used(plan, action):
                if value in coming:
                    yield coming.pop(value), step


# Reading

_ID = r"[A-Za-z_][A-Za-z0-9_.~-]*"
_NAME = r"[A-Za-z_][A-Za-z0-9_-]*"
_INT = r"-?[0-9]{1,18}"
_LIST = r"[A-Za-z0-9_.~, \t-]*"

_HEADER = re.compile(rf"plan\s+max_inflight=({_INT})\s+returns=(list|value)")
_INPUT = re.compile(rf"input\s+({_ID})\s*=\s*(\*|go|\[{_INT}\]|\.\S+|\[(\"(?:[^\"\\]|\\.)*\")\])", re.DOTALL)
_NODE = re.compile(rf"node\s+({_ID})\s*=\s*({_NAME})\.(\w+)\(({_LIST})\)\s*->({_LIST})")
_CHANNEL = re.compile(
    rf"channel\s+({_ID})(?:\s+of\s+({_ID}))?\s*:\s*({_NAME})\s*->({_LIST})\|\s*(\w+)\s+depth=({_INT})\s+buffer_bytes=({_INT})"
)
_OUTPUT = re.compile(rf"output\s+({_ID})")
_ROW = re.compile(rf"({_NAME})\s*\|(.*)", re.DOTALL)
_ACTION = re.compile(rf"({'|'.join(Verb)})\s+({_ID})(?:\s+@({_NAME}))?(?:\s+\+({_INT}))?")

_FORMS = {
    "plan": "plan max_inflight=10 returns=value",
    "input": 'input i0 = KEY, where KEY is *, go, [0], ["text"] or .name',
    "node": "node n0 = Actor.method(i0) -> n0",
    "channel": "channel n0: Writer -> Reader, driver | shm depth=2 buffer_bytes=0",
    "output": "output n0",
}
_ROW_FORM = "a party's row, such as: Actor | read i0 | run n0"


def parse_plan(text: str) -> Plan:
    """The plan that ``format_plan`` wrote. It is not checked for soundness: ``crossfade.plan.validate`` does that.

    Raises:
        PlanSyntaxError: the text is no plan; the message gives the line and what was expected there.
    """
    parser = _Parser()
    for number, line in enumerate(text.split("\n"), 1):
        stripped = line.strip()
        if stripped and not stripped.startswith("#"):
            parser.take(number, stripped)
    return parser.plan()


class _Parser:
    """Takes a plan's lines one after the other."""

    def __init__(self) -> None:
        self._number, self._line = 1, ""
        self._header: tuple[int, bool] | None = None
        self._inputs: list[InputSpec] = []
        self._nodes: list[NodeSpec] = []
        self._channels: list[ChannelSpec] = []
        self._outputs: list[str] = []
        self._programs: dict[str, tuple[Action, ...]] = {}
        self._takers: list[tuple[re.Pattern[str], Callable[[re.Match[str]], None]]] = [
            (_ROW, self._take_row),
            (_NODE, self._take_node),
            (_CHANNEL, self._take_channel),
            (_INPUT, self._take_input),
            (_OUTPUT, self._take_output),
            (_HEADER, self._take_header),
        ]

    def take(self, number: int, line: str) -> None:
        """One line, with no space around it, which is not empty and no comment."""
        self._number, self._line = number, line
        for pattern, taker in self._takers:
            match = pattern.fullmatch(line)
            if match is not None:
                if self._header is None and pattern is not _HEADER:
                    raise self._expected(_FORMS["plan"], "the first line of a plan is its header")
                taker(match)
                return
        keyword = line.split(maxsplit=1)[0]
        if keyword in _FORMS:
            raise self._expected(_FORMS[keyword], "names are letters, digits and _ - ; ids may also hold . and ~")
        known = ", ".join(_FORMS)
        raise self._expected(_ROW_FORM, f"lines start with one of {known}, or with a party's name and |")

    def plan(self) -> Plan:
        """All that was taken."""
        if self._header is None:
            raise self._expected(_FORMS["plan"], "the text holds no plan; format_plan(plan) writes one")
        max_inflight, returns_list = self._header
        return Plan(
            inputs=tuple(self._inputs),
            nodes=tuple(self._nodes),
            channels=tuple(self._channels),
            programs=self._programs,
            outputs=tuple(self._outputs),
            returns_list=returns_list,
            max_inflight=max_inflight,
        )

    def _expected(self, what: str, hint: str) -> PlanSyntaxError:
        line = self._line
        shown = line if len(line) <= LONGEST_LINE_SHOWN else f"{line[:LONGEST_LINE_SHOWN]}..."
        return PlanSyntaxError(f"line {self._number}: {shown!r}\nexpected: {what}", hint=hint)

    def _ids(self, text: str, what: str) -> tuple[str, ...]:
        if not text.strip():
            return ()
        ids = tuple(each.strip() for each in text.split(","))
        for each in ids:
            if not re.fullmatch(_ID, each):
                raise self._expected(what, f"{each!r} is no id; ids are separated by commas")
        return ids

    def _take_header(self, match: re.Match[str]) -> None:
        if self._header is not None:
            raise self._expected("one header only", "a text holds one plan")
        self._header = int(match[1]), match[2] == "list"

    def _take_input(self, match: re.Match[str]) -> None:
        value, key, quoted = match.groups()
        if quoted is not None:
            try:
                json.loads(quoted)
            except ValueError as error:
                raise self._expected(_FORMS["input"], f"the text in brackets is written as in JSON: {error}") from None
        self._inputs.append(InputSpec(value, key))

    def _take_node(self, match: re.Match[str]) -> None:
        node_id, actor, method, inputs, outputs = match.groups()
        form = _FORMS["node"]
        self._nodes.append(NodeSpec(node_id, actor, method, self._ids(inputs, form), self._ids(outputs, form)))

    def _take_channel(self, match: re.Match[str]) -> None:
        channel_id, value, writer, readers, transport, depth, buffer_bytes = match.groups()
        if transport not in set(Transport):
            raise self._expected(_FORMS["channel"], f"transports are {', '.join(Transport)}")
        ids = self._ids(readers, _FORMS["channel"])
        self._channels.append(
            ChannelSpec(
                id=channel_id,
                value=value or channel_id,
                writer=writer,
                readers=ids,
                transport=Transport(transport),
                depth=int(depth),
                buffer_bytes=int(buffer_bytes),
            )
        )

    def _take_output(self, match: re.Match[str]) -> None:
        self._outputs.append(match[1])

    def _take_row(self, match: re.Match[str]) -> None:
        actor, cells = match.groups()
        if actor in self._programs:
            raise self._expected("another party's row", f"{actor} has a row already; each party has one")
        actions = [self._action(cell) for cell in map(str.strip, cells.split("|")) if cell]
        self._programs[actor] = tuple(actions)

    def _action(self, cell: str) -> Action:
        match = _ACTION.fullmatch(cell)
        if match is None:
            hint = f"{cell[:LONGEST_LINE_SHOWN]!r} is no action; verbs are {', '.join(Verb)}, @ names the stream"
            raise self._expected("actions between |, such as: recv n0 @recv +1", hint)
        verb, target, stream, ahead = match.groups()
        return Action(Verb(verb), target, stream or MAIN, int(ahead or 0))
