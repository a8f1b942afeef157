"""Every transport against the conformance suite."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import pytest

from crossfade.channels.local import open_local
from crossfade.channels.protocol import EMPTY, Reader, Writer
from crossfade.host.memory import Memory
from crossfade.testing import conformance
from tests.helpers.bells import new_bell
from tests.helpers.shm_pair import open_shm_pair
from tests.helpers.threads import together


@contextmanager
def open_local_pair(depth: int, num_readers: int) -> Iterator[tuple[Writer, Sequence[Reader]]]:
    yield open_local("c", depth, num_readers)


@contextmanager
def open_gloo_pair(depth: int, num_readers: int) -> Iterator[tuple[Writer, Sequence[Reader]]]:
    gloo = pytest.importorskip("crossfade.channels.gloo", reason="gloo needs torch")
    store = os.memfd_create("store")
    parties = ["writer", *(f"reader{index}" for index in range(num_readers))]
    links = {}
    bells = {party: new_bell() for party in parties}

    def join(party: str) -> None:
        links[party] = gloo.GlooLink(Memory(os.dup(store)), parties, party, bells[party])

    together(join, parties)
    try:
        writer = links["writer"].writer("c", 0, depth, parties[1:])
        yield writer, [links[party].reader("c", 0, depth, "writer") for party in parties[1:]]
    finally:
        together(lambda link: link.close(), links.values())
        os.close(store)
        for bell in bells.values():
            bell.close()


TestShm = conformance.suite(open_shm_pair)
TestLocal = conformance.suite(open_local_pair)
TestGloo = conformance.suite(open_gloo_pair)

if find_spec("torch") is not None:
    from tests.helpers.by_pipe import open_pipe_pair

    TestPipe = conformance.suite(open_pipe_pair)  # a transport that only these tests have

    @pytest.mark.parametrize("num_readers", [1, 3])
    def test_tensors_travel_apart_from_their_message_through_a_pipe(num_readers: int) -> None:
        import torch

        with open_pipe_pair(2, num_readers) as (writer, readers):
            for number in range(4):
                value: Any = {"long": torch.arange(300_000) + number, "none": torch.empty(0, 3), "text": "x"}
                assert writer.try_write(value)
                for reader in readers:
                    assert reader.try_start()
                    while (got := reader.try_read()) is EMPTY:
                        pass
                    reader.release()
                    assert isinstance(got, dict)
                    assert torch.equal(got["long"], value["long"])
                    assert got["none"].shape == (0, 3)
