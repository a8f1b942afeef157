"""What can a host do while a stream waits for a signal that nobody sets, and what do the enqueuing calls cost?

``python -m benchmarks.device_waits OUT.json [QUESTION ...]``: one GPU (some questions need two). Each question runs in a process
of its own, so that a call that hangs costs some seconds and nothing else.
"""

from __future__ import annotations

import json
import multiprocessing
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

LIMIT_S = 8


def _start(device: int = 0) -> tuple[Any, Any, Any]:
    import torch

    from crossfade.device.cuda import CudaDriver
    from crossfade.device.signals import HostBoard
    from crossfade.host.memory import Memory

    torch.cuda.set_device(device)
    torch.ones(8, device="cuda").add_(1)
    torch.cuda.synchronize()
    driver = CudaDriver(device)
    board = HostBoard(driver, Memory.create("probe", 65536), 256, "probe")
    return torch, driver, board


def _pending(driver: Any, board: Any, num: int = 1) -> list[int]:
    """So many streams that wait for nothing that will come."""
    streams = [driver.create_stream(f"waiting {i}") for i in range(num)]
    for i, stream in enumerate(streams):
        board.signal(i, f"signal {i}").wait(stream)
    time.sleep(0.02)
    return streams


def _timed(act: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    act()
    return (time.perf_counter() - begin) * 1e6


def _while_waiting(act: Callable[[Any, Any, Any], Any], prepare: Callable[[Any, Any], Any] | None = None) -> float:
    torch, driver, board = _start()
    ready = prepare(torch, driver) if prepare else None
    _pending(driver, board)
    return _timed(lambda: act(torch, driver, ready))


def _host_memory(torch: Any, driver: Any) -> Any:
    from crossfade.host.memory import Memory

    return Memory.create("late", 4 << 20)


def _owns_memory(handles: Any) -> None:
    _, driver, _ = _start()
    handles.send(driver.export(driver.allocate(8 << 20, "another's")))
    time.sleep(10 * LIMIT_S)  # it is ended with the process that asks


def _opened(act: Callable[[Any, bytes, int], Any], *, is_open_before: bool) -> float:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    context.Process(target=_owns_memory, args=(there,), daemon=True).start()
    _, driver, board = _start()
    handle = here.recv()
    address = driver.open_handle(handle, "another's") if is_open_before else 0
    _pending(driver, board)
    try:
        return _timed(lambda: act(driver, handle, address))
    finally:
        for child in multiprocessing.active_children():
            child.kill()


QUESTIONS: dict[str, Callable[[], Any]] = {
    "allocate": lambda: _while_waiting(lambda t, d, _: d.allocate(8 << 20, "late")),
    "free": lambda: _while_waiting(lambda t, d, a: d.free(a), lambda t, d: d.allocate(8 << 20, "x")),
    "export": lambda: _while_waiting(lambda t, d, a: d.export(a), lambda t, d: d.allocate(8 << 20, "x")),
    "open another process's memory": lambda: _opened(lambda d, h, a: d.open_handle(h, "late"), is_open_before=False),
    "close another process's memory": lambda: _opened(lambda d, h, a: d.close_handle(a), is_open_before=True),
    "torch allocates 1 GB": lambda: _while_waiting(lambda t, d, _: t.empty(1 << 30, dtype=t.uint8, device="cuda")),
    "create a stream": lambda: _while_waiting(lambda t, d, _: d.create_stream("late")),
    "create an event": lambda: _while_waiting(lambda t, d, _: d.create_event()),
    "destroy an event": lambda: _while_waiting(lambda t, d, e: d.destroy_event(e), lambda t, d: d.create_event()),
    "destroy an idle stream": lambda: _while_waiting(
        lambda t, d, s: d.destroy_stream(s), lambda t, d: d.create_stream("x")
    ),
    "pin host memory": lambda: _while_waiting(lambda t, d, m: d.map_host(m, 0, 4 << 20, "late"), _host_memory),
    "unpin host memory": lambda: _while_waiting(
        lambda t, d, r: r.close(), lambda t, d: d.map_host(_host_memory(t, d), 0, 4 << 20, "x")
    ),
    "a kernel that was loaded": lambda: _while_waiting(
        lambda t, d, x: x.add_(1).sum().item(), lambda t, d: (x := t.ones(8, device="cuda"), x.add_(1).sum().item())[0]
    ),
    "a kernel that was not loaded": lambda: _while_waiting(
        lambda t, d, x: (t.erfinv(x), d.is_idle(0)), lambda t, d: t.ones(8, device="cuda")
    ),
    "a matrix product that was not loaded": lambda: _while_waiting(
        lambda t, d, x: x @ x, lambda t, d: t.ones(256, 256, device="cuda", dtype=t.float16)
    ),
    "create a second context": lambda: _while_waiting(lambda t, d, _: _second_context(d)),
}


def _second_context(driver: Any) -> None:
    cu = driver._cu
    from crossfade.device.cuda_bindings import check

    try:
        check(cu.cuCtxCreate(None, 0, driver._handle), "cuCtxCreate")
    except TypeError:
        check(cu.cuCtxCreate(0, driver._handle), "cuCtxCreate")


def _many(num: int) -> dict[str, float]:
    """With so many streams that wait: is a device word written by a further stream? Does a kernel on another stream run?"""
    torch, driver, board = _start()
    address = driver.allocate(4096, "words")
    rescue = driver.create_stream("rescue", is_urgent=True)
    driver.write_value(rescue, address, 5)
    other = torch.cuda.Stream()
    x = torch.ones(1 << 20, device="cuda")
    with torch.cuda.stream(other):
        x.add_(1)
    torch.cuda.synchronize()
    _pending(driver, board, num)
    out = {}
    for name, act in {
        "write": lambda: (driver.write_value(rescue, address, 7), driver.synchronize(rescue)),
        "kernel": lambda: _on(torch, other, lambda: x.add_(1)),
    }.items():
        out[name] = _timed(act)
        print(json.dumps({name: out[name]}), flush=True)
    return out


def _on(torch: Any, stream: Any, act: Callable[[], Any]) -> None:
    with torch.cuda.stream(stream):
        act()
    stream.synchronize()


for _num in (1, 7, 8, 16, 31, 32, 64, 128):
    QUESTIONS[f"{_num} waiting streams"] = lambda num=_num: _many(num)  # type: ignore[misc]


def _costs() -> dict[str, float]:
    """Median microseconds of the host, for each enqueuing call."""
    torch, driver, board = _start()
    from crossfade.device.borrowed import tensor_on

    stream = driver.create_stream("costs")
    event = driver.create_event()
    address = driver.allocate(1 << 20, "costs")
    there = driver.allocate(1 << 20, "costs")
    word = board.signal(0, "word")
    out = {}

    def measure(name: str, act: Callable[[], Any], num: int = 400) -> None:
        samples = []
        for i in range(num):
            samples.append(_timed(act))
            if i % 50 == 49:
                driver.synchronize(stream)
        out[name] = round(statistics.median(samples), 2)

    measure("copy 4 KB", lambda: driver.copy(there, address, 4096, stream))
    measure("write_value", lambda: driver.write_value(stream, word.address, 1))
    measure("wait_value", lambda: driver.wait_value(stream, word.address, 1))

    def set_and_wait() -> None:
        driver.write_value(stream, word.address, 1)
        driver.wait_and_reset(stream, word.address, 1, 0)

    measure("write_value, wait_and_reset", set_and_wait)

    def separate() -> None:
        driver.write_value(stream, word.address, 1)
        driver.wait_value(stream, word.address, 1)
        driver.write_value(stream, word.address, 0)

    measure("write_value, wait_value, write_value", separate)
    measure("record_event", lambda: driver.record_event(event, stream))
    measure("wait_event", lambda: driver.wait_event(stream, event))
    measure("has_happened", lambda: driver.has_happened(event))
    measure("is_idle", lambda: driver.is_idle(stream))
    measure("tensor_on", lambda: tensor_on(address, (16, 16), torch.bfloat16, 0))
    ones = torch.ones(8, device="cuda")
    measure("x.add_(1), for comparison", lambda: ones.add_(1))
    return out


QUESTIONS["host cost of calls, us"] = _costs


def _wrong_context() -> dict[str, str]:
    """Enqueuing calls for device 0 while device 1 is current."""
    torch, driver, board = _start(0)
    stream = driver.create_stream("x")
    event = driver.create_event()
    address = driver.allocate(1 << 20, "x")
    word = board.signal(0, "word")
    if torch.cuda.device_count() < 2:
        return {"all": "needs two GPUs"}
    torch.cuda.set_device(1)
    torch.ones(8, device="cuda:1").add_(1)
    out = {}
    acts: dict[str, Callable[[], Any]] = {
        "copy": lambda: driver.copy(address + 8192, address, 4096, stream),
        "write_value": lambda: driver.write_value(stream, word.address, 1),
        "wait_and_reset": lambda: driver.wait_and_reset(stream, word.address, 1, 0),
        "record_event": lambda: driver.record_event(event, stream),
        "wait_event": lambda: driver.wait_event(stream, event),
        "is_idle": lambda: driver.is_idle(stream),
    }
    for name, act in acts.items():
        try:
            act()
            out[name] = "ok"
        except Exception as error:
            out[name] = str(error)
    torch.cuda.synchronize(0)
    return out


QUESTIONS["calls with another device current"] = _wrong_context


def _attributes() -> dict[str, Any]:
    _, driver, _ = _start()
    from crossfade.device.capabilities import judge, read_facts, read_topology

    names = ("CAN_FLUSH_REMOTE_WRITES", "CAN_USE_64_BIT_STREAM_MEM_OPS", "ASYNC_ENGINE_COUNT", "IPC_EVENT_SUPPORTED")
    facts = read_facts()
    return {
        **{name: driver.attribute(name) for name in names},
        "links": sorted({str(kind) for kind in facts.links.values()}),
        "findings": [str(finding) for finding in judge(facts)],
        "topology": json.loads(read_topology().to_json())["devices"],
    }


QUESTIONS["attributes"] = _attributes


def main(out: Path, asked: list[str]) -> None:
    answers: dict[str, Any] = {}
    running = {}
    asked = asked or list(QUESTIONS)
    for start in range(0, len(asked), 16):
        names = asked[start : start + 16]
        for name in names:
            command = [sys.executable, "-m", "benchmarks.device_waits", "--ask", name]
            running[name] = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        deadline = time.monotonic() + LIMIT_S + 15
        for name in names:
            lines: list[str] = []
            try:
                text, _ = running[name].communicate(timeout=max(deadline - time.monotonic(), 0.1))
                lines = text.strip().splitlines()
                answers[name] = json.loads(lines[-1]) if running[name].returncode == 0 and lines else lines[-3:]
            except subprocess.TimeoutExpired:
                running[name].kill()
                answers[name] = "hangs"
            except ValueError:
                answers[name] = lines[-3:]
            print(name, "->", answers[name], flush=True)
            out.write_text(json.dumps(answers, indent=1))


def _ask(name: str) -> None:
    import os
    import threading

    def give_up() -> None:
        print(json.dumps("hangs"), flush=True)
        os._exit(0)

    timer = threading.Timer(LIMIT_S + 8, give_up)
    timer.daemon = True
    timer.start()
    print(json.dumps(QUESTIONS[name]()), flush=True)
    os._exit(0)  # a stream still waits: an orderly end would wait for it


if __name__ == "__main__":
    if sys.argv[1] == "--ask":
        _ask(sys.argv[2])
    else:
        main(Path(sys.argv[1]), sys.argv[2:])
