"""What torch keeps per thread, and belongs to a part: taken from one part and put back for another at each switch.

All parts run on one OS thread, so the thread's state would go from one to the other. Without the exchange, a part that switches
inside an ``autograd.Function`` leaves the other without gradients, an inference mode leaks, dropout that is computed again in a
checkpoint differs, and the next C++ warning of the process ends in a segmentation fault.

=====================  ==========================================================================================
state                  how it is exchanged
=====================  ==========================================================================================
grad modes             getters and setters
dispatch keys          where the thread has others, a guard around the turn; what the part left is read before it ends
inference mode         by the same guard
mode stacks            all are popped, and the part's are pushed: dispatch modes, function modes, saved-tensor hooks
autocast               per kind of device: on or off, type; whether casts are cached
random numbers         the CPU's generator by value, a GPU's by reference, where gradients are recorded
frame callback         of torch.compile, if it is loaded
warning handler        a pointer in libc10, through ctypes
CUDA stream            the current one
context variables      greenlet exchanges them itself
=====================  ==========================================================================================

Not exchanged: the cache of autocast (of casts of weights that both parts use), which is emptied where parts have streams of their
own; profiler ranges, and ``threading.local`` of users; what a ``with`` around a collective sets for the whole process
(``sdpa_kernel``, ``warnings.catch_warnings``); and random numbers in a run without gradients, where nothing draws the same ones
again: parts draw from the thread's, in their turns.

A turn comes after operators that have taken the caches of the CPU, so what it costs is how many different functions it calls:
together they take four times as long there as in a loop of their own. (On two H200 a stop took a tenth of a millisecond, and a step
of 48 of them as long to launch, on a slow core, as the GPU needs for it.)
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import torch

_C: Any = torch._C
_cuda: Any = torch.cuda
_SEEDS = 1 << 62
_OFFSETS = 4
"""A GPU's generator counts in steps of four numbers."""
_NAMES = "_ZN3c1012WarningUtils19{}E{}"
_GETTER, _SETTER = (
    _NAMES.format("get_warning_handler", "v"),
    _NAMES.format("set_warning_handler", "PNS_14WarningHandlerE"),
)


@cache
def _warning_handlers() -> tuple[Callable[[], int | None], Callable[[int | None], None]] | None:
    """The getter and the setter of c10's handler of warnings, which is one per thread; None where this torch has others."""
    try:
        library = ctypes.PyDLL(str(Path(torch.__file__).with_name("lib") / "libc10.so"))  # keeps the interpreter lock
        getter, setter = library[_GETTER], library[_SETTER]
    except (OSError, AttributeError):
        return None
    getter.restype, getter.argtypes = ctypes.c_void_p, []
    setter.restype, setter.argtypes = None, [ctypes.c_void_p]
    return getter, setter


def can_exchange_warning_handlers() -> bool:
    """Whether this torch has what a switch inside ``autograd.Function.apply`` needs."""
    return _warning_handlers() is not None


def _popped(number: int, pop: Callable[..., Any], *args: Any) -> list[Any]:
    """All of a stack, the lowest first; it is empty then."""
    return [pop(*args) for _ in range(number)][::-1] if number else []


def _popped_hooks() -> list[Any]:
    hooks = []
    while (top := _C._autograd._top_saved_tensors_default_hooks(True)) is not None:
        hooks.append(top)
        _C._autograd._pop_saved_tensors_default_hooks()
    return hooks[::-1]


def _frame_callbacks() -> Any:
    return _C._dynamo.eval_frame if "torch._dynamo" in sys.modules else None


