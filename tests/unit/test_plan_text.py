"""The text form of plans: what is written parses back; any other text gives a plan, or an error that names the line."""

from __future__ import annotations

import re
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossfade.errors import PlanSyntaxError
from crossfade.plan.actions import Action, Verb
from crossfade.plan.parse import parse_plan
from crossfade.plan.plan import InputSpec, Plan
from crossfade.plan.text import format_excerpt, format_plan
from crossfade.types import Transport
from tests.helpers.counts import num
from tests.helpers.edited_plans import any_plan
from tests.helpers.plans import Size, chain_plan, sound_plan

TWO_ACTORS = """\
plan max_inflight=2 returns=value
input i0 = *
node n0 = Sender.make(i0) -> n0
node n1 = Receiver.take(n0) -> n1
channel i0: driver -> Sender | shm depth=2 buffer_bytes=0
channel n0: Sender -> Receiver | gloo depth=3 buffer_bytes=2000000
channel n1~shm of n1: Receiver -> driver | shm depth=2 buffer_bytes=0
output n1
# rings take 5.7 MiB: n0 5.7 MiB, i0 2.0 KiB, n1~shm 2.0 KiB
driver   | write i0         |         |        |               |         |              | read n1~shm | free n1
Sender   |                  | read i0 | run n0 | send n0 @send | free i0
Receiver | recv n0 @recv +1 |         |        |               | run n1  | write n1~shm | free n0"""


def test_golden() -> None:
    plan = parse_plan(TWO_ACTORS)
    assert plan.programs["Receiver"][0] == Action(Verb.RECV, "n0", "recv", 1)
    assert [channel.value for channel in plan.channels] == ["i0", "n0", "n1"]
    assert plan.channel["n0"].transport is Transport.GLOO
    assert format_plan(plan) == TWO_ACTORS
    assert str(plan) == TWO_ACTORS


@pytest.mark.soak
@pytest.mark.parametrize("first", range(0, num(1000, 4000), 1000))
def test_any_plan_parses_back(first: int) -> None:
    for seed in range(first, first + 1000):
        plan = any_plan(Random(seed))
        assert parse_plan(format_plan(plan)) == plan, f"seed {seed}"


@given(st.randoms(use_true_random=False), st.booleans())
def test_random_plans_parse_back(rng: Random, is_sound: bool) -> None:
    plan = sound_plan(rng, Size(nodes=8, actors=5, inputs_per_node=3)) if is_sound else any_plan(rng)
    text = format_plan(plan)
    again = parse_plan(text)
    assert again == plan
    assert list(again.programs) == list(plan.programs)
    assert parse_plan(text.replace("\n", "\r\n") + "\n") == plan


@pytest.mark.parametrize("name", ["größe", "Ünïcode", "कक्षा", "类", "ª", "e\u0301"])
def test_names_of_any_alphabet_parse_back(name: str) -> None:
    """Whatever Python takes for the name of a class or of a method, vowel signs and accents that stand alone included."""
    assert name.isidentifier()
    text = TWO_ACTORS.replace("Sender.make", f"Sender.{name}").replace("Sender", f"{name}0")
    plan = parse_plan(text)
    assert (plan.nodes[0].actor, plan.nodes[0].method) == (f"{name}0", name)
    assert f"{name}0" in plan.programs
    assert parse_plan(format_plan(plan)) == plan


@pytest.mark.parametrize("name", ["a\u3000b", "a\x85b", "a b", "٣a", "a'b", "a\x00b"])
def test_names_hold_no_white_space_and_no_marks(name: str) -> None:
    with pytest.raises(PlanSyntaxError, match="letters of any alphabet"):
        parse_plan(TWO_ACTORS.replace("node n0 = Sender", f"node n0 = {name}"))


KEYS = ["*", "go", "[0]", "[-1]", ".name", r'["a \"quoted\" | # \\ text"]', '[""]', '["\x85"]']


@pytest.mark.parametrize("key", KEYS)
def test_input_keys(key: str) -> None:
    plan = replace(chain_plan(1), inputs=(InputSpec("i0", key),))
    assert parse_plan(format_plan(plan)).inputs == (InputSpec("i0", key),)


