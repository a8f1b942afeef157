"""Rings and staged copies between real processes, on memory of the host: the paths that GPUs take, where there are none."""

from __future__ import annotations

import ctypes
import os
import struct
import subprocess
import sys

import pytest

from crossfade.device.driver import HOST, Driver, OwnerGone
from crossfade.device.host_driver import HostDriver
from crossfade.device.memory import OpenedMemory, Pool
from crossfade.device.staged_layout import StagedLayout
from crossfade.errors import DeviceError
from crossfade.host.memory import PAGE_BYTES, Memory
from tests.helpers import chain_kills, host_cases
from tests.helpers.device_pair import run_workers
from tests.helpers.footprint import names_left, shared_names

NUM_VALUES = 60


@pytest.fixture
def driver() -> HostDriver:
    return HostDriver(1.0)


def test_exported_memory_is_one_memory(driver: HostDriver) -> None:
    """Opened in the same process, it lies at two addresses."""
    seam: Driver = driver
    own = seam.allocate(5000, "own")
    opened = OpenedMemory(seam, seam.export(own), 5000, "opened")
    assert opened.address != own
    seam.copy(opened.address, own + 8, 8, 0)
    ctypes.memset(own, 7, 5000)
    assert ctypes.string_at(opened.address, 5000) == b"\x07" * 5000
    assert own % 256 == 0
    opened.close()
    seam.free(own)
    assert seam.device == HOST
    assert driver.ledger.held() == []


def test_opened_memory_outlives_its_maker(driver: HostDriver) -> None:
    own = driver.allocate(100, "own")
    ctypes.memset(own, 5, 100)
    opened = driver.open_handle(driver.export(own), "opened")
    driver.free(own)
    assert ctypes.string_at(opened, 100) == b"\x05" * 100
    with pytest.raises(DeviceError, match="exported by the process that made it"):
        driver.export(opened)
    driver.close_handle(opened)


MAKER = """
import sys
from crossfade.device.host_driver import HostDriver
driver = HostDriver(1.0)
sys.stdout.buffer.write(driver.export(driver.allocate(100, "own")))
sys.stdout.buffer.flush()
sys.stdin.read()
"""


