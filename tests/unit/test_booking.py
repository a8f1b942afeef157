"""Who holds what: never more than there is, and all of it comes back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from crossfade.api.booking import CPU, GPU, Ledger, amounts
from crossfade.engines.machine import count_gpus, gpu_uuids
from crossfade.errors import ActorStartError

TENTHS = st.integers(0, 40).map(lambda tenths: tenths / 10)
NAMES = st.sampled_from([CPU, GPU, "license"])
ASKED = st.dictionaries(NAMES, TENTHS)
HOLDERS = st.sampled_from([f"A{number}" for number in range(8)])


def fits(asked: int, room: list[int]) -> bool:
    """Whether so many tenths find a place: the part on any one GPU, then enough others that are whole and free."""
    num_whole, part = divmod(asked, 10)
    places = [at for at, tenths in enumerate(room) if tenths >= part] if part else [-1]
    return any(sum(t == 10 for at, t in enumerate(room) if at != place) >= num_whole for place in places)


class Booking(RuleBasedStateMachine):
    """A ledger beside the plainest model: a dict of what each one holds, in whole tenths."""

    @initialize(totals=ASKED)
    def start(self, totals: dict[str, float]) -> None:
        self.ledger = Ledger(totals)
        self.totals = {name: round(amount * 10) for name, amount in totals.items()}
        self.held: dict[str, dict[str, int]] = {}

    def free(self, name: str) -> int:
        return self.totals.get(name, 0) - sum(mine.get(name, 0) for mine in self.held.values())

    @rule(holder=HOLDERS, asked=ASKED)
    def book(self, holder: str, asked: dict[str, float]) -> None:
        if holder in self.held:
            return
        wanted = {name: round(amount * 10) for name, amount in asked.items() if amount}
        if all(tenths <= self.free(name) for name, tenths in wanted.items()) and fits(wanted.get(GPU, 0), self.room()):
            self.ledger.book(holder, asked)
            if wanted:
                self.held[holder] = wanted
        else:
            with pytest.raises(ActorStartError, match=f"actor {holder} asks for"):
                self.ledger.book(holder, asked)

    @rule(holder=HOLDERS)
    def give_back(self, holder: str) -> None:
        self.ledger.give_back(holder)
        self.held.pop(holder, None)

    @rule(gone=st.sets(HOLDERS))
    def some_die(self, gone: set[str]) -> None:
        self.ledger.give_back_if(gone.__contains__)
        self.held = {holder: mine for holder, mine in self.held.items() if holder not in gone}

    def room(self) -> list[int]:
        """What is free of each GPU, in tenths."""
        total = self.totals.get(GPU, 0)
        room = [min(10, total - start) for start in range(0, total, 10)]
        for holder in self.held:
            for index, share in self.ledger.gpu_shares(holder).items():
                room[index] -= round(share * 10)
        return room

    @invariant()
    def a_whole_gpu_has_one_holder_and_a_part_is_of_one(self) -> None:
        if hasattr(self, "ledger"):
            for holder, mine in self.held.items():
                num_whole, part = divmod(mine.get(GPU, 0), 10)
                shares = [round(share * 10) for share in self.ledger.gpu_shares(holder).values()]
                assert sorted(shares) == sorted([10] * num_whole + [part] * (part > 0))
                assert self.ledger.gpus(holder) == tuple(sorted(self.ledger.gpu_shares(holder)))
            assert all(0 <= tenths <= 10 for tenths in self.room())
            assert sum(self.room()) == self.free(GPU)

    @invariant()
    def nothing_is_lost_or_made(self) -> None:
        if hasattr(self, "ledger"):
            assert self.ledger.holders == tuple(self.held)
            for name in (CPU, GPU, "license"):
                assert self.ledger.free(name) == pytest.approx(self.free(name) / 10)
                assert 0 <= self.ledger.free(name) <= self.ledger.total(name)


test_a_ledger_is_as_its_model = Booking.TestCase


def test_ten_tenths_are_one() -> None:
    ledger = Ledger({GPU: 1})
    for number in range(10):
        ledger.book(f"A{number}", {GPU: 0.1})
    assert ledger.free(GPU) == 0.0
    with pytest.raises(ActorStartError):
        ledger.book("A10", {GPU: 0.0001})


def test_a_refusal_says_what_was_asked_what_is_free_and_who_holds_the_rest() -> None:
    ledger = Ledger({CPU: 4})
    ledger.book("A0", {CPU: 2.5})
    ledger.book("B0", {CPU: 1})
    with pytest.raises(ActorStartError) as caught:
        ledger.book("C0", {CPU: 1})
    assert str(caught.value) == (
        "actor C0 asks for num_cpus=1, and 0.5 of 4 is free: A0 holds 2.5, B0 holds 1\n"
        "hint: crossfade.kill(actor) gives back what an actor holds"
    )
    assert caught.value.actor == "C0"
    with pytest.raises(ActorStartError, match=r"the session has 0; crossfade\.init\(resources=\{'license': \.\.\.\}\)"):
        ledger.book("C0", {"license": 1})


def test_parts_share_a_gpu_and_whole_ones_are_alone() -> None:
    ledger = Ledger({GPU: 4})
    for holder, asked in (("A", 0.5), ("B", 2), ("C", 0.5), ("D", 0.3), ("E", 0)):
        ledger.book(holder, {GPU: asked})
    assert [ledger.gpus(holder) for holder in "ABCDE"] == [(0,), (1, 2), (0,), (3,), ()]
    with pytest.raises(ActorStartError) as caught:
        ledger.book("F", {GPU: 1})
    assert "and 0.7 of 4 is free" in str(caught.value)
    ledger.give_back("A")
    with pytest.raises(ActorStartError) as caught:
        ledger.book("F", {GPU: 1})
    assert str(caught.value).startswith(
        "actor F asks for num_gpus=1, and what is free is in pieces: 0.5 of GPU 0, 0.7 of GPU 3\nhint: whole GPUs"
    )
    assert (caught.value.actor, ledger.gpus("F"), ledger.free(GPU)) == ("F", (), 1.2)
    ledger.give_back_if({"B"}.__contains__)
    ledger.book("F", {GPU: 1.6})
    assert ledger.gpus("F") == (1, 3)


def test_a_refused_booking_holds_nothing() -> None:
    ledger = Ledger({CPU: 2, GPU: 0})
    with pytest.raises(ActorStartError):
        ledger.book("A0", {CPU: 1, GPU: 1})
    assert ledger.free(CPU) == 2
    assert ledger.holders == ()


@pytest.mark.parametrize("amount", [-1, float("nan"), float("inf"), 0.00001])
def test_impossible_amounts(amount: float) -> None:
    with pytest.raises(ValueError, match="hint: "):
        amounts(num_cpus=amount)


@pytest.mark.parametrize("amount", ["1", True, [1]])
def test_amounts_are_numbers(amount: object) -> None:
    with pytest.raises(TypeError, match="hint: "):
        amounts(num_gpus=amount)  # type: ignore[arg-type]


def test_cpus_are_not_among_the_resources() -> None:
    with pytest.raises(ValueError, match="use num_cpus="):
        amounts(resources={"CPU": 1})
    with pytest.raises(TypeError, match="it is a dict"):
        amounts(resources=["license"])  # type: ignore[arg-type]
    assert amounts(num_cpus=0, num_gpus=0.5, resources={"license": 2}) == {GPU: 0.5, "license": 2}


@pytest.mark.parametrize(
    ("visible", "num_gpus"),
    [
        (None, 2),
        ("", 0),
        ("0", 1),
        ("0,1", 2),
        ("1, 0", 2),
        ("-1", 0),
        ("0,-1,1", 1),
        ("0,1,2,3", 2),
        ("GPU-7a2b", 1),
        ("none", 0),
    ],
)
def test_gpus_are_counted_by_their_files_and_what_is_visible(visible: str | None, num_gpus: int) -> None:
    files = ["null", "nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "nvidia-caps"]
    assert count_gpus(files, visible) == num_gpus


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, {0: "GPU-7a", 1: "GPU-7b", 2: "GPU-9"}),
        ("2,0", {0: "GPU-9", 1: "GPU-7a"}),
        ("1, 5", {0: "GPU-7b"}),
        ("GPU-9,GPU-7,GPU-7b", {0: "GPU-9", 2: "GPU-7b"}),
        ("-1,0", {}),
        ("", {}),
    ],
)
def test_gpus_are_known_by_the_numbers_that_cuda_gives_the_visible_ones(
    visible: str | None, expected: dict[int, str]
) -> None:
    assert gpu_uuids(["GPU-7a", "GPU-7b", "GPU-9"], visible) == expected


@given(visible=st.none() | st.text())
def test_without_device_files_there_are_no_gpus(visible: str | None) -> None:
    assert count_gpus(["null", "nvidiactl"], visible) == 0
    assert gpu_uuids([], visible) == {}