def test_values_of_static_shape() -> None:
    plan = replace(parse_plan(TWO_ACTORS), static=("i0", "n0"))
    assert "static i0, n0" in format_plan(plan).splitlines()
    assert parse_plan(format_plan(plan)) == plan
    with pytest.raises(PlanSyntaxError, match="expected: static n0, i0"):
        parse_plan(f"{TWO_ACTORS}\nstatic n0 i0")


def test_comments_and_empty_lines_are_skipped() -> None:
    noisy = "\n\n# first\n" + TWO_ACTORS.replace("\n", "\n  # more\n\n") + "\n#"
    assert parse_plan(noisy) == parse_plan(TWO_ACTORS)


# The grid


def column(text: str, party: str, action: str) -> int:
    """Where the action's cell starts in the party's row."""
    row = next(line for line in text.splitlines() if re.match(rf"{party} +\|", line))
    match = re.search(rf"\| {re.escape(action)}(?= |$)", row)
    assert match is not None, f"{party} has no {action!r} in {row!r}"
    return match.start() + 2


def test_messages_run_from_left_to_right() -> None:
    for seed in range(200):
        plan = sound_plan(Random(seed))
        text = format_plan(plan)
        for channel in plan.channels:
            puts = [action for action in plan.programs[channel.writer] if action.verb in (Verb.WRITE, Verb.SEND)]
            put = next(action for action in puts if action.target == channel.id)
            for reader in channel.readers:
                then = f"free {channel.value}" if channel.is_ordered else f"read {channel.id}"
                assert column(text, channel.writer, str(put)) < column(text, reader, then), f"seed {seed}"


def test_cells_of_one_column_start_at_one_place() -> None:
    rows = [line for line in format_plan(chain_plan(9, 3)).splitlines() if re.match(r"(driver|A\d) +\|", line)]
    bars = [{match.start() for match in re.finditer(r"\|", row)} for row in rows]
    longest = max(bars, key=len)
    assert len(rows) == 4
    assert all(each <= longest for each in bars)


def test_a_plan_with_a_cycle_prints_without_gaps() -> None:
    text = format_plan(replace(parse_plan(TWO_ACTORS), programs=parse_plan(CROSSED).programs))
    assert "\nA | read n1 | write n0" in text
    assert "\nB | read n0 | write n1" in text


CROSSED = "plan max_inflight=1 returns=list\nA | read n1 | write n0\nB | read n0 | write n1"


@pytest.mark.parametrize("plan", [chain_plan(6, 2), parse_plan(TWO_ACTORS), sound_plan(Random(1)), parse_plan(CROSSED)])
def test_every_step_can_be_pointed_at(plan: Plan) -> None:
    for actor, actions in plan.programs.items():
        for index, action in enumerate(actions):
            text = format_plan(plan, mark=(actor, index))
            for shown in (text, format_excerpt(plan, (actor, index))):
                row, arrow = re.findall(rf"^({actor} .*)\n(#.*)$", shown, re.MULTILINE)[0]
                assert arrow.rstrip().endswith("^ <-- here")
                assert re.match(rf"{re.escape(str(action))}( *\||$)", row[arrow.index("^") :])
            assert parse_plan(text) == plan


@pytest.mark.parametrize("mark", [("nobody", 0), ("driver", 99), ("driver", -1)])
def test_a_step_that_does_not_exist_is_not_pointed_at(mark: tuple[str, int]) -> None:
    assert format_plan(chain_plan(2), mark) == format_plan(chain_plan(2))


def test_excerpts_stay_small() -> None:
    plan = chain_plan(2000, 40)
    excerpt = format_excerpt(plan, ("A7", 100), num_columns=12, num_rows=5)
    assert str(plan.programs["A7"][100]) in excerpt
    assert len(excerpt.splitlines()) <= 7
    assert len(excerpt) < 2000


def test_bytes_of_the_biggest_rings_are_shown() -> None:
    channels = tuple(replace(chain_plan(1).channels[0], id=f"c{i}", depth=1, buffer_bytes=2048 * i) for i in range(20))
    text = format_plan(replace(chain_plan(1), channels=channels))
    total_bytes = 1024 + sum(2048 * i for i in range(1, 20))
    line = next(line for line in text.splitlines() if line.startswith("# rings take"))
    assert line.startswith(f"# rings take {total_bytes / 1024:.1f} KiB: c19 38.0 KiB, c18 36.0 KiB")
    assert line.endswith("and 12 others")


