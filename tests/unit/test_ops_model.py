"""What the model predicts of products with their collectives, against what was measured on 4 H200; and the words it uses.

The measured figures are those of one host with 4 NVIDIA H200 (driver 580, CUDA 13.0, torch 2.11.0, NCCL 2.28.9, 2026-11-20):
medians of 10 to 20 runs, in ms, the slowest rank counts; bf16.
"""

from __future__ import annotations

from dataclasses import replace
from statistics import median
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossfade.ops.calls.job import Operator, Shape
from crossfade.ops.choice.candidate import PLAIN, Candidate
from crossfade.ops.choice.figures import H200, Figures, Line, measure_waves, with_topology
from crossfade.ops.choice.model import Model, Prediction, Program
from crossfade.topology import Device, Link, LinkKind, Rate, Slowdown, Topology

COOL = replace(H200, waves=((2048, 26.9), (4096, 51.7), (7168, 82.0), (8192, 84.7)))
"""Short runs of GPUs that are not at their power limit: what the figures below were measured with."""
MODEL = Model(COOL)
SCATTER, REDUCE, GATHER, EXCHANGE = Operator

MEASURED_PRODUCT = {
    (8192, 8192, 2048): 0.43,
    (8192, 8192, 7168): 1.29,
    (8192, 16384, 4096): 1.60,
    (16384, 8192, 7168): 2.67,
    (16384, 8192, 4096): 1.71,
}
"""cuBLAS, measured on 4 H200: (M, N, K) and ms."""
MEASURED_PLAIN = {
    (8192, 8192, 2048): (1.09, 0.80),
    (8192, 8192, 7168): (1.97, 1.64),
    (8192, 16384, 4096): (2.76, 2.24),
    (16384, 8192, 7168): (3.82, 3.27),
    (16384, 8192, 4096): (2.72, 2.20),
}
"""The product, then NCCL's all-reduce / reduce-scatter, measured on 4 H200."""
MEASURED_ROUNDS = [
    (SCATTER, (8192, 8192, 7168), "rounds", 1.347),
    (SCATTER, (8192, 8192, 2048), "rounds", 0.464),
    (SCATTER, (2048, 8192, 7168), "rounds", 0.343),
    (SCATTER, (16384, 8192, 7168), "rounds", 2.84),
    (REDUCE, (8192, 8192, 2048), "rounds", 0.759),
    (REDUCE, (8192, 8192, 2048), "rounds(rounds=2)", 0.809),
    (REDUCE, (8192, 8192, 2048), "rounds(rounds=2, lag=1)", 0.769),
    (REDUCE, (8192, 8192, 7168), "rounds(rounds=2, taper=3)", 1.507),
    (REDUCE, (2048, 8192, 7168), "rounds", 0.459),
]
"""The operators, captured, on 4 H200 that were hot (2026-11-21)."""
MEASURED_HOT_PRODUCT = {
    (8192, 8192, 2048): 0.37,
    (2048, 8192, 7168): 0.31,
    (8192, 8192, 7168): 1.38,
    (16384, 8192, 7168): 2.78,
}
"""cuBLAS alone in the same run."""


def shape(operator: str, mnk: tuple[int, int, int], num_ranks: int = 4) -> Shape:
    return Shape(operator, *mnk, "bfloat16", "nt", num_ranks)


def rounds(number: int) -> Candidate:
    return Candidate("rounds", (("rounds", number),))


def predicted_ms(operator: str, mnk: tuple[int, int, int], candidate: Candidate) -> float:
    predicted = MODEL.predict(shape(operator, mnk), candidate)
    assert predicted is not None
    return predicted.total_us / 1e3


# The figures


def test_products_are_within_a_few_percent_of_what_was_measured() -> None:
    for mnk, measured in MEASURED_PRODUCT.items():
        assert MODEL.product_us(shape(SCATTER, mnk)) / 1e3 == pytest.approx(measured, rel=0.05)
    assert 1.28 <= MODEL.product_us(shape(SCATTER, (8192, 8192, 8192))) / 1e3 <= 1.43  # the range that was measured


