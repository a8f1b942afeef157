"""Reads the text form of a plan, which ``crossfade.plan.text`` describes and writes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from crossfade.errors import PlanSyntaxError
from crossfade.plan.actions import MAIN, Action, Verb
from crossfade.plan.plan import ChannelSpec, CollectiveSpec, CommunicatorSpec, InputSpec, NodeSpec, Plan
from crossfade.types import CollectiveKind, ReduceOp, TargetDevice, Transport

LONGEST_LINE_SHOWN = 120

_MARKS = re.escape("!\"#$%&'()*+,/:;<=>?@[\\]^`{|}") + r"\s\x00-\x1f\x7f"
"""What no name holds. All else is allowed: a regular expression's letters leave out the vowel signs that identifiers may have."""
_ID = rf"[^{_MARKS}\d.~-][^{_MARKS}]*"
_NAME = rf"[^{_MARKS}\d.~-][^{_MARKS}.~]*"
_METHOD = rf"[^{_MARKS}.~-]+"
_INT = r"-?[0-9]{1,18}"
_LIST = r"[^()|]*"  # of ids, each of which is looked at when the list is split

_HEADER = re.compile(rf"plan\s+max_inflight=({_INT})\s+returns=(list|value)")
_INPUT = re.compile(rf"input\s+({_ID})\s*=\s*(\*|go|\[{_INT}\]|\.\S+|\[(\"(?:[^\"\\]|\\.)*\")\])", re.DOTALL)
_NODE = re.compile(rf"node\s+({_ID})\s*=\s*({_NAME})\.({_METHOD})\(({_LIST})\)\s*->({_LIST})")
_CHANNEL = re.compile(
    rf"channel\s+({_ID})(?:\s+of\s+({_ID}))?\s*:\s*({_NAME})\s*->({_LIST})\|\s*(\w+)(?:\s+({_ID}))?\s+depth=({_INT})\s+buffer_bytes=({_INT})"
    rf"(?:\s+slots=({_INT}))?(?:\s+turn=({_INT}))?(?:\s+device=(\w+))?(?:\s+(posted))?"
)
_DEVICES = re.compile(rf"device\s+({_NAME})\s*=((?:\s*{_INT}\s*,)*\s*{_INT})?")
_HOST = re.compile(rf"host\s+([^\s,=|]+)\s*=({_LIST})")
_COLLECTIVE = re.compile(
    rf"collective\s+({_ID})\s*=\s*(\w+)\((?:(\w+)|root=({_INT}))?\)\s+over\s+(\w+)(?:\s+({_ID}))?\s*:([^|]*)"
)
_COMMUNICATOR = re.compile(rf"communicator\s+({_ID})\s*=({_LIST})")
_PARTY = re.compile(rf"\s*({_NAME})\(({_LIST})\)\s*->({_LIST})")
_OUTPUT = re.compile(rf"output\s+({_ID})")
_STATIC = re.compile(rf"static\s({_LIST})")
_ROW = re.compile(rf"({_NAME})\s*\|(.*)", re.DOTALL)
_ACTION = re.compile(rf"({'|'.join(Verb)})\s+({_ID})(?:\s+@({_NAME}))?(?:\s+\+({_INT}))?")

_FORMS = {
    "plan": "plan max_inflight=10 returns=value",
    "device": "device Actor = 0, 1",
    "host": "host node0 = driver, Actor",
    "input": 'input i0 = KEY, where KEY is *, go, [0], ["text"] or .name',
    "node": "node n0 = Actor.method(i0) -> n0",
    "collective": "collective c0 = allreduce(sum) over gloo: A(n0) -> c0.0; B(n1) -> c0.1",
    "channel": "channel n0: Writer -> Reader, driver | shm depth=2 buffer_bytes=0",
    "output": "output n0",
    "static": "static n0, i0",
    "communicator": "communicator m0 = A, B",
}
_ROW_FORM = "a party's row, such as: Actor | read i0 | run n0"


def parse_plan(text: str) -> Plan:
    """The plan that ``format_plan`` wrote. It is not checked for soundness: ``crossfade.plan.validate`` does that.

    Raises:
        PlanSyntaxError: the text is no plan; the message gives the line and what was expected there.
    """
    if not isinstance(text, str):
        raise TypeError(
            f"parse_plan takes the text of a plan, not {type(text).__name__}\nhint: str(plan) or format_plan(plan) writes it"
        )
    parser = _Parser()
    for number, line in enumerate(text.split("\n"), 1):
        stripped = line.strip()
        if stripped and not stripped.startswith("#"):
            parser.take(number, stripped)
    return parser.plan()


