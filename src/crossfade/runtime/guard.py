"""Finding values that are changed after they were returned: what ``compile(debug=True)`` adds to an actor's steps.

A value is a fact: a reader may read it where it lies, at any time until it is released. So a digest of each value
is taken when it is made or has come, and compared before each use of it on this actor (as an argument, when it is written or
sent) and when it is released: right after the method that is its last use, before that method's own value is written. What a
background send may still be reading is compared after each method that ran meanwhile.

A value that has changed becomes a `Failure` in its register, and goes the way of one: to the readers of the value. Where nobody
needs it any more, the failure takes the place of the next value that this actor writes.

Digests are made of what would be sent: the pickle, and the buffers beside it. A value that cannot be pickled, or whose pickle
is a different one each time, is not watched.
"""

from __future__ import annotations

import hashlib
import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from crossfade.channels.protocol import Writer
from crossfade.channels.values.codec import message_of
from crossfade.errors import ChannelError, Failure, MutatedValueError
from crossfade.plan.actions import Action, Verb
from crossfade.plan.plan import Plan
from crossfade.runtime.cursor import Step

_MAX_METHODS = 64
_MAX_SHOWN = 4
_HINT = "a value must not change once it was returned or passed: return a copy of what is used again, change a copy of what came"


@dataclass(slots=True)
class _Seen:
    digest: bytes  # of its message
    when: str  # where the actor was then, for people
    num_methods: int  # how many methods it had run


@dataclass(slots=True)
class _Underway:
    """A value that a background send may still be reading."""

    name: str
    value: Any
    seen: _Seen