def test_plain_is_within_ten_percent_of_what_was_measured() -> None:
    errors = []
    for mnk, (reduced, scattered) in MEASURED_PLAIN.items():
        for operator, measured in ((REDUCE, reduced), (SCATTER, scattered)):
            errors.append(abs(predicted_ms(operator, mnk, PLAIN) / measured - 1))
    assert max(errors) < 0.10
    assert median(errors) < 0.03


def test_rounds_are_near_what_the_operators_did() -> None:
    """With products that take what they took in that run: this is about what is done when."""
    errors = []
    for operator, mnk, text, measured in MEASURED_ROUNDS:
        asked = shape(operator, mnk)
        factor = MEASURED_HOT_PRODUCT[mnk] * 1e3 / MODEL.product_us(asked)
        hot = Model(replace(COOL.captured(), waves=tuple((k, wave_us * factor) for k, wave_us in COOL.waves)))
        assert hot.product_us(asked) / 1e3 == pytest.approx(MEASURED_HOT_PRODUCT[mnk])
        predicted = hot.predict(asked, Candidate.parse(text))
        assert predicted is not None
        errors.append(abs(predicted.total_us / 1e3 / measured - 1))
    assert max(errors) < 0.12
    assert median(errors) < 0.05


@pytest.mark.parametrize(
    ("size_bytes", "measured_us"), [(16 << 20, 47), (64 << 20, 175), (256 << 20, 683)]
)  # one copy to a peer, measured on 4 H200
def test_a_copy(size_bytes: int, measured_us: float) -> None:
    assert H200.copy.time_us(size_bytes) == pytest.approx(measured_us, rel=0.05)


@pytest.mark.parametrize(
    ("operator", "megabytes", "measured_us"),  # NCCL 2.28.9 alone, measured on 4 H200
    [
        (SCATTER, (16, 64, 256), (62, 194, 692)),
        (REDUCE, (16, 64, 256), (103, 328, 1225)),
        (EXCHANGE, (16, 64, 256), (68, 192, 656)),
        (GATHER, (16, 64, 256), (77, 202, 700)),  # of all ranks together
    ],
)
def test_collectives(operator: str, megabytes: tuple[int, ...], measured_us: tuple[int, ...]) -> None:
    for size, wanted in zip(megabytes, measured_us, strict=True):
        rows = (size << 20) // 2 // 1024  # as many rows of 1024 elements of two bytes
        assert MODEL.collective_us(shape(operator, (rows, 1024, 1024))) == pytest.approx(wanted, rel=0.05)


# Waves and bounds


def test_waves() -> None:
    one = MODEL.product_us(shape(SCATTER, (128, 256, 4096)))
    assert one == pytest.approx(51.7)  # a tile takes a wave's time
    assert MODEL.product_us(shape(SCATTER, (128 * 12, 256 * 11, 4096))) == pytest.approx(51.7)  # 132 tiles
    assert MODEL.product_us(shape(SCATTER, (128 * 12 + 1, 256 * 11, 4096))) == pytest.approx(2 * 51.7)
    fewer = Model(replace(COOL, num_sms=131))
    assert fewer.product_us(shape(SCATTER, (128 * 12, 256 * 11, 4096))) == pytest.approx(2 * 51.7)
    assert MODEL.product_us(shape(SCATTER, (128 * 12, 256 * 11, 4096)), 128.0) == pytest.approx(51.7)
    # 13 GB of operand and one row: what it reads counts
    assert MODEL.product_us(shape(SCATTER, (1, 256 * 132, 200_000))) == pytest.approx(
        2 * 33792 * 2e5 / 2700e3, rel=0.01
    )
    assert MODEL.product_us(shape(SCATTER, (0, 8192, 4096))) == pytest.approx(2 * 8192 * 4096 / 2700e3)


def test_time_of_a_wave_between_and_beyond_what_was_measured() -> None:
    figures = Figures(waves=((1000, 10.0), (3000, 20.0)))
    assert [figures.wave_us(k) for k in (0, 1000, 2000, 3000, 6000)] == [5.0, 10.0, 15.0, 20.0, 40.0]
    assert Figures(waves=((1000, 10.0), (2000, 30.0))).wave_us(0) == 1.0  # not under a tenth of the first
    assert [Figures(waves=((1000, 10.0),)).wave_us(k) for k in (0, 500, 3000)] == [1.0, 5.0, 30.0]


