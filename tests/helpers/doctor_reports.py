"""Reports for the doctor's page: one like that of a real training step, and one with very many spans."""

from __future__ import annotations

from random import Random
from typing import Any

COMPUTE, COMMUNICATE, COPY, WAIT, CALL = range(5)
HOST, MAIN, NCCL = range(3)
LANES_PER_RANK = 3

NAMES = [
    "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_bf16_256x128_32x3_nn_align8>(T1::Params)",
    "void at::native::vectorized_elementwise_kernel<4, at::native::GeluCUDAKernelImpl(at::TensorIteratorBase&)>(int)",
    "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<c10::BFloat16, float>(int, float)",
    "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
    "Memcpy HtoD (Pageable -> Device)",
    "cudaLaunchKernel",
    "cudaStreamSynchronize",
    "cudaMemcpyAsync",
]
GEMM, GELU, NORM, REDUCE, HTOD, LAUNCH, SYNCHRONIZE, COPY_CALL = range(len(NAMES))

Span = tuple[int, float, float, int, int]


class Step:
    """Training steps of one rank: a host that launches, a stream that computes, a stream that reduces gradients."""

    def __init__(self, rank: int, *, waits: bool = True, late_bucket: bool = True, pageable: bool = True) -> None:
        self.spans: list[Span] = []
        self.marks: dict[str, list[list[Any]]] = {"waits": [], "bucket": [], "pageable": []}
        self._base = rank * LANES_PER_RANK
        self._rng = Random(rank)
        self._host_us = self._stream_us = self._reduced_us = 0.0
        for _ in range(4):
            self._copy_in(1.0 if pageable else 0.35, pageable)
            self._layers(12, 1.0)
            if waits:
                self._synchronize("waits")
            for bucket in range(4):
                self._layers(3, 1.9)
                self._reduce(520.0 if bucket == 3 and late_bucket else 260.0, is_last=bucket == 3)
            self._stream_us = max(self._stream_us, self._reduced_us)
            self._kernel(GELU, 190.0)
        self.end_us = max(self._host_us, self._stream_us)

    def _span(self, lane: int, start_us: float, length_us: float, name: int, kind: int) -> None:
        self.spans.append((self._base + lane, round(start_us, 2), round(length_us, 2), name, kind))

    def _call(self, length_us: float, name: int, kind: int) -> None:
        self._span(HOST, self._host_us, length_us, name, kind)
        self._host_us += length_us

    def _kernel(self, name: int, length_us: float) -> None:
        self._call(self._rng.uniform(4, 7), LAUNCH, CALL)
        self._host_us += self._rng.uniform(5, 12)
        start_us = max(self._stream_us, self._host_us)
        self._span(MAIN, start_us, length_us, name, COMPUTE)
        self._stream_us = start_us + length_us + 1

    def _layers(self, num: int, scale: float) -> None:
        for _ in range(num):
            for name, length_us in ((NORM, 14), (GEMM, 46), (GELU, 17), (GEMM, 52)):
                self._kernel(name, length_us * scale * self._rng.uniform(0.9, 1.1))

    def _copy_in(self, scale: float, pageable: bool) -> None:
        self._call(6 if not pageable else 120, COPY_CALL, WAIT if pageable else CALL)
        start_us = max(self._stream_us, self._host_us - 110 if pageable else self._host_us)
        self._span(MAIN, start_us, 105 * scale, HTOD, COPY)
        self.marks["pageable"].append([self._base + MAIN, start_us, start_us + 105 * scale, "pageable memory"])
        self._stream_us = start_us + 105 * scale + 1

    def _synchronize(self, mark: str) -> None:
        start_us = self._host_us
        self._call(max(self._stream_us - self._host_us, 0) + 12, SYNCHRONIZE, WAIT)
        self.marks[mark].append([self._base + HOST, start_us, self._host_us, "loss.item() waits for the GPU"])
        self._host_us += 760  # what the program does with the number before it launches again

    def _reduce(self, length_us: float, *, is_last: bool) -> None:
        start_us = max(self._stream_us, self._reduced_us)
        self._span(NCCL, start_us, length_us, REDUCE, COMMUNICATE)
        self._reduced_us = start_us + length_us
        if is_last:
            self.marks["bucket"].append([self._base + NCCL, start_us, self._reduced_us, "last bucket, exposed"])