class Guard:
    """Watches the values of one party of one plan."""

    def __init__(self, plan: Plan, actor: str) -> None:
        self._plan = plan
        self._actor = actor
        self._names = {each.value: f"the graph's input {each.key} ({each.value})" for each in plan.inputs}
        for node in plan.nodes:
            label = f"{node.actor}.{node.method} (node {node.id})"
            self._names.update(
                (value, f"the value of {label}" if value == node.id else f"the value {value} of {label}")
                for value in node.outputs
            )
        for collective in plan.collectives:
            for values in collective.outputs:
                self._names.update(
                    (value, f"the value {value} of {collective.kind} {collective.id}") for value in values
                )
        self._seen: dict[int, _Seen] = {}
        self._underway: dict[str, deque[_Underway]] = {}
        self._writers: dict[str, Writer] = {}
        self._undelivered: deque[Failure] = deque()
        self._methods: deque[str] = deque(maxlen=_MAX_METHODS)
        self._num_methods = 0
        self._released = _released_behind(plan, plan.programs[actor])

    # Steps: each is given, with the registers it works on, as bind made it

    def look(self, registers: list[Any], inputs: Sequence[tuple[int, str]], label: str) -> Callable[[], None]:
        """What comes before a method, or what stands for one: (register, value id) of all that it is given is compared."""

        def compare() -> None:
            for register, value in inputs:
                self._compare(registers, register, value, f"the start of {label}")

        return compare

    def run(
        self,
        step: Step,
        registers: list[Any],
        inputs: Sequence[tuple[int, str]],
        outputs: Sequence[int],
        label: str,
        node: str,
    ) -> Step:
        """A method, behind that look: (register, value id) of what it is given, registers of what it makes."""
        released = [each for each in inputs if each[1] in self._released.get(node, ())]

        def guarded() -> bool:
            if any(type(registers[register]) is Failure for register, _ in inputs):
                return step()  # the method is not run
            self._forget_sent()
            if not step():
                return False
            self._methods.append(label)
            self._num_methods += 1
            self._compare_underway(f"the end of {label}")
            for register, value in released:
                self._release(registers, register, value)
            for register in outputs:
                self._note(registers, register, f"the end of {label}")
            return True

        return guarded

    def arrive(self, step: Step, registers: list[Any], register: int) -> Step:
        """A value comes through a channel."""

        def guarded() -> bool:
            if not step():
                return False
            self._note(registers, register, "its arrival")
            return True

        return guarded

    def leave(self, step: Step, registers: list[Any], register: int, channel: str, background: Writer | None) -> Step:
        """A value goes out by a channel; ``background`` is its writer where that still reads it after the step."""
        value = self._plan.channel[channel].value
        depth = self._plan.channel[channel].depth
        is_compared = False
        if background is not None:
            self._writers[channel] = background
            self._underway[channel] = deque(maxlen=depth)

        def guarded() -> bool:
            nonlocal is_compared
            if not is_compared:  # not again each time that there is no room yet
                self._compare(registers, register, value, f"the sending of {channel}")
                if self._undelivered and type(registers[register]) is not Failure:
                    registers[register] = self._undelivered.popleft()
                is_compared = True
            if not step():
                return False
            is_compared = False
            seen = self._seen.get(register)
            if background is not None and seen is not None and type(registers[register]) is not Failure:
                sent = _Seen(seen.digest, f"the sending of {channel}", self._num_methods)
                self._underway[channel].append(_Underway(self._names[value], registers[register], sent))
            return True

        return guarded

    def free(self, step: Step, registers: list[Any], register: int, value: str) -> Step:
        """A value is released."""

        def guarded() -> bool:
            self._release(registers, register, value)
            return step()

        return guarded

    def close(self) -> None:
        """The plan is taken from the actor: what could not be delivered is printed."""
        while self._undelivered:
            print(f"crossfade: {self._undelivered.popleft().message}", file=sys.stderr, flush=True)

    # Looking

    def _note(self, registers: list[Any], register: int, when: str) -> None:
        value = registers[register]
        digest = None if type(value) is Failure else _digest(value)
        if digest is None or digest != _digest(value):
            self._seen.pop(register, None)
        else:
            self._seen[register] = _Seen(digest, when, self._num_methods)

    def _compare(self, registers: list[Any], register: int, value: str, when: str) -> None:
        seen = self._seen.get(register)
        if seen is None or type(registers[register]) is Failure:
            return
        if _digest(registers[register]) == seen.digest:
            self._seen[register] = _Seen(seen.digest, when, self._num_methods)
        else:
            registers[register] = self._failure(self._names[value], seen, when)

    def _forget_sent(self) -> None:
        """What has left this process may change."""
        for channel, sent in self._underway.items():
            try:
                if sent and self._writers[channel].try_flush():
                    sent.clear()
            except ChannelError:
                sent.clear()  # the step that uses the channel next says so

    def _compare_underway(self, when: str) -> None:
        for sent in self._underway.values():
            for each in list(sent):
                if _digest(each.value) != each.seen.digest:
                    self._undelivered.append(self._failure(f"{each.name}, which was being sent,", each.seen, when))
                    sent.remove(each)

    def _release(self, registers: list[Any], register: int, value: str) -> None:
        was_whole = type(registers[register]) is not Failure
        self._compare(registers, register, value, "its release")
        if was_whole and type(registers[register]) is Failure:
            self._undelivered.append(registers[register])
        self._seen.pop(register, None)

    def _failure(self, name: str, seen: _Seen, when: str) -> Failure:
        num_between = self._num_methods - seen.num_methods
        between = list(self._methods)[-num_between:] if num_between else []
        shown = between if len(between) <= _MAX_SHOWN else [*between[: _MAX_SHOWN - 1], "..."]
        ran = f"; in between ran {', '.join(shown)}" if shown else ""
        error = MutatedValueError(
            f"{name} was changed on actor {self._actor} between {seen.when} and {when}{ran}", hint=_HINT
        )
        return Failure.capture(error, actor=self._actor, node="checking for changed values (debug)")


def _released_behind(plan: Plan, program: Sequence[Action]) -> dict[str, set[str]]:
    """Of each node, the values that are released behind it, before another method runs or a value comes. Those that are written
    in between are not meant: their readers hear of a change.
    """
    released: dict[str, set[str]] = {}
    node, written = "", set[str]()
    for action in program:
        if action.verb is Verb.RUN:
            node, written = action.target, set()
        elif action.verb is Verb.WRITE:
            written.add(plan.channel[action.target].value)
        elif action.verb is Verb.FREE and node and action.target not in written:
            released.setdefault(node, set()).add(action.target)
        elif action.verb is not Verb.FREE:
            node = ""
    return released


def _digest(value: Any) -> bytes | None:
    """A digest of what would be sent; None for what cannot be."""
    try:
        message = message_of(value)
    except Exception:
        return None
    digest = hashlib.blake2b(message.head, digest_size=16)
    for _, data in message.buffers:
        digest.update(data)
    return digest.digest()
