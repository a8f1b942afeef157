"""The driver protocol on a GPU, by ``cuda.bindings`` (extra ``gpu``).

Memory, streams and events belong to the device's primary context, which torch uses as well. Calls for set-up make that context
current for their own duration. Enqueuing calls leave the thread's context alone, since a stream knows its own; only the default
stream (0) does not, and a thread that has no context at all gets this one when a call asks for it.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from crossfade.device.cuda_bindings import Allocations, Handles, bindings, check, relax_captures
from crossfade.device.driver import Allocation
from crossfade.device.ledger import Ledger
from crossfade.errors import DeviceError
from crossfade.host.memory import PAGE_BYTES, Memory, address_of, align

_HANDLE_BYTES = 64
_NOT_READY = 600
_NO_MEMORY = "CUDA_ERROR_OUT_OF_MEMORY"
_CONTEXT_CODES = (201, 400, 709)
"""Invalid context, invalid handle (of a stream or event without a context), destroyed context."""
_NO_CONTEXT = (201,)


class CudaDriver:
    """One device, by its index as torch counts, in this process (see `crossfade.device.driver.Driver`)."""

    def __init__(self, device: int) -> None:
        self._cu = bindings()
        self.device = device
        self.ledger = Ledger()
        self._handle = check(self._cu.cuDeviceGet(device), f"cuDeviceGet({device})")
        self.context = check(self._cu.cuDevicePrimaryCtxRetain(self._handle), f"the context of GPU {device}")
        self._graphs: dict[int, Any] = {}
        self._batches: dict[tuple[int, ...], Any] = {}
        with self.current():
            _, most_urgent = check(self._cu.cuCtxGetStreamPriorityRange(), "cuCtxGetStreamPriorityRange")
        self._urgent = int(most_urgent)
        self._pulse: tuple[int, int] | None = None
        self.flushes_remote_writes = bool(self.attribute("CAN_FLUSH_REMOTE_WRITES"))
        self._wait_flags = int(self._cu.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ)
        if self.flushes_remote_writes:
            self._wait_flags |= int(self._cu.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_FLUSH)
        # Looked up once: these are the calls of the hot path.
        self._push, self._pop = self._cu.cuCtxPushCurrent, self._cu.cuCtxPopCurrent
        self._copy = self._cu.cuMemcpyAsync
        self._write = self._cu.cuStreamWriteValue32
        self._wait = self._cu.cuStreamWaitValue32
        self._batch = self._cu.cuStreamBatchMemOp
        self._record = self._cu.cuEventRecord
        self._wait_event = self._cu.cuStreamWaitEvent
        self._pointer_attribute = self._cu.cuPointerGetAttribute
        self._buffer_id = self._cu.CUpointer_attribute.CU_POINTER_ATTRIBUTE_BUFFER_ID
        self._ask_capture = self._cu.cuStreamIsCapturing
        self._no_capture = self._cu.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE
        self._allocations = Allocations()
        self._streams = Handles(self._cu.CUstream)
        self._events = Handles(self._cu.CUevent)
        self._words = Handles(self._cu.CUdeviceptr)

    @contextmanager
    def current(self) -> Iterator[None]:
        """Makes the device's context current in this thread."""
        check(self._cu.cuCtxPushCurrent(self.context), "cuCtxPushCurrent")
        try:
            yield
        finally:
            self._cu.cuCtxPopCurrent()

    def attribute(self, name: str) -> int:
        """A device attribute, by its name without ``CU_DEVICE_ATTRIBUTE_``."""
        attribute = getattr(self._cu.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(check(self._cu.cuDeviceGetAttribute(attribute, self._handle), f"reading {name}"))

    # set-up

    def allocate(self, size_bytes: int, label: str) -> int:
        with self.current():
            address = int(check(self._cu.cuMemAlloc(size_bytes), f"allocating {size_bytes} bytes on GPU {self.device}"))
        self.ledger.take_at("memory", address, f"{label}, {size_bytes} bytes")
        return address

    def free(self, address: int) -> None:
        with self.current():
            check(self._cu.cuMemFree(address), "cuMemFree")
        self.ledger.drop_at("memory", address)

    def export(self, address: int) -> bytes:
        with self.current():
            handle = check(self._cu.cuIpcGetMemHandle(address), "exporting memory")
        return ctypes.string_at(handle.getPtr(), _HANDLE_BYTES)

    def open_handle(self, handle: bytes, label: str) -> int:
        opened = self._cu.CUipcMemHandle()
        ctypes.memmove(opened.getPtr(), handle, _HANDLE_BYTES)
        flag = self._cu.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
        with self.current():
            address = int(check(self._cu.cuIpcOpenMemHandle(opened, flag), f"opening {label} on GPU {self.device}"))
        self.ledger.take_at("opened", address, label)
        return address

    def close_handle(self, address: int) -> None:
        with self.current():
            check(self._cu.cuIpcCloseMemHandle(address), "closing opened memory")
        self.ledger.drop_at("opened", address)

    def map_host(self, memory: Memory, offset: int, size_bytes: int, label: str) -> CudaHostRange:
        return CudaHostRange(self, memory, offset, size_bytes, label)

    def create_stream(self, label: str, *, is_urgent: bool = False) -> int:
        flag = self._cu.CUstream_flags.CU_STREAM_NON_BLOCKING
        with self.current():
            created = self._cu.cuStreamCreateWithPriority(flag, self._urgent if is_urgent else 0)
        stream = int(check(created, "creating a stream"))
        self.ledger.take_at("stream", stream, label)
        return stream

    def destroy_stream(self, stream: int) -> None:
        check(self._cu.cuStreamDestroy(stream), "cuStreamDestroy")
        self.ledger.drop_at("stream", stream)

    def create_event(self) -> int:
        return self._create_event(self._cu.CUevent_flags.CU_EVENT_DISABLE_TIMING)

    def create_host_event(self) -> int:
        flags = self._cu.CUevent_flags
        return self._create_event(int(flags.CU_EVENT_DISABLE_TIMING) | int(flags.CU_EVENT_BLOCKING_SYNC))

    def create_timer(self) -> int:
        return self._create_event(self._cu.CUevent_flags.CU_EVENT_DEFAULT)

    def _create_event(self, flags: Any) -> int:
        with self.current():
            created = self._cu.cuEventCreate(flags)
        event = int(check(created, "creating an event"))
        self.ledger.take_at("event", event)
        return event

    def destroy_event(self, event: int) -> None:
        check(self._cu.cuEventDestroy(event), "cuEventDestroy")
        self.ledger.drop_at("event", event)

    def name_range(self, address: int, size_bytes: int, label: str) -> None:
        """Nothing: names are for the fake."""

    # enqueue

    def copy(self, target: int, source: int, size_bytes: int, stream: int) -> None:
        result = self._copy(target, source, size_bytes, self._streams[stream]) if stream else _NO_CONTEXT
        if result[0]:
            self._again(result, self._copy, target, source, size_bytes, stream)

    def write_value(self, stream: int, address: int, value: int) -> None:
        result = self._write(self._streams[stream], self._words[address], value, 0) if stream else _NO_CONTEXT
        if result[0]:
            self._again(result, self._write, stream, address, value, 0)

    def wait_value(self, stream: int, address: int, value: int) -> None:
        result = (
            self._wait(self._streams[stream], self._words[address], value, self._wait_flags) if stream else _NO_CONTEXT
        )
        if result[0]:
            self._again(result, self._wait, stream, address, value, self._wait_flags)

    def wait_and_reset(self, stream: int, address: int, value: int, reset: int) -> None:
        batch = self._batches.get((address, value, reset))
        if batch is None:
            batch = self._batches[address, value, reset] = self._make_batch(address, value, reset)
        result = self._batch(stream, 2, batch, 0) if stream else _NO_CONTEXT
        if result[0]:
            self._again(result, self._batch, stream, 2, batch, 0)

    def write_values(self, stream: int, addresses: Sequence[int], value: int) -> None:
        key = (value, *addresses)
        batch = self._batches.get(key)
        if batch is None:
            batch = self._batches[key] = [self._write_op(address, value) for address in addresses]
        self._run_batch(stream, batch)

    def wait_all_and_reset(self, stream: int, addresses: Sequence[int], value: int, reset: int) -> None:
        key = (-1, value, reset, *addresses)
        batch = self._batches.get(key)
        if batch is None:
            batch = [op for address in addresses for op in self._make_batch(address, value, reset)]
            self._batches[key] = batch
        self._run_batch(stream, batch)

    def _run_batch(self, stream: int, batch: list[Any]) -> None:
        result = self._batch(stream, len(batch), batch, 0) if stream else _NO_CONTEXT
        if result[0]:
            self._again(result, self._batch, stream, len(batch), batch, 0)

    def _again(self, result: Any, call: Any, *args: Any) -> Any:
        """Repeats a call that found no context, or would take another device's default stream, with the right context."""
        if result is _NO_CONTEXT or int(result[0]) in _CONTEXT_CODES:
            check(self._push(self.context), "cuCtxPushCurrent")  # as `current`, which takes 5 us more
            try:
                result = call(*args)
            finally:
                self._pop()
        if result[0] and int(result[0]) != _NOT_READY:
            check(result, call.__name__)
        return result

    def _make_batch(self, address: int, value: int, reset: int) -> Any:
        wait = self._cu.CUstreamBatchMemOpParams()
        where = self._cu.CUdeviceptr(address)
        wait.operation = self._cu.CUstreamBatchMemOpType.CU_STREAM_MEM_OP_WAIT_VALUE_32
        wait.waitValue.address, wait.waitValue.value, wait.waitValue.flags = where, value, self._wait_flags
        return [wait, self._write_op(address, reset)]

    def _write_op(self, address: int, value: int) -> Any:
        write = self._cu.CUstreamBatchMemOpParams()
        where = self._cu.CUdeviceptr(address)
        write.operation = self._cu.CUstreamBatchMemOpType.CU_STREAM_MEM_OP_WRITE_VALUE_32
        write.writeValue.address, write.writeValue.value, write.writeValue.flags = where, value, 0
        return write

    def record_event(self, event: int, stream: int) -> None:
        result = self._record(self._events[event], self._streams[stream]) if stream else _NO_CONTEXT
        if result[0]:
            self._again(result, self._record, event, stream)

    def wait_event(self, stream: int, event: int) -> None:
        result = self._wait_event(self._streams[stream], self._events[event], 0) if stream else _NO_CONTEXT
        if result[0]:
            self._again(result, self._wait_event, stream, event, 0)

    # look

    def allocation_of(self, address: int) -> Allocation | None:
        return self._allocations.of(address)

    def identity_of(self, address: int) -> int:
        code, identity = self._pointer_attribute(self._buffer_id, address)
        return 0 if code else int(identity)

    def is_idle(self, stream: int) -> bool:
        result = self._cu.cuStreamQuery(stream) if stream else _NO_CONTEXT
        if result[0]:
            result = self._again(result, self._cu.cuStreamQuery, stream)
        return not result[0]

    def elapsed_us(self, first: int, last: int) -> float:
        with self.current():
            return float(check(self._cu.cuEventElapsedTime(first, last), "cuEventElapsedTime")) * 1e3

    def has_happened(self, event: int) -> bool:
        result = self._cu.cuEventQuery(event)
        if result[0]:
            result = self._again(result, self._cu.cuEventQuery, event)
        return not result[0]

    def failure(self) -> str:
        """A kernel's mistake (an illegal address, an assertion) ends all that the process does on the device, and is told to
        the caller that asks for something next. So a stream of its own is given a little each time.
        """
        try:
            if self._pulse is None:
                self._pulse = self.create_stream("pulse", is_urgent=True), self.create_event()
            stream, event = self._pulse
            if self.has_happened(event):
                self.record_event(event, stream)
        except DeviceError as error:
            return "" if _NO_MEMORY in str(error) else str(error)  # without memory it is tried again
        return ""

    # wait

    def wait_host(self, event: int) -> None:
        """The bindings release the interpreter lock meanwhile."""
        result = self._cu.cuEventSynchronize(event)
        if result[0]:
            self._again(result, self._cu.cuEventSynchronize, event)

    # capture

    def is_capturing(self, stream: int) -> bool:
        """The default stream cannot be captured."""
        if not stream:
            return False
        result = self._ask_capture(self._streams[stream])
        if result[0]:
            result = self._again(result, self._ask_capture, stream)
        return bool(result[1] != self._no_capture)

    def enter_thread(self) -> None:
        relax_captures()

    def begin_capture(self, stream: int) -> None:
        mode = self._cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        check(self._cu.cuStreamBeginCapture(stream, mode), "beginning a capture")

    def end_capture(self, stream: int) -> int:
        with self.current():
            graph = check(self._cu.cuStreamEndCapture(stream), "ending a capture")
            try:
                executable = check(self._cu.cuGraphInstantiate(graph, 0), "instantiating a graph")
            finally:
                self._cu.cuGraphDestroy(graph)
        key = int(executable)
        self._graphs[key] = executable
        self.ledger.take_at("graph", key)
        return key

    def launch(self, graph: int, stream: int) -> None:
        result = self._cu.cuGraphLaunch(self._graphs[graph], stream)
        if result[0]:
            check(result, "cuGraphLaunch")

    def destroy_graph(self, graph: int) -> None:
        check(self._cu.cuGraphExecDestroy(self._graphs.pop(graph)), "cuGraphExecDestroy")
        self.ledger.drop_at("graph", graph)

    # beyond the protocol

    def synchronize(self, stream: int) -> None:
        """Blocks until the stream has done all that it was given."""
        check(self._cu.cuStreamSynchronize(stream), "cuStreamSynchronize")

    def close(self) -> None:
        """Gives back what the driver itself took."""
        if self._pulse is not None:
            stream, event = self._pulse
            self._pulse = None
            self.destroy_event(event)
            self.destroy_stream(stream)
        self._batches.clear()


class CudaHostRange:
    """Pinned shared host memory (see `crossfade.device.driver.HostRange`)."""

    def __init__(self, driver: CudaDriver, memory: Memory, offset: int, size_bytes: int, label: str) -> None:
        self._cu = driver._cu
        self._driver = driver
        self.size_bytes = align(size_bytes, PAGE_BYTES)
        self._mapping: mmap.mmap | None = memory.map(self.size_bytes, offset, populate=True)
        self._host = address_of(self._mapping)
        flags = self._cu.CU_MEMHOSTREGISTER_PORTABLE | self._cu.CU_MEMHOSTREGISTER_DEVICEMAP
        with driver.current(), ExitStack() as undo:
            check(
                self._cu.cuMemHostRegister(self._host, self.size_bytes, flags),
                f"pinning {self.size_bytes} bytes of {label}",
            )
            undo.callback(self._cu.cuMemHostUnregister, self._host)
            self.address = int(check(self._cu.cuMemHostGetDevicePointer(self._host, 0), "cuMemHostGetDevicePointer"))
            undo.pop_all()
        self._words = memoryview(self._mapping).cast("I")
        self._number = driver.ledger.take("pinned", label)

    def peek(self, offset: int) -> int:
        return self._words[offset >> 2]

    def peeker(self, offset: int) -> Callable[[], int]:
        return partial(self._words.__getitem__, offset >> 2)

    def poke(self, offset: int, value: int) -> None:
        self._words[offset >> 2] = value

    def view(self) -> memoryview:
        return self._words.cast("B")

    def close(self) -> None:
        if self._mapping is None:
            return
        with self._driver.current():
            check(self._cu.cuMemHostUnregister(self._host), "cuMemHostUnregister")
        self._words.release()
        self._mapping = None
        self._driver.ledger.drop(self._number)
