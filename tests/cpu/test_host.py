"""The operating-system words, by themselves."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from crossfade.errors import SessionError
from crossfade.host.doorbell import Bell, Doorbell
from crossfade.host.frames import new_key
from crossfade.host.memory import PAGE_BYTES, Heap, Memory, address_of
from crossfade.host.processes import await_end, describe_exit, is_ending, open_pidfd
from crossfade.host.semaphore import SEMAPHORE_BYTES, init_semaphore, open_semaphore
from crossfade.host.sockets import Connection
from tests.helpers.programs import python
from tests.helpers.threads import together


def test_memory_is_shared_by_its_descriptor() -> None:
    memory = Memory.create("test", 3 * PAGE_BYTES)
    one, two = memory.map(PAGE_BYTES, PAGE_BYTES), Memory(os.dup(memory.fd)).map(3 * PAGE_BYTES, populate=True)
    one[7] = 42
    assert two[PAGE_BYTES + 7] == 42
    memory.close()
    memory.close()
    one[8] = 43
    assert two[PAGE_BYTES + 8] == 43


def test_a_heap_gives_pages_back() -> None:
    memory = Memory.create("heap", 0)
    heap = Heap(memory)
    offset, size_bytes = heap.allocate(1_000_000)
    assert size_bytes % PAGE_BYTES == 0
    assert os.fstat(memory.fd).st_blocks * 512 >= 1_000_000
    heap.discard(offset, size_bytes)
    assert os.fstat(memory.fd).st_blocks == 0
    assert heap.allocate(1)[0] == offset + size_bytes
    memory.close()


def test_a_heap_refuses_more_than_there_is() -> None:
    memory = Memory.create("heap", 0)
    with pytest.raises(OSError, match="shared memory are asked for"):
        Heap(memory).allocate(1 << 60)
    memory.close()


def test_semaphores_count_between_processes() -> None:
    memory = Memory.create("semaphores", PAGE_BYTES)
    mapping = memory.map(PAGE_BYTES)
    base = address_of(mapping)
    for index, value in enumerate((0, 3)):
        init_semaphore(base + index * SEMAPHORE_BYTES, value)
    first, second = (open_semaphore(base + index * SEMAPHORE_BYTES) for index in range(2))
    assert [second.acquire(False) for _ in range(4)] == [True, True, True, False]
    code = (
        "import sys\nfrom crossfade.host.memory import Memory, address_of\n"
        "from crossfade.host.semaphore import open_semaphore\n"
        f"mapping = Memory({memory.fd}).map({PAGE_BYTES})\nsemaphore = open_semaphore(address_of(mapping))\n"
        "for _ in range(5): semaphore.release()\n"
    )
    python("-c", code, pass_fds=(memory.fd,), check=True)
    assert [first.acquire(False) for _ in range(6)] == [True] * 5 + [False]
    memory.close()


def _doorbell(spin_us: float = 150.0) -> Doorbell:
    return Doorbell(*Doorbell.create_fds("test"), spin_us=spin_us)


@pytest.mark.timeout(30)
def test_who_sleeps_beside_may_nudge_when_it_looks() -> None:
    """A thread that takes a result in while another one sleeps on the descriptors tells others so, from where it looks."""
    doorbell = _doorbell(spin_us=0.0)
    is_over, looked = threading.Event(), []
    sleeper = threading.Thread(target=doorbell.wait_until, args=(is_over.is_set, 20.0), daemon=True)
    sleeper.start()
    while not doorbell._sleeper:
        os.sched_yield()

    def look() -> bool:
        looked.append(threading.get_ident() != doorbell._sleeper)
        doorbell.nudge()
        return len(looked) > 100

    beside = threading.Thread(target=doorbell.wait_until, args=(look, 20.0), daemon=True)
    beside.start()
    beside.join(20)
    assert not beside.is_alive()
    assert any(looked)
    is_over.set()
    doorbell.nudge()
    sleeper.join(20)
    assert not sleeper.is_alive()
    doorbell.close()


@pytest.mark.parametrize("spin_us", [0.0, 150.0])
def test_no_wake_up_is_lost(spin_us: float) -> None:
    """Thousands of hand-overs between two threads, with nothing but the doorbells to wake them."""
    doorbells = [_doorbell(spin_us=spin_us) for _ in range(2)]
    bells = [doorbell.bell() for doorbell in doorbells]
    turn = [0]
    num_turns = 4000

    def play(me: int) -> None:
        for number in range(me, num_turns, 2):
            assert doorbells[me].wait_until(lambda number=number: turn[0] == number, 30.0)  # type: ignore[misc]
            turn[0] = number + 1
            bells[1 - me].ring_if_asleep()

    players = [threading.Thread(target=play, args=(me,)) for me in range(2)]
    for player in players:
        player.start()
    for player in players:
        player.join(60)
    assert turn[0] == num_turns
    for thing in (*doorbells, *bells):
        assert isinstance(thing, Doorbell | Bell)
        thing.close()


def test_a_wait_ends_in_time() -> None:
    doorbell = _doorbell()
    start = time.monotonic()
    assert not doorbell.wait_until(lambda: False, 0.05)
    assert 0.04 < time.monotonic() - start < 5
    doorbell.close()


def test_many_threads_wait_on_one_doorbell() -> None:
    doorbell = _doorbell(spin_us=0)
    bell = doorbell.bell()
    ready = [False] * 8
    done = threading.Barrier(9)

    def wait(index: int) -> None:
        assert doorbell.wait_until(lambda: ready[index], 30)
        done.wait(30)

    threads = [threading.Thread(target=wait, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for index in range(8):
        ready[index] = True
        bell.ring()
    done.wait(30)
    for thread in threads:
        thread.join()
    bell.close()
    doorbell.close()


def test_a_doorbell_serves_other_descriptors() -> None:
    doorbell = _doorbell(spin_us=0)
    mine, theirs = socket.socketpair()
    seen: list[bytes] = []
    doorbell.watch(mine.fileno(), lambda: seen.append(mine.recv(10)))
    theirs.send(b"hello")
    assert doorbell.wait_until(lambda: seen, 30)
    assert seen == [b"hello"]
    doorbell.unwatch(mine.fileno())
    doorbell.unwatch(mine.fileno())
    theirs.send(b"again")
    doorbell.pump()
    assert seen == [b"hello"]
    for end in (mine, theirs):
        end.close()
    doorbell.close()


@pytest.mark.timeout(20)
def test_descriptors_are_watched_while_another_thread_holds_the_doorbells_lock() -> None:
    """A signal's handler comes in the middle of that thread's wait, say, and waits for a lock that who watches holds."""
    bell, (reading, writing) = _doorbell(), os.pipe()
    is_held, may_end = threading.Event(), threading.Event()

    def hold() -> None:
        with bell._lock:
            is_held.set()
            may_end.wait(15)

    thread = threading.Thread(target=hold)
    thread.start()
    is_held.wait()
    came = list[int]()
    bell.watch(reading, lambda: came.append(1))
    bell.watch_room(reading, is_wanted=True)
    bell.unwatch(reading)
    bell.watch(reading, lambda: came.append(2))
    assert not may_end.is_set()
    may_end.set()
    thread.join()
    os.write(writing, b"x")
    bell.pump()
    bell.unwatch(reading)
    bell.pump()
    assert came == [2]
    bell.close()
    with pytest.raises(SessionError, match="shut down"):
        bell.watch(reading, lambda: None)
    bell.watch_room(reading, is_wanted=True)
    bell.unwatch(reading)
    for fd in (reading, writing):
        os.close(fd)


def test_messages_with_many_descriptors() -> None:
    key = new_key()
    mine, other = Connection.pair(key)
    theirs = Connection(other, key, "actor")
    fds = [os.memfd_create(f"m{index}") for index in range(600)]
    for index, fd in enumerate(fds):
        os.write(fd, str(index).encode())
    for payload, some in ((b"x" * 700, fds), (b"", ()), (b"y" * 3_000_000, fds[:1])):
        sender = threading.Thread(target=mine.send, args=(payload, some))
        sender.start()
        message = None
        while message is None:
            theirs.wait(30)
            message = theirs.take()
        sender.join()
        assert message.payload == payload
        for index, fd in enumerate(message.fds):
            assert os.pread(fd, 10, 0) == str(index).encode()
            os.close(fd)
        assert len(message.fds) == len(some)
    for fd in fds:
        os.close(fd)
    mine.close()
    theirs.wait(30)
    assert theirs.take() is None
    assert theirs.is_closed
    with pytest.raises(ConnectionError):
        theirs.send(b"nobody")
    theirs.close()


def test_two_sides_that_send_at_once_do_not_block_each_other() -> None:
    key = new_key()
    mine, other = Connection.pair(key)
    theirs = Connection(other, key, "actor")
    payload = b"z" * 20_000_000

    def exchange(end: Connection) -> bool:
        end.send(payload)
        message = None
        while message is None:
            end.wait(30)
            message = end.take()
        return bool(message.payload == payload)

    assert together(exchange, (mine, theirs)) == [True, True]
    mine.close()
    theirs.close()


def test_a_pidfd_tells_of_the_end() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        pidfd = open_pidfd(child.pid)
        poller = select.poll()
        poller.register(pidfd, select.POLLIN)
        assert not poller.poll(0)
        child.send_signal(signal.SIGTERM)
        assert poller.poll(30_000)
        os.close(pidfd)
        assert describe_exit(child.wait()) == "it was killed by SIGTERM"
    assert describe_exit(3) == "it exited with code 3"
    assert describe_exit(None).startswith("it ended (how is not known: somebody else has collected its exit status")


HOLDS_MEMORY = """
import os, threading, time
held = b"x" * (400 << 20)
threading.Thread(target=time.sleep, args=(100,), daemon=True).start()
print(os.memfd_create("held"), flush=True)
time.sleep(100)
"""


def test_who_has_lost_its_files_is_seen_to_be_ending_also_before_its_pidfd_tells() -> None:
    command = [sys.executable, "-c", HOLDS_MEMORY]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        path = f"/proc/{process.pid}/fd/{int(process.stdout.readline())}"
        pidfd = open_pidfd(process.pid)
        assert not is_ending(process.pid)
        process.kill()
        while os.path.exists(path):
            os.sched_yield()
        assert is_ending(process.pid)
        assert await_end(pidfd, 10)
        assert is_ending(process.pid)
        os.close(pidfd)
    assert is_ending(process.pid)  # nobody is there any more
    assert not is_ending(os.getpid())