def test_the_bound_is_that_of_the_design() -> None:
    """max(T_gemm + t_comm(last piece), t_gemm(first piece) + T_comm), a piece being 4 rows of 32 tiles on 132 SMs."""
    found = MODEL.bound(shape(SCATTER, (8192, 8192, 7168)))
    last_us = H200.copy.time_us(512 * 8192 * 2)
    assert dict(found.terms) == pytest.approx({"product": 16 * 82.0, "last piece's communication": last_us})
    assert found.total_us == pytest.approx(16 * 82.0 + last_us)
    bound_by_links = MODEL.bound(shape(REDUCE, (8192, 8192, 2048)))  # six copies of 2048 rows
    copies_us = 6 * H200.copy.time_us(2048 * 8192 * 2)
    assert dict(bound_by_links.terms) == pytest.approx({"one piece's product": 26.9, "communication": copies_us})
    gathering = shape(GATHER, (8192, 14336, 8192))
    assert MODEL.bound(gathering).terms == (("product", MODEL.product_us(gathering)),)


@given(
    st.sampled_from(Operator),
    st.tuples(st.integers(1, 20_000), st.integers(1, 20_000), st.integers(1, 20_000)),
    st.integers(1, 8),
    st.sampled_from([PLAIN, rounds(1), rounds(4)]),
)
def test_terms_add_up_and_nothing_takes_less_than_its_product(
    operator: str, mnk: tuple[int, int, int], num_ranks: int, candidate: Candidate
) -> None:
    asked = shape(operator, mnk, num_ranks)
    found = MODEL.predict(asked, candidate)
    assert found is not None
    assert sum(time_us for _, time_us in found.terms) == pytest.approx(found.total_us)
    assert all(time_us > 0 for _, time_us in found.terms)
    assert len({name for name, _ in found.terms}) == len(found.terms)
    assert found.total_us >= 0.99 * MODEL.product_us(asked)


def test_more_bytes_and_slower_links_take_longer() -> None:
    slow = Model(replace(COOL, copy=Line(6.7, 40.0)))
    asked = shape(SCATTER, (8192, 8192, 2048))
    fast, slower = MODEL.predict(asked, rounds(1)), slow.predict(asked, rounds(1))
    assert fast is not None
    assert slower is not None
    assert "copies" not in dict(fast.terms)  # hidden
    assert dict(slower.terms)["copies"] > dict(slower.terms)["products"]  # and not any more
    captured = Model(COOL.captured()).predict(asked, rounds(4))
    eager = MODEL.predict(asked, rounds(4))
    assert captured is not None
    assert eager is not None
    assert "launches" not in dict(captured.terms)
    assert captured.total_us < eager.total_us


def test_small_products_are_bound_by_launches() -> None:
    found = MODEL.predict(shape(REDUCE, (64, 256, 128)), rounds(4))
    assert found is not None
    assert dict(found.terms)["launches"] > found.total_us / 2


def test_what_the_model_does_not_know() -> None:
    assert MODEL.predict(shape(SCATTER, (8192, 8192, 2048)), Candidate("fused")) is None
    assert MODEL.predict(shape("matmul_signaled", (8192, 8192, 2048)), PLAIN) is None


# Programs on streams


def test_a_program_has_the_terms_of_its_longest_way() -> None:
    program = Program()
    first = program.add("a", "compute", 10, launch_us=3)
    program.add("b", "compute", 20, launch_us=1)
    copied = program.add("c", "copies", 5, launch_us=1, after=[first])
    program.add("c", "copies", 30, after=[copied])
    assert program.finish() == Prediction(48, (("launches", 3), ("a", 10), ("c", 35)))
    program.add("d", "compute", 1, launch_us=100)  # enqueued when all else has ended
    assert program.finish() == Prediction(106, (("launches", 105), ("d", 1)))
    assert Program().finish() == Prediction(0.0, ())


def test_a_prediction_prints_as_a_table() -> None:
    assert str(Prediction(1312.5, (("launches", 12.5), ("product", 1300.0)))).splitlines() == [
        "launches        12.5 us",
        "product       1300.0 us",
        "total         1312.5 us",
    ]


# Figures