@pytest.mark.parametrize("num_actors", [4, 300])
@pytest.mark.parametrize("transport", [Transport.SHM, Transport.GLOO])
def test_the_text_grows_with_the_number_of_nodes(num_actors: int, transport: Transport) -> None:
    small, big = (format_plan(chain_plan(n, num_actors, transport)) for n in (1_000, 10_000))
    assert len(big) <= 14 * len(small)
    assert parse_plan(big) == chain_plan(10_000, num_actors, transport)


# What is no plan


@pytest.mark.parametrize(
    ("old", "new", "number", "expected"),
    [
        ("plan max_inflight=2", "plan max_inflight=two", 1, "expected: plan max_inflight=10 returns=value"),
        ("input i0 = *", "input i0 = **", 2, "expected: input i0 = KEY"),
        ("input i0 = *", r'input i0 = ["\x"]', 2, "written as in JSON"),
        ("make(i0)", "make(i0", 3, "expected: node n0 = Actor.method(i0) -> n0"),
        ("make(i0)", "make(i0, )", 3, "'' is no id"),
        ("| gloo", "| pigeon", 6, "transports are auto, accelerator, shm, gloo, copy, staged, tcp, nccl"),
        ("depth=3", "depth=3.5", 6, "expected: channel n0"),
        ("depth=3", f"depth={'9' * 5000}", 6, "expected: channel n0"),
        ("output n1", "output n1 n2", 8, "expected: output n0"),
        ("run n0", "walk n0", 11, "'walk n0' is no action; verbs are read, recv, run, write, send, coll, free"),
        ("@recv +1", "@recv ++1", 12, "is no action"),
        ("Receiver | recv", "Sender | recv", 12, "Sender has a row already"),
        (
            "output n1",
            "ouptut n1",
            8,
            "lines start with one of plan, device, host, input, node, collective, channel, output",
        ),
        ("output n1", "plan max_inflight=1 returns=list", 8, "expected: one header only"),
        ("plan max_inflight=2 returns=value\n", "", 1, "the first line of a plan is its header"),
    ],
)
def test_the_line_that_is_wrong_is_named(old: str, new: str, number: int, expected: str) -> None:
    with pytest.raises(PlanSyntaxError) as caught:
        parse_plan(TWO_ACTORS.replace(old, new, 1))
    message = str(caught.value)
    assert message.startswith(f"line {number}: ")
    assert expected in message
    assert "hint: " in message.splitlines()[-1]
    assert len(message) < 1000


def test_nothing_is_no_plan() -> None:
    for text in ("", "\n", "# only a comment"):
        with pytest.raises(PlanSyntaxError, match="the text holds no plan"):
            parse_plan(text)


def parses_or_says_where(text: str) -> bool:
    try:
        plan = parse_plan(text)
    except PlanSyntaxError as error:
        message = str(error)
    else:
        assert parse_plan(format_plan(plan)) == plan
        return True
    assert re.match(r"line \d+: ", message)
    assert "\nexpected: " in message
    assert message.splitlines()[-1].startswith("hint: ")
    return False


@given(st.text())
def test_garbage_is_refused(text: str) -> None:
    parses_or_says_where(text)
    parses_or_says_where(f"plan max_inflight=1 returns=list\n{text}")


PIECES = [*' \n|#,~.=@-0"\\(]\x00ß', "->", "+1", "n0", "run n0"]
EDIT = st.tuples(st.floats(0, 1), st.integers(0, 9), st.sampled_from(PIECES) | st.text(max_size=3))
EDITS = st.lists(EDIT, max_size=4)


@given(st.randoms(use_true_random=False), EDITS)
def test_damaged_plans_are_refused_or_other_plans(rng: Random, edits: list[tuple[float, int, str]]) -> None:
    text = format_plan(any_plan(rng) if rng.random() < 0.5 else sound_plan(rng))
    for place, num_removed, piece in edits:
        at = int(place * len(text))
        text = text[:at] + piece + text[at + num_removed :]
    parses_or_says_where(text)


def test_damage_is_both_seen_and_harmless_at_times() -> None:
    rng = Random(0)
    verdicts = []
    for _ in range(400):
        text = format_plan(sound_plan(rng))
        at = rng.randrange(len(text))
        verdicts.append(parses_or_says_where(text[:at] + rng.choice(PIECES) + text[at + rng.randint(0, 3) :]))
    assert 40 < sum(verdicts) < 360