class ThreadState(NamedTuple):
    """The state of this thread at one time. ``take`` leaves the mode stacks empty, and ``put`` fills them again.

    A switch reads all of it, since nothing tells that it has changed, and sets what differs from what the thread has.
    """

    grad: bool
    forward_grad: bool
    inference: bool
    included: Any
    excluded: Any
    dispatch_modes: list[Any]
    function_modes: list[Any]
    function_state: Any
    hooks: list[Any]
    autocast: tuple[bool, Any, bool, Any]  # of the CPU and of CUDA: on or off, and the type
    autocast_cache: bool
    cpu_generator: torch.Tensor | None  # None, as is a GPU's, where they are not exchanged
    gpu_generator: Any
    frame_callback: Any
    warning_handler: int | None
    stream: tuple[int, int, int] | None

    @classmethod
    def take(cls, before: ThreadState | None = None) -> ThreadState:
        """Reads everything, and pops the modes.

        ``before``: what the thread had at the beginning of a turn; a GPU's generator then has its state by reference still, and
        where it has none, as in a capture, it is not read.
        """
        handlers, frames = _warning_handlers(), _frame_callbacks()
        is_on, type_of = torch.is_autocast_enabled, torch.get_autocast_dtype
        if before is None:
            on_cpu = torch.default_generator.get_state() if torch.is_grad_enabled() else None
            on_gpu, stream = _of_gpu()
        else:
            on_cpu, on_gpu, stream = before.cpu_generator, before.gpu_generator, before.stream
            if on_cpu is not None:
                on_cpu = torch.default_generator.get_state()
            if stream is not None:
                stream = _C._cuda_getCurrentStream(_C._cuda_getDevice())
        return cls(
            torch.is_grad_enabled(),
            _C._is_fwd_grad_enabled(),
            torch.is_inference_mode_enabled(),
            _C._dispatch_tls_local_include_set(),
            _C._dispatch_tls_local_exclude_set(),
            _popped(_C._len_torch_dispatch_stack(), _C._pop_torch_dispatch_stack, None),
            _popped(_C._len_torch_function_stack(), _C._pop_torch_function_stack),
            _C._get_torch_function_state(),
            _popped_hooks(),
            (is_on("cpu"), type_of("cpu"), is_on("cuda"), type_of("cuda")),
            torch.is_autocast_cache_enabled(),
            on_cpu,
            on_gpu,
            frames.set_eval_frame(None) if frames else None,
            handlers[0]() if handlers else None,
            stream,
        )

    def put(self, now: ThreadState) -> None:
        """Sets everything but the dispatch keys and the inference mode, which belong to guards.

        ``now``: what the thread has, but for its stacks, which are empty.
        """
        if self.grad is not now.grad:
            _C._set_grad_enabled(self.grad)
        if self.forward_grad is not now.forward_grad:
            _C._set_fwd_grad_enabled(self.forward_grad)
        _C._set_torch_function_state(self.function_state)
        for mode in self.function_modes:
            _C._push_on_torch_function_stack(mode)
        for mode in self.dispatch_modes:
            _C._push_on_torch_dispatch_stack(mode)
        for pack, unpack in self.hooks:
            _C._autograd._push_saved_tensors_default_hooks(pack, unpack)
        if self.autocast != now.autocast:
            for kind, is_on, dtype in (("cpu", *self.autocast[:2]), ("cuda", *self.autocast[2:])):
                torch.set_autocast_enabled(kind, is_on)
                torch.set_autocast_dtype(kind, dtype)
        if self.autocast_cache is not now.autocast_cache:
            torch.set_autocast_cache_enabled(self.autocast_cache)
        if self.cpu_generator is not None:
            torch.default_generator.set_state(self.cpu_generator)
        if self.stream is not None and self.stream != now.stream:
            number, device, device_type = self.stream
            _C._cuda_setStream(stream_id=number, device_index=device, device_type=device_type)
            torch.clear_autocast_cache()  # what the other stream casts may not be there for this one
        if self.gpu_generator is not None:
            _gpu_generator().graphsafe_set_state(self.gpu_generator)
        if self.frame_callback is not None and (frames := _frame_callbacks()):
            frames.set_eval_frame(self.frame_callback)
        if self.warning_handler != now.warning_handler and (handlers := _warning_handlers()):
            handlers[1](self.warning_handler)

    def turn(self, act: Callable[[], Any], now: ThreadState) -> tuple[ThreadState, ThreadState]:
        """Calls with this state. ``now``: what the thread has. Gives the state that the call left, and what the thread has then.

        The latter is as `take` leaves it: whoever has several turns takes the thread's own state first, and puts it back. (Keys and
        inference mode are the thread's own again when all calls have ended: what each has entered it has left.)
        """
        if self.inference is now.inference and self.included == now.included and self.excluded == now.excluded:
            left = self._act(act, now)
            return left, left
        with _C._InferenceMode(self.inference), _C._ForceDispatchKeyGuard(self.included, self.excluded):
            # The first guard has set both gradient modes, and puts them back in the end.
            left = self._act(act, now._replace(grad=not self.inference, forward_grad=not self.inference))
        return left, left._replace(
            grad=now.grad,
            forward_grad=now.forward_grad,
            inference=now.inference,
            included=now.included,
            excluded=now.excluded,
        )

    def _act(self, act: Callable[[], Any], now: ThreadState) -> ThreadState:
        self.put(now)
        try:
            act()
        finally:
            left = ThreadState.take(self)
        return left


def seeded(state: ThreadState, stream: Any = None) -> ThreadState:
    """A part's first state: the given one, but for a stream, and random numbers of its own where they are exchanged: the CPU's
    follow from the thread's on the CPU, and a GPU's from those on the GPU, so ranks with equal ones there have equal parts.
    """
    if stream is not None:
        state = state._replace(stream=(stream.stream_id, stream.device_index, stream.device_type))
    if state.cpu_generator is None:
        return state
    seed = int(torch.randint(0, _SEEDS, ()).item())
    state = state._replace(cpu_generator=torch.Generator().manual_seed(seed).get_state())
    outer = state.gpu_generator
    if outer is None:
        return state
    offset = outer.get_offset()
    outer.set_offset(offset + _OFFSETS)  # the next part's begin elsewhere
    seed = Random(f"{outer.initial_seed()} {offset}").randrange(_SEEDS)
    return state._replace(gpu_generator=torch.Generator(_gpu_generator().device).manual_seed(seed))


def _of_gpu() -> tuple[Any, tuple[int, int, int] | None]:
    """The state of the current GPU's generator by reference, and the current stream; none before a GPU is used.

    (What is captured may not exchange generators.)
    """
    if not _cuda.is_initialized():
        return None, None
    is_exchanged = torch.is_grad_enabled() and not torch.cuda.is_current_stream_capturing()
    generator = _gpu_generator().graphsafe_get_state() if is_exchanged else None
    return generator, _C._cuda_getCurrentStream(_C._cuda_getDevice())


def _gpu_generator() -> Any:
    return torch.cuda.default_generators[_C._cuda_getDevice()]