class _Parser:
    def __init__(self) -> None:
        self._number, self._line = 1, ""
        self._header: tuple[int, bool] | None = None
        self._devices: dict[str, tuple[int, ...]] = {}
        self._hosts: dict[str, str] = {}
        self._inputs: list[InputSpec] = []
        self._nodes: list[NodeSpec] = []
        self._channels: list[ChannelSpec] = []
        self._collectives: list[CollectiveSpec] = []
        self._communicators: list[CommunicatorSpec] = []
        self._outputs: list[str] = []
        self._static: list[str] = []
        self._programs: dict[str, tuple[Action, ...]] = {}
        self._takers: list[tuple[re.Pattern[str], Callable[[re.Match[str]], None]]] = [
            (_ROW, self._take_row),
            (_NODE, self._take_node),
            (_CHANNEL, self._take_channel),
            (_COLLECTIVE, self._take_collective),
            (_COMMUNICATOR, self._take_communicator),
            (_DEVICES, self._take_devices),
            (_HOST, self._take_host),
            (_INPUT, self._take_input),
            (_OUTPUT, self._take_output),
            (_STATIC, self._take_static),
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
            raise self._expected(
                _FORMS[keyword], "names are letters of any alphabet, digits and _ - ; ids may also hold . and ~"
            )
        known = ", ".join(_FORMS)
        raise self._expected(_ROW_FORM, f"lines start with one of {known}, or with a party's name and |")

    def plan(self) -> Plan:
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
            collectives=tuple(self._collectives),
            devices=self._devices,
            static=tuple(self._static),
            communicators=tuple(self._communicators),
            hosts=self._hosts,
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
                raise self._expected(what, f"{each[:LONGEST_LINE_SHOWN]!r} is no id; ids are separated by commas")
        return ids

    def _take_header(self, match: re.Match[str]) -> None:
        if self._header is not None:
            raise self._expected("one header only", "a text holds one plan")
        self._header = int(match[1]), match[2] == "list"

    def _take_devices(self, match: re.Match[str]) -> None:
        party, gpus = match.groups()
        if party in self._devices:
            raise self._expected("another party's GPUs", f"{party} has its GPUs already; each party has one list")
        self._devices[party] = tuple(map(int, gpus.split(","))) if gpus else ()

    def _take_host(self, match: re.Match[str]) -> None:
        for party in self._ids(match[2], _FORMS["host"]):
            if party in self._hosts:
                raise self._expected(
                    "other parties", f"{party} is on {self._hosts[party]} already; each party is on one host"
                )
            self._hosts[party] = match[1]

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
        channel_id, value, writer, readers, transport, communicator, depth, buffer_bytes, *more = match.groups()
        slots, turn, device, posted = more
        if transport not in set(Transport):
            raise self._expected(_FORMS["channel"], f"transports are {', '.join(Transport)}")
        if (device or TargetDevice.DEFAULT) not in set(TargetDevice):
            raise self._expected(_FORMS["channel"], f"devices are {', '.join(TargetDevice)}")
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
                device=TargetDevice(device or TargetDevice.DEFAULT),
                slots=int(slots or 0),
                turn=int(turn or 0),
                communicator=communicator or "",
                is_posted=posted is not None,
            )
        )

    def _take_collective(self, match: re.Match[str]) -> None:
        collective_id, kind, op, root, transport, communicator, rest = match.groups()
        form = _FORMS["collective"]
        for word, words in ((kind, CollectiveKind), (transport, Transport), (op or ReduceOp.SUM, ReduceOp)):
            if word not in set(words):
                raise self._expected(form, f"{word[:LONGEST_LINE_SHOWN]!r} is none of {', '.join(words)}")
        parties = [_PARTY.fullmatch(party) for party in rest.split(";")] if rest.strip() else []
        found = [party.groups() for party in parties if party is not None]
        if len(found) < len(parties):
            raise self._expected(form, "parties are separated by ;")
        self._collectives.append(
            CollectiveSpec(
                id=collective_id,
                kind=CollectiveKind(kind),
                op=None if op is None else ReduceOp(op),
                root=int(root or 0),
                transport=Transport(transport),
                parties=tuple(party for party, _, _ in found),
                inputs=tuple(self._ids(inputs, form) for _, inputs, _ in found),
                outputs=tuple(self._ids(outputs, form) for _, _, outputs in found),
                communicator=communicator or "",
            )
        )

    def _take_communicator(self, match: re.Match[str]) -> None:
        self._communicators.append(CommunicatorSpec(match[1], self._ids(match[2], _FORMS["communicator"])))

    def _take_output(self, match: re.Match[str]) -> None:
        self._outputs.append(match[1])

    def _take_static(self, match: re.Match[str]) -> None:
        self._static += self._ids(match[1], _FORMS["static"])

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
