"""Programs of simulated ranks, each with a cause and without it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from tests.helpers.gpu_traces import Rank

__all__ = ["PLANTED", "STEPS", "Program", "blocking_stream", "products", "steps", "two_backwards"]

STEPS, LAYERS = 6, 8
Program = Callable[[Rank, bool], None]


def steps(layer: Callable[[Rank, int], None], end: Callable[[Rank], None] | None = None) -> Callable[[Rank], None]:
    def program(rank: Rank) -> None:
        for _ in range(STEPS):
            rank.kernel(40, "embedding")
            for number in range(LAYERS):
                layer(rank, number)
            if end is not None:
                end(rank)
            rank.kernel(60, "optimizer")
            rank.python(30)

    return program


def products(rank: Rank, num: int = 3, length_us: float = 220.0) -> None:
    for _ in range(num):
        rank.python(12)
        rank.kernel(length_us)


def item_each_layer(rank: Rank, has_cause: bool) -> None:
    def layer(rank: Rank, _: int) -> None:
        products(rank, 6, 45)
        rank.python(120)
        if has_cause:
            rank.item()

    steps(layer)(rank)


def pageable_each_layer(rank: Rank, has_cause: bool) -> None:
    def layer(rank: Rank, _: int) -> None:
        products(rank)
        rank.copy(600 if has_cause else 40, 2 << 20, is_pageable=has_cause)
        rank.python(80)

    steps(layer)(rank)


def free_each_layer(rank: Rank, has_cause: bool) -> None:
    def layer(rank: Rank, _: int) -> None:
        products(rank)
        if has_cause:
            rank.scope("empty_cache", rank.free)

    steps(layer)(rank)


def launch_bound(rank: Rank, has_cause: bool) -> None:
    def layer(rank: Rank, _: int) -> None:
        for _ in range(10):
            rank.python(20 if has_cause else 0)
            rank.kernel(9, "small", 8)

    steps(layer)(rank)


def blocking(rank: Rank, has_cause: bool) -> None:
    _blocking(rank, has_cause, (150, 1 << 22))


def blocking_of_two_sizes(rank: Rank, has_cause: bool) -> None:
    """A weight's gradient and a bias's, one after the other on the stream that computes."""
    _blocking(rank, has_cause, (20, 4096), (150, 1 << 22))


def _blocking(rank: Rank, has_cause: bool, *sums: tuple[float, int]) -> None:
    """``sums``: of each layer's gradients, how long each takes and its elements."""
    waits: list[Callable[[], None]] = []

    def layer(rank: Rank, _: int) -> None:
        products(rank)

        def reduce() -> None:
            waits.extend(rank.all_reduce(us, num, is_async=not has_cause) for us, num in sums)

        rank.scope("autograd::engine::evaluate_function: AccumulateGrad", reduce)

    def end(rank: Rank) -> None:
        while waits:
            waits.pop(0)()

    steps(layer, end)(rank)


def communicator_order(rank: Rank, has_cause: bool) -> None:
    def layer(rank: Rank, _: int) -> None:
        rank.kernel(100)
        late = rank.all_reduce(700, 1 << 25)
        rank.kernel(100)
        soon = rank.all_reduce(20, 4096, group="0" if has_cause else "1")
        rank.kernel(100)
        soon()
        products(rank, 4)
        late()

    steps(layer)(rank)


def late_peer(rank: Rank, has_cause: bool) -> None:
    def layer(rank: Rank, _: int) -> None:
        products(rank, 4 if has_cause and rank.number else 3)
        rank.all_reduce(60, 1 << 20)()

    steps(layer)(rank)


def _longer_on_one_rank(rank: Rank, has_cause: bool, blocks: Callable[[int], int]) -> None:
    """The products have as many blocks on all ranks, as on newer GPUs; ``blocks`` gives those of the other kernels."""
    factor = 6 if has_cause and rank.number else 3

    def layer(rank: Rank, _: int) -> None:
        for _ in range(3):
            rank.kernel(30.0 * factor, "persistent product", 132)
            rank.kernel(4.0 * factor, "activation", blocks(factor))
        rank.all_reduce(60, 1 << 20)()

    steps(layer)(rank)


def more_rows(rank: Rank, has_cause: bool) -> None:
    _longer_on_one_rank(rank, has_cause, lambda factor: 88 * factor)