def realistic() -> dict[str, Any]:
    """Two ranks with three lanes each, two diagnoses and a remark."""
    now, marks = _timeline()
    return {
        "title": "crossfade doctor: 2 ranks of NVIDIA H100 80GB HBM3",
        "summary": "The host waits for the GPU in every step: loss.item() drains the stream. The fix wins 13 to 17 % of the step.",
        "notes": ["rank 1's trace has no Python stacks: its lines are those of rank 0."],
        "metrics": [
            ["step", f"{now['end_us'] / 4e3:.3f} ms"],
            ["steps replayed", "4"],
            ["replay misses the trace by", "0.42%"],
            ["rank 0", "computes 71%, communicates 22% (exposed 9.1%), idle 15%"],
            ["rank 1", "computes 70%, communicates 22% (exposed 9.3%), idle 16%"],
        ],
        "lanes": [f"rank {rank} · {lane}" for rank in range(2) for lane in ("host", "stream 7", "stream 20")],
        "names": NAMES,
        "now": now,
        "diagnoses": [
            {
                "title": "the host waits for the GPU in every step, and the GPU then for the host",
                "is_remark": False,
                "gain": "13 to 17 % of the step",
                "confidence": "high; seen in 4 of 4 steps on both ranks",
                "evidence": "cudaStreamSynchronize holds the host for 0.9 ms a step. After it the stream is empty, and computes"
                " nothing for 0.8 ms until the next kernel is launched.",
                "where": "aten::item at train.py:87 (train_step) (8 x)",
                "fix": "Keep the loss on the GPU and read it every 50 steps, or copy it without waiting.",
                "code": "total += loss.detach()          # stays on the GPU\nif step % 50 == 0:\n    log(total.item() / 50)",
                "marks": marks["waits"],
                "fixed": _timeline(waits=False)[0],
            },
            {
                "title": "the last gradient bucket is reduced after backward has ended",
                "is_remark": False,
                "gain": "3.5 to 5.0 % of the step",
                "confidence": "medium; the smaller bucket's time is computed from the link's rate",
                "evidence": "The last of 4 buckets is 48 MB and takes 0.52 ms; nothing is computed meanwhile.",
                "where": "DistributedDataParallel(...) at train.py:41 (main)",
                "fix": "Make buckets smaller, so that less is left to reduce when backward ends.",
                "code": "model = DistributedDataParallel(model, bucket_cap_mb=12)",
                "marks": marks["bucket"],
                "fixed": _timeline(late_bucket=False)[0],
            },
            {
                "title": "batches are copied from pageable memory",
                "is_remark": True,
                "gain": "at most 2.1 % of the step",
                "confidence": "low",
                "evidence": "Memcpy HtoD (Pageable -> Device) takes 105 µs a step, during which the host waits too.",
                "where": "aten::to at train.py:80 (train_step)",
                "fix": "Have the loader pin its memory, and copy with non_blocking=True.",
                "code": "",
                "marks": marks["pageable"],
                "fixed": None,
            },
        ],
    }


def _timeline(**fixes: bool) -> tuple[dict[str, Any], dict[str, list[list[Any]]]]:
    steps = [Step(rank, **fixes) for rank in range(2)]
    marks = {name: [mark for step in steps for mark in step.marks[name]] for name in steps[0].marks}
    spans = sorted(span for step in steps for span in step.spans)
    return {"end_us": max(step.end_us for step in steps), "spans": spans}, marks


def many(num_spans: int, num_ranks: int = 4) -> dict[str, Any]:
    """As the realistic one, but with this many spans on lanes of four ranks, and a second timeline with as many."""
    report = realistic()
    report["lanes"] = [
        f"rank {rank} · {lane}" for rank in range(num_ranks) for lane in ("host", "stream 7", "stream 20")
    ]
    report["now"] = _noise(num_spans, len(report["lanes"]), 1.0)
    end_us = report["now"]["end_us"]
    for diagnosis in report["diagnoses"]:
        diagnosis["marks"] = [[n % 6, end_us * n / 40, end_us * (n + 0.2) / 40, "marked"] for n in range(40)]
        diagnosis["fixed"] = None
    report["diagnoses"][0]["fixed"] = _noise(num_spans, len(report["lanes"]), 0.9)
    return report


def _noise(num_spans: int, num_lanes: int, scale: float) -> dict[str, Any]:
    """Spans of all widths, from a few nanoseconds to milliseconds, in bursts and with gaps."""
    rng = Random(1)
    spans: list[Span] = []
    for lane in range(num_lanes):
        time_us = 0.0
        for _ in range(num_spans // num_lanes):
            time_us += rng.choice([0.0, 0.0, 0.5, 3.0]) * scale
            length_us = rng.lognormvariate(1.5, 1.5) * scale
            kind = (CALL, COMPUTE, COMMUNICATE)[lane % LANES_PER_RANK]
            kind = rng.choice([kind, kind, kind, (WAIT, COPY, COPY)[lane % LANES_PER_RANK]])
            spans.append((lane, round(time_us, 3), round(length_us, 3), rng.randrange(len(NAMES)), kind))
            time_us += length_us
    return {"end_us": max(start + length for _, start, length, _, _ in spans), "spans": spans}