@pytest.mark.parametrize(
    "wrong",
    [
        {"waves": ()},
        {"waves": ((2, 1.0), (1, 1.0))},
        {"waves": ((1, 0.0),)},
        {"signal_us": -1.0},
        {"signal_us": float("nan")},
        {"num_sms": 0},
        {"memory_gbs": 0.0},
    ],
)
def test_figures_that_cannot_be(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="Figures"):
        replace(H200, **wrong)
    with pytest.raises(ValueError, match="Line"):
        Line(1.0, 0.0)


def test_waves_are_measured_by_products_of_whole_waves() -> None:
    waves = measure_waves(lambda m, n, k: MODEL.product_us(shape(SCATTER, (m, n, k))), 132)
    assert [k for k, _ in waves] == [1024, 2048, 4096, 7168, 16384]
    assert dict(waves) == pytest.approx({k: COOL.wave_us(k) for k, _ in waves})
    assert replace(COOL, waves=waves).wave_us(3000) == pytest.approx(COOL.wave_us(3000))


def test_figures_take_what_the_topology_command_measured() -> None:
    gpus = tuple(Device(f"GPU-{name}", "some GPU", 100, 1 << 30) for name in "ab")
    rates = (
        Rate("copy", 1000, 9.0),
        Rate("copy", 1_000_000, 20.0),
        Rate("copy", 3_000_000, 30.0),
        Rate("nccl", 8, 1.0),
    )
    links = (
        Link("GPU-a", "GPU-b", LinkKind.NVLINK, rates, 6.0),
        Link("GPU-b", "GPU-a", LinkKind.NVLINK, rates[:1]),  # one size alone gives no line
    )
    slowdowns = (
        Slowdown("nccl", "gemm", 1.5, 1.1),
        Slowdown("copy", "gemm", 0.9, 0.9),
        Slowdown("copy", "memory", 3, 3),
    )
    found = with_topology(H200, Topology(gpus, links, slowdowns))
    assert found.copy.latency_us == pytest.approx(15.0)
    assert found.copy.gbs == pytest.approx(200.0)
    assert (found.signal_us, found.num_sms) == (6.0, 100)
    assert found.copies_beside_product == 1.0
    assert found.waves == H200.waves
    assert with_topology(H200, Topology()) == H200
    falling = replace(links[0], rates=(Rate("copy", 1000, 9.0), Rate("copy", 2000, 8.0)))
    assert with_topology(H200, Topology(gpus, (falling,))).copy == Line(0.0, 0.25)


# Shapes


def test_buckets() -> None:
    def rows(m: int, num_ranks: int = 1) -> int:
        return shape(SCATTER, (m, 7, 5), num_ranks).bucket.m

    assert [rows(m) for m in range(14)] == [0, 1, 2, 3, 4, 6, 6, 8, 8, 12, 12, 12, 12, 16]
    assert [rows(m) for m in (8192, 8193, 12288, 12289)] == [8192, 12288, 12288, 16384]
    assert [rows(m, 4) for m in (1, 4, 5, 17, 8192, 8193)] == [4, 4, 8, 24, 8192, 12288]
    assert rows(15, 3) == 18
    assert shape(SCATTER, (17, 7, 5)).bucket == shape(SCATTER, (24, 7, 5))


@given(st.integers(0, 1 << 20), st.integers(1, 16))
def test_a_bucket_is_its_own_and_not_much_larger(m: int, num_ranks: int) -> None:
    asked = shape(SCATTER, (m, 1, 1), num_ranks)
    bucket = asked.bucket
    assert bucket.bucket == bucket
    assert m <= bucket.m <= 1.5 * (m + num_ranks - 1)
    assert bucket.m % num_ranks == 0


def test_shapes_that_cannot_be() -> None:
    with pytest.raises(ValueError, match=r"does not exist\nhint"):
        shape(SCATTER, (-1, 2, 3))
    with pytest.raises(ValueError, match="at least one rank"):
        shape(SCATTER, (1, 2, 3), 0)
    with pytest.raises(ValueError, match="no type 'float8_e4m3fn' here"):
        Shape(SCATTER, 1, 2, 3, "float8_e4m3fn", "nt", 2)
    assert str(shape(SCATTER, (1, 2, 3))) == "matmul_reduce_scatter 1,2,3 bfloat16 nt x4"