def slow_gpu(rank: Rank, has_cause: bool) -> None:
    _longer_on_one_rank(rank, has_cause, lambda factor: 264)


def one_bucket(rank: Rank, has_cause: bool) -> None:
    waits: list[Callable[[], None]] = []

    def end(rank: Rank) -> None:
        rank.thread = 1
        while waits:
            waits.pop(0)()

    steps(_backward(has_cause, waits), end)(rank)


def one_bucket_on_one_thread(rank: Rank, has_cause: bool) -> None:
    """The engine's thread waits for the bucket as soon as it is launched, since the backward pass is over."""
    waits: list[Callable[[], None]] = []
    backward = _backward(has_cause, waits)

    def layer(rank: Rank, number: int) -> None:
        backward(rank, number)
        rank.thread = 1

    def wait(rank: Rank) -> None:
        rank.thread = 2
        waits.pop()()
        rank.kernel(3, "copy_bucket_to_grad")
        rank.thread = 1

    steps(layer, wait)(rank)


def _backward(has_cause: bool, waits: list[Callable[[], None]]) -> Callable[[Rank, int], None]:
    """A layer's backward pass, on the engine's thread: with a bucket of its own, or the last layer with one for all."""

    def layer(rank: Rank, number: int) -> None:
        rank.thread = 2
        for _ in range(3):
            rank.python(12)
            rank.kernel(220, "backward")
        if not has_cause or number == LAYERS - 1:
            reduce = partial(rank.all_reduce, *((1600, 1 << 26) if has_cause else (200, 1 << 23)))
            rank.scope("autograd::engine::evaluate_function: A", lambda: waits.append(reduce()))

    return layer


def small_messages(rank: Rank, has_cause: bool) -> None:
    def layer(rank: Rank, number: int) -> None:
        products(rank, 2, 100)
        if has_cause or number == LAYERS - 1:
            for _ in range(8 if has_cause else 1):
                rank.all_reduce(22, 512)()

    steps(layer)(rank)


def small_messages_of_a_slow_host(rank: Rank, has_cause: bool) -> None:
    """What they take of the GPU is little: the host is slower to launch them. Once it does something else in between."""

    def end(rank: Rank) -> None:
        for number in range(40 if has_cause else 1):
            rank.python(400 if number == 20 else 40)
            rank.all_reduce(9, 512)

    steps(lambda rank, _: products(rank, 2, 100), end)(rank)


def behind(rank: Rank, caller: int, streams: Sequence[int]) -> None:
    """Streams wait for the caller's."""
    for stream in streams:
        rank.stream = stream
        rank.wait_stream(caller)


def joined(rank: Rank, caller: int, streams: Sequence[int]) -> None:
    """The caller's stream waits for the others, and is the current one."""
    rank.stream = caller
    for stream in streams:
        rank.wait_stream(stream)


def batches_in_sequence(rank: Rank, has_cause: bool) -> None:
    """Two batches that share a communicator; each waits for its sum before its next product."""

    def step(rank: Rank, number: int) -> None:
        if number:
            return
        behind(rank, 7, (8, 9))
        order = [8] * LAYERS + [9] * LAYERS if has_cause else [8, 9] * LAYERS
        for stream in order:
            rank.stream = stream
            rank.kernel(200)
            rank.all_reduce(180, 1 << 24)()
        joined(rank, 7, (8, 9))

    steps(step)(rank)


def batches_of_a_training_step(rank: Rank, has_cause: bool) -> None:
    """The same on the batches' own streams, with a loss of both and the way back. A rank launches more than the other one."""

    def run(rank: Rank, order: Sequence[int]) -> None:
        for stream in order:
            rank.stream = stream
            for _ in range(2 * rank.number):
                rank.kernel(1, "copy", 8)
            rank.kernel(200)
            rank.all_reduce(180, 1 << 24, is_async=False)

    def step(rank: Rank, number: int) -> None:
        if number:
            return
        behind(rank, 7, (8, 9))
        order = [8] * LAYERS + [9] * LAYERS if has_cause else [8, 9] * LAYERS
        run(rank, order)
        joined(rank, 7, (8, 9))
        rank.kernel(10, "loss")
        behind(rank, 7, (9, 8))
        run(rank, order[::-1])
        joined(rank, 7, (8, 9))

    steps(step)(rank)