def test_memory_of_a_process_that_is_ending_is_told_apart(driver: HostDriver) -> None:
    with subprocess.Popen([sys.executable, "-c", MAKER], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as maker:
        assert maker.stdout is not None
        handle = maker.stdout.read(struct.calcsize("<IIQ16s"))
        driver.close_handle(driver.open_handle(handle, "x"))
        maker.kill()
        os.waitid(os.P_PID, maker.pid, os.WEXITED | os.WNOWAIT)  # nobody has asked for its status yet
        with pytest.raises(OwnerGone, match=f"in process {maker.pid} cannot be opened"):
            driver.open_handle(handle, "x")
    with pytest.raises(DeviceError, match="see each other's process ids") as unknown:
        driver.open_handle(handle, "x")
    assert not isinstance(unknown.value, OwnerGone), "it may be a process that this one cannot see"
    assert driver.ledger.held() == []


def test_a_handle_is_good_until_its_memory_is_freed(driver: HostDriver) -> None:
    """Also when the number of its descriptor is used again, by other memory or by something else."""
    own = driver.allocate(100, "own")
    handle = driver.export(own)
    fd = struct.unpack_from("<II", handle)[1]
    driver.free(own)
    with pytest.raises(DeviceError, match="No such file"):
        driver.open_handle(handle, "x")
    again = driver.allocate(100, "again")
    assert struct.unpack_from("<II", driver.export(again))[1] == fd
    with pytest.raises(DeviceError, match="other memory by now"):
        driver.open_handle(handle, "x")
    driver.free(again)
    read, write = os.pipe()
    assert fd in (read, write)
    with pytest.raises(DeviceError, match=r"something else by now\nhint: both processes"):
        driver.open_handle(handle, "x")
    os.close(read)
    os.close(write)
    assert driver.ledger.held() == []


def test_a_handle_is_checked(driver: HostDriver) -> None:
    with pytest.raises(DeviceError, match="3 bytes are no handle"):
        driver.open_handle(b"abc", "x")
    fd = os.memfd_create("bare")
    with pytest.raises(DeviceError, match="it could shrink"):
        driver.open_handle(struct.pack("<IIQ16s", os.getpid(), fd, 0, b""), "x")
    os.close(fd)
    memory = Memory.create("short", PAGE_BYTES)
    with pytest.raises(DeviceError, match="other memory by now"):
        driver.open_handle(struct.pack("<IIQ16s", os.getpid(), memory.fd, PAGE_BYTES, b""), "x")
    memory.close()


def test_too_much_memory_is_refused(driver: HostDriver) -> None:
    num_open = len(os.listdir("/proc/self/fd"))
    with pytest.raises(DeviceError, match="shared memory failed"):
        driver.allocate(1 << 50, "all")
    assert len(os.listdir("/proc/self/fd")) == num_open


def test_a_pool_gives_all_back(driver: HostDriver) -> None:
    num_open = len(os.listdir("/proc/self/fd"))
    pool = Pool(driver)
    blocks = [pool.take(1 << 20, "block", "test") for _ in range(3)]
    for block in blocks:
        driver.close_handle(driver.open_handle(block.handle, "opened"))
        block.release()
    pool.close()
    assert len(os.listdir("/proc/self/fd")) == num_open
    assert driver.ledger.held() == []


def test_a_pool_gives_idle_blocks_back_where_there_is_no_memory(driver: HostDriver) -> None:
    pool, allocate = Pool(driver), driver.allocate

    def allocate_one(size_bytes: int, label: str) -> int:
        if driver.ledger.held("memory"):
            raise DeviceError("out of memory")
        return allocate(size_bytes, label)

    driver.allocate = allocate_one  # type: ignore[method-assign]
    for size_bytes in (1, 10 << 20, 1):
        block = pool.take(size_bytes, "block", "test")
        with pytest.raises(DeviceError, match="out of memory"):
            pool.take(1, "another", "test")
        block.release()
    pool.close()
    assert driver.ledger.held() == []


@pytest.mark.parametrize(("num_slots", "num_kept"), [(1, 0), (1, 3), (2, 0), (2, 3), (4, 2)])
def test_values_of_growing_lengths_go_through_a_ring(num_slots: int, num_kept: int) -> None:
    sent, received = run_workers(
        [host_cases.ring_sends, host_cases.ring_receives],
        [(1, NUM_VALUES, num_slots), (0, NUM_VALUES, num_slots, num_kept)],
    )
    assert received["num_wrong"] == 0
    assert sent["statistics"].num_values == received["statistics"].num_values == NUM_VALUES
    assert sent["statistics"].num_bytes == received["statistics"].num_bytes == 8 * sum(host_cases.lengths(NUM_VALUES))
    assert received["statistics"].num_generations > 5
    assert received["statistics"].num_leased == 0
    assert (received["num_copied_out"] == NUM_VALUES) == (num_slots == 1)
    assert received["num_leased"] >= min(num_slots - 1, num_kept)
    assert sent["held"] == received["held"] == []


@pytest.mark.parametrize(
    "layout",
    [StagedLayout(2, PAGE_BYTES), StagedLayout(3, 64 << 10), StagedLayout(8, 1 << 20)],
    ids=str,
)
def test_values_go_through_staged_copies(layout: StagedLayout) -> None:
    sent, received = run_workers(
        [host_cases.staged_sends, host_cases.staged_receives], [(1, 30, layout), (0, 30, layout)]
    )
    assert received == {"num_wrong": 0, "held": []}
    assert sent == {"held": []}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("is_sender", [True, False])
def test_a_killed_peer_leaves_whole_values_and_nothing_else(is_sender: bool, seed: int) -> None:
    num_slots, before = 1 + seed % 3, shared_names()
    dies = chain_kills.dies_sending if is_sender else chain_kills.dies_receiving
    survives = chain_kills.survives_receiving if is_sender else chain_kills.survives_sending
    _, survivor = run_workers([dies, survives], [(1, seed, num_slots), (0, num_slots)], dying={0})
    assert "worker 0 died" in survivor.pop("error")
    assert survivor.pop("taken_s") < 1
    assert survivor == {
        "dead": ["worker 0"],
        "is_told": [0],
        "held": [],
        "grown": {},
        **({"num_wrong": 0, "is_kept_whole": True} if is_sender else {}),
    }
    assert not names_left(before)


def test_a_wait_for_the_dead_is_let_go() -> None:
    survivor, _ = run_workers([chain_kills.waits_for_the_dead, chain_kills.dies_when_told], [(1,), (0,)], dying={1})
    assert survivor["taken_s"] < 2
    assert survivor["waited_for"] == ("full[1] of ring of worker 1",)
    assert survivor["held"] == []


@pytest.mark.parametrize(("num_slots", "num_kept"), [(1, 2), (3, 1), (3, 5)])
def test_tensors_lie_on_their_slots_until_the_last_view_dies(num_slots: int, num_kept: int) -> None:
    pytest.importorskip("torch")
    from tests.helpers import host_tensor_cases as cases

    sent, received = run_workers([cases.sends, cases.receives], [(1, 28, num_slots), (0, 28, num_slots, num_kept)])
    assert received["num_wrong"] == received["num_leased"] == 0
    assert received["num_held"] >= min(num_kept, num_slots - 1)
    assert (received["num_copied_out"] > 0) == (num_kept >= num_slots - 1)
    assert sent["held"] == received["held"] == []


def test_what_is_captured_is_done_at_each_launch(driver: HostDriver) -> None:
    one, other = driver.allocate(8, "one"), driver.allocate(8, "other")
    driver.begin_capture(0)
    assert driver.is_capturing(0)
    driver.copy(other, one, 8, 0)
    graph = driver.end_capture(0)
    assert not driver.is_capturing(0)
    for number in range(3):
        ctypes.c_uint32.from_address(one).value = number
        driver.launch(graph, 0)
        assert ctypes.c_uint32.from_address(other).value == number
    driver.destroy_graph(graph)
    driver.free(one)
    driver.free(other)
    assert driver.ledger.held() == []
