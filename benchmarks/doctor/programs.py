"""All planted programs: each is a step with the cause, and the same step without it; sizes come from a seed."""

from __future__ import annotations

from benchmarks.doctor import one_rank, two_ranks
from benchmarks.doctor.planted import Planted

__all__ = ["PROGRAMS"]

PROGRAMS: tuple[Planted, ...] = (
    Planted("healthy_transformer", "", 1, one_rank.healthy_transformer),
    Planted("healthy_convnet", "", 1, one_rank.healthy_convnet),
    Planted("item_each_layer", "implicit_synchronisation", 1, one_rank.item_each_layer),
    Planted("item_each_step", "implicit_synchronisation", 1, one_rank.item_each_step),
    Planted("nonzero_each_layer", "implicit_synchronisation", 1, one_rank.nonzero_each_layer),
    Planted("sync_each_step", "implicit_synchronisation", 1, one_rank.sync_each_step),
    Planted("pageable_each_layer", "pageable_copy", 1, one_rank.pageable_each_layer),
    Planted("pageable_batch", "pageable_copy", 1, one_rank.pageable_batch),
    Planted("free_each_layer", "allocator", 1, one_rank.free_each_layer),
    Planted("small_kernels", "launch_bound", 1, one_rank.small_kernels),
    Planted("item_and_pageable", "pageable_copy", 1, one_rank.item_and_pageable),
    Planted("two_streams", "implicit_synchronisation", 1, one_rank.two_streams),
    Planted("waiting_stream", "default_stream", 1, one_rank.waiting_stream),
    Planted("blocking_all_reduce", "blocking_collective", 2, two_ranks.blocking_all_reduce),
    Planted("small_before_large", "communicator_order", 2, two_ranks.small_before_large),
    Planted("slow_rank", "late_peer", 2, two_ranks.slow_rank),
    Planted("one_bucket", "ddp_buckets", 2, two_ranks.one_bucket),
    Planted("two_backwards", "two_backwards", 2, two_ranks.two_backwards),
    Planted("late_sums", "late_event", 2, two_ranks.late_sums),
    Planted("unused_parameters", "find_unused_parameters", 2, two_ranks.unused_parameters),
    Planted("small_all_reduces", "small_messages", 2, two_ranks.small_all_reduces),
    Planted("batches_in_sequence", "launch_order", 2, two_ranks.batches_in_sequence),
    Planted("contended", "contention", 2, two_ranks.contended),
    Planted("healthy_ddp", "", 2, two_ranks.healthy_ddp),
    Planted("tensor_parallel", "", 2, two_ranks.tensor_parallel),
)