def two_streams(rank: Rank, has_cause: bool) -> None:
    """Two batches on two streams, many kernels of less than half of the GPU, and a value that the host reads behind each layer."""

    def layer(rank: Rank, number: int) -> None:
        for stream in (8, 9):
            rank.stream = stream
            if not number:
                rank.wait_stream(7)
            for _ in range(6):
                rank.kernel(45, "small", 48)
            if has_cause:
                rank.item()
        rank.stream = 7

    def end(rank: Rank) -> None:
        for stream in (8, 9):
            rank.wait_stream(stream)

    steps(layer, end)(rank)


def two_backwards(rank: Rank, has_cause: bool, sum_us: float = 700, copy_us: float = 0, slowed_us: float = 150) -> None:
    """Two halves of a batch under DDP; without the cause the first one's gradients are kept.

    Gradients are copied into buckets and back, where ``copy_us`` is given; products beside sums take ``slowed_us``.
    """

    def half(is_summed: bool) -> None:
        rank.scope("DistributedDataParallel.forward", lambda: products(rank, 3))
        rank.thread = 2
        waits: list[Callable[[], None]] = []
        for number in range(LAYERS):
            length_us = slowed_us if is_summed and number > 1 else 150
            rank.scope("autograd::engine::evaluate_function: MmBackward0", partial(products, rank, 2, length_us))
            if is_summed and number % 2:
                if copy_us:
                    rank.scope("torch::distributed::reducer::mul_out", lambda: rank.kernel(copy_us, "mul"))
                reduce = partial(rank.all_reduce, sum_us, 1 << 23)
                rank.scope("autograd::engine::evaluate_function: A", lambda reduce=reduce: waits.append(reduce()))  # type: ignore[misc]
        for wait in waits:
            wait()
            name = "torch.distributed.ddp.reducer::copy_bucket_to_grad"
            rank.scope(name, lambda: rank.kernel(max(copy_us, 3), "copy"))
        rank.thread = 1

    for _ in range(STEPS):
        for number in range(2):
            half(has_cause or number == 1)
        rank.scope("Optimizer.step#SGD.step", lambda: rank.kernel(60, "optimizer"))


def two_backwards_with_copies(rank: Rank, has_cause: bool) -> None:
    two_backwards(rank, has_cause, 250, 60)


def two_backwards_with_contention(rank: Rank, has_cause: bool) -> None:
    two_backwards(rank, has_cause, 560, 0, 240)


def blocking_stream(rank: Rank, has_cause: bool, copy_us: float = 150) -> None:
    """The next batch is copied from pinned memory, on a stream of a library's."""
    rank.blocking = {15} if has_cause else set()

    def layer(rank: Rank, _: int) -> None:
        rank.stream = 15
        rank.copy(copy_us, int(copy_us * 5e4), is_pageable=False)
        rank.stream = 7
        products(rank, 3, 120)

    steps(layer)(rank)


PLANTED: list[tuple[str, Program, int, float]] = [  # cause, program, ranks, how far the predicted gain may be off
    ("implicit_synchronisation", item_each_layer, 1, 0.10),
    ("pageable_copy", pageable_each_layer, 1, 0.05),
    ("allocator", free_each_layer, 1, 0.05),
    ("launch_bound", launch_bound, 1, 0.15),
    ("blocking_collective", blocking, 2, 0.10),
    ("blocking_collective", blocking_of_two_sizes, 2, 0.10),
    ("communicator_order", communicator_order, 2, 0.08),
    ("late_peer", late_peer, 2, 0.15),  # the fix shares the work, the program without it has less
    ("late_peer", more_rows, 2, 0.25),
    ("slow_gpu", slow_gpu, 2, 0.25),
    ("ddp_buckets", one_bucket, 2, 0.12),
    ("ddp_buckets", one_bucket_on_one_thread, 2, 0.12),
    ("small_messages", small_messages, 2, 0.15),
    ("small_messages", small_messages_of_a_slow_host, 2, 0.05),
    ("implicit_synchronisation", two_streams, 1, 0.10),
    ("launch_order", batches_in_sequence, 2, 0.15),  # this machine knows no contention
    ("two_backwards", two_backwards, 2, 0.05),
    ("two_backwards", two_backwards_with_copies, 2, 0.05),
    ("two_backwards", two_backwards_with_contention, 2, 0.10),
    ("default_stream", blocking_stream, 1, 0.05),
]
