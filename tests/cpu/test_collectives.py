"""Collectives on every engine, held against plain torch: each kind, reduction and dtype, and what they say of what does not fit."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest

import crossfade
from crossfade.collective import ReduceOp, allgather, allreduce, broadcast, reducescatter

torch = pytest.importorskip("torch", reason="collectives need torch")

from tests.helpers.collective_bench import Bench, bench_of, both_benches  # noqa: E402
from tests.helpers.collective_makers import NUM_ACTORS, Maker, all_makes, expected_reduction, make, same  # noqa: E402

FLOATS = ("float16", "bfloat16", "float32", "float64")
INTEGERS = ("uint8", "int8", "int16", "int32", "int64")


both = both_benches


@pytest.fixture(params=["inline", "local", "copy"])
def bench(request: pytest.FixtureRequest, both: tuple[Bench, Bench]) -> Bench:
    """One thread, or processes, whose collectives are by copies with ``copy``."""
    return bench_of(both, request.param)


# Every kind, reduction and dtype


@pytest.mark.parametrize("op", list(ReduceOp))
def test_reductions_of_every_dtype(bench: Bench, op: ReduceOp) -> None:
    """All-reduce and reduce-scatter, MAX included, in one graph per reduction."""
    dtypes = FLOATS if op is ReduceOp.AVG else FLOATS + INTEGERS
    shapes = ((6, 5), (3,), (0,))
    cases = [(dtype, shape) for dtype in dtypes for shape in shapes]

    def build(actors: list[Any], inp: Any) -> list[Any]:
        outputs: list[Any] = []
        for dtype, shape in cases:
            nodes = [actor.make.bind(inp, shape, dtype) for actor in actors]
            outputs += allreduce.bind(nodes, op=op) + reducescatter.bind(nodes, op=op.name)
        return outputs

    for seed, values in zip((1, 2), bench.run(build, (1, 2)), strict=True):
        for case, (dtype, shape) in enumerate(cases):
            wanted = expected_reduction(all_makes(seed, shape, dtype), op)
            reduced, parts = values[6 * case : 6 * case + 3], values[6 * case + 3 : 6 * case + 6]
            assert all(same(each, wanted) for each in reduced), (dtype, shape)
            assert all(same(a, b) for a, b in zip(parts, wanted.chunk(NUM_ACTORS), strict=False) if b.numel())
            assert all(each.shape == (shape[0] // NUM_ACTORS, *shape[1:]) for each in parts)


def test_gathers_and_broadcasts_of_every_dtype(bench: Bench) -> None:
    dtypes = (*FLOATS, *INTEGERS, "bool", "complex64")
    shapes = ((2, 3), (0, 4), (7,))
    cases = [(dtype, shape) for dtype in dtypes for shape in shapes]

    def build(actors: list[Any], inp: Any) -> list[Any]:
        outputs: list[Any] = []
        for dtype, shape in cases:
            nodes = [actor.make.bind(inp, shape, dtype) for actor in actors]
            outputs += allgather.bind(nodes[::-1])
            outputs += broadcast.bind([actors[0], nodes[1], actors[2].whatever.bind("no tensor")], root=1)
        return outputs

    ((*values,),) = bench.run(build, (5,))
    for case, (dtype, shape) in enumerate(cases):
        tensors = all_makes(5, shape, dtype)
        gathered, got = values[6 * case : 6 * case + 3], values[6 * case + 3 : 6 * case + 6]
        assert all(same(each, torch.cat(tensors[::-1])) for each in gathered), (dtype, shape)
        assert all(same(each, tensors[1]) for each in got), (dtype, shape)


def test_a_broadcast_of_a_number_without_dimensions(bench: Bench) -> None:
    ((*values,),) = bench.run(
        lambda actors, inp: broadcast.bind([actors[0].make.bind(inp, (), "int64"), *actors[1:]]), (3,)
    )
    assert values == [make(0, 3, (), "int64")] * 3


def test_buckets_of_several_dtypes_and_shapes(bench: Bench) -> None:
    layouts = [((3, 2), "float32"), ((5,), "int64"), ((), "float32"), ((4,), "float16"), ((2,), "int16")]

    def build(actors: list[Any], inp: Any) -> list[Any]:
        nodes = [[actor.make.bind(inp, shape, dtype) for shape, dtype in layouts] for actor in actors]
        rows = allreduce.bind(nodes)
        assert [len(row) for row in rows] == [len(layouts)] * NUM_ACTORS
        return [output for row in rows for output in row]

    for values in bench.run(build, (4, 4)):
        for rank in range(NUM_ACTORS):
            for index, (shape, dtype) in enumerate(layouts):
                wanted = expected_reduction(all_makes(4, shape, dtype), ReduceOp.SUM)
                assert same(values[rank * len(layouts) + index], wanted)


def test_tensors_that_do_not_lie_in_one_piece(bench: Bench) -> None:
    nodes = bench.run(
        lambda actors, inp: [
            *allreduce.bind([actor.transposed.bind(inp) for actor in actors[:2]]),
            *allgather.bind([actor.transposed.bind(inp) for actor in actors[:2]]),
            *broadcast.bind([actor.transposed.bind(inp) for actor in actors[:2]]),
        ],
        (1,),
    )[0]
    one = Maker(0).transposed(1)
    assert torch.equal(nodes[0], one + one)
    assert torch.equal(nodes[2], torch.cat([one, one]))
    assert torch.equal(nodes[5], one)
    assert not any(each.requires_grad for each in nodes)


def test_the_largest_and_the_smallest_of_a_nan_are_one(bench: Bench) -> None:
    cases = [(op, dtype) for op in ("max", "min") for dtype in ("float32", "bfloat16", "float64")]

    def build(actors: list[Any], inp: Any) -> list[Any]:
        return [
            reduced
            for op, dtype in cases
            for reduced in allreduce.bind([actor.with_nan.bind(inp, dtype) for actor in actors], op=op)
        ]

    for value in bench.run(build, (1,))[0]:
        assert value.isnan().tolist() == [False, True, True, False, False, False]
        assert value[[0, 3, 4, 5]].eq(1).all()


def test_inputs_are_never_changed(bench: Bench) -> None:
    def build(actors: list[Any], inp: Any) -> list[Any]:
        kept = [actor.keep.bind(inp) for actor in actors]
        after = allreduce.bind(kept, op="avg")
        return [actor.is_kept_as_it_was.bind(inp, value) for actor, value in zip(actors, after, strict=True)]

    for seed in (1, 2):
        assert bench.run(build, (seed,)) == [[True] * 3]


# One actor


@pytest.mark.parametrize("overlap", [False, True])
def test_a_collective_of_one_actor_gives_what_it_brings(bench: Bench, overlap: bool) -> None:
    """A reduction of one tensor is the tensor, whatever the operation; so is its only part, and all tensors together."""
    cases = [("float16", (6, 5)), ("bfloat16", (0,)), ("float32", ()), ("float64", (3,))]

    def build(actors: list[Any], inp: Any) -> list[Any]:
        outputs: list[Any] = []
        for dtype, shape in cases:
            node = actors[0].make.bind(inp, shape, dtype)
            outputs += [output for op in ReduceOp for output in allreduce.bind([node], op=op)]
            if shape:
                outputs += [*reducescatter.bind([node], op="max"), *allgather.bind([node])]
            outputs += broadcast.bind([node])
        return [*outputs, actors[1].whatever.bind(outputs[0])]

    for seed, (*values, elsewhere) in zip((1, 2), bench.run(build, (1, 2), overlap=overlap), strict=True):
        for dtype, shape in cases:
            wanted, num = make(0, seed, shape, dtype), len(ReduceOp) + (3 if shape else 1)
            assert all(same(each, wanted) for each in values[:num]), (dtype, shape)
            del values[:num]
        assert not values
        assert same(elsewhere, make(0, seed, (6, 5), "float16"))


def test_buckets_of_one_actor(bench: Bench) -> None:
    def build(actors: list[Any], inp: Any) -> list[Any]:
        first, second = (actors[1].make.bind(inp, (3,), dtype) for dtype in ("float32", "int64"))
        ((one,), (more, other), (again, last)) = (
            allreduce.bind(nodes)[0] for nodes in ([[first]], [[first, second]], [[first], [second]])
        )
        return [one, more, again, other, last]

    ((*values,),) = bench.run(build, (4,))
    assert all(same(each, make(1, 4, (3,), "float32")) for each in values[:3])
    assert all(same(each, make(1, 4, (3,), "int64")) for each in values[3:])


def test_what_one_actor_cannot_bring_is_an_error_and_the_graph_goes_on(bench: Bench) -> None:
    def build(actors: list[Any], inp: Any) -> list[Any]:
        return allreduce.bind([actors[0].fail_for.bind(inp, 2)])

    (first,), (failed,), (last,) = bench.run(build, (1, 2, 3))
    assert isinstance(failed, KeyError)
    assert all(same(value, make(0, seed, (4,), "float32")) for seed, value in ((1, first), (3, last)))


# What goes wrong


@pytest.mark.parametrize("overlap", [False, True])
def test_an_exception_upstream_reaches_all_and_the_graph_goes_on(bench: Bench, overlap: bool) -> None:
    def build(actors: list[Any], inp: Any) -> list[Any]:
        nodes = [actor.fail_for.bind(inp, 2 if rank == 1 else -1) for rank, actor in enumerate(actors)]
        return [*allreduce.bind(nodes), *broadcast.bind(nodes)]

    first, failed, last = bench.run(build, (1, 2, 3), overlap=overlap)
    assert all(isinstance(error, KeyError) and "seed 2 on 1" in str(error) for error in failed)
    for seed, values in ((1, first), (3, last)):
        wanted = expected_reduction(all_makes(seed, (4,), "float32"), ReduceOp.SUM)
        assert all(same(value, wanted) for value in values[:3])


@pytest.mark.parametrize("overlap", [False, True])
def test_a_tensor_that_does_not_fit_reaches_all_and_the_graph_goes_on(bench: Bench, overlap: bool) -> None:
    def build(actors: list[Any], inp: Any) -> list[Any]:
        return allreduce.bind([actor.of_length.bind(inp) for actor in actors])

    for seed, values in zip((0, 1, 2), bench.run(build, (0, 1, 2), overlap=overlap), strict=True):
        if seed % 2:
            names = [actor._info.id for actor in bench.actors]
            brings = "; ".join(f"{name} brings float32 ({4 + rank},)" for rank, name in enumerate(names))
            assert all(isinstance(error, ValueError) and brings in str(error) for error in values)
        else:
            assert all(torch.equal(value, torch.full((4,), 3.0)) for value in values)


@pytest.mark.parametrize(
    ("bind", "shape", "dtype", "kind", "says"),
    [
        (lambda nodes: allreduce.bind(nodes, op="avg"), (3,), "int32", TypeError, "no average"),
        (lambda nodes: allreduce.bind(nodes), (3,), "bool", TypeError, "not reduced"),
        (lambda nodes: reducescatter.bind(nodes), (4, 2), "float32", ValueError, "3 equal parts"),
        (lambda nodes: reducescatter.bind(nodes), (), "float32", ValueError, "unsqueeze"),
        (lambda nodes: allgather.bind(nodes), (), "float32", ValueError, "without dimensions"),
    ],
)
def test_what_cannot_be_done_says_so(
    bench: Bench, bind: Any, shape: Sequence[int], dtype: str, kind: type[Exception], says: str
) -> None:
    ((*errors,),) = bench.run(lambda actors, inp: bind([actor.make.bind(inp, shape, dtype) for actor in actors]), (1,))
    assert all(isinstance(error, kind) and says in str(error) and "hint: " in str(error) for error in errors)


def test_a_value_that_is_no_tensor_says_so(bench: Bench) -> None:
    ((*errors,),) = bench.run(lambda actors, inp: allreduce.bind([each.whatever.bind(inp) for each in actors]), ("x",))
    assert all(isinstance(error, TypeError) and "brings a str" in str(error) for error in errors)


def test_long_complaints_travel_whole(bench: Bench) -> None:
    """Longer than what a frame holds, as is the layout of forty tensors."""

    def build(actors: list[Any], inp: Any) -> list[Any]:
        rows = allreduce.bind([[actor.make.bind(inp, (2, k), "float32") for k in range(40)] for actor in actors])
        odd = [actor.make.bind(inp, (2,) * (9 + rank), "float64") for rank, actor in enumerate(actors)]
        return [rows[0][39], rows[1][1], *allreduce.bind(odd)]

    ((last, first, *errors),) = bench.run(build, (1,))
    assert same(last, expected_reduction(all_makes(1, (2, 39), "float32"), ReduceOp.SUM))
    assert same(first, expected_reduction(all_makes(1, (2, 1), "float32"), ReduceOp.SUM))
    assert all(str((2,) * 11) in str(error) for error in errors)


def test_without_torch_the_extra_is_named() -> None:
    code = (
        "import sys\n"
        "class NoTorch:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'torch': raise ImportError(name)\n"
        "sys.meta_path.insert(0, NoTorch())\n"
        "import crossfade\n"
        "crossfade.init(engine='inline')\n"
        "actors = [crossfade.remote(type('A', (), {'one': lambda self: 1})).remote() for _ in range(2)]\n"
        "nodes = crossfade.collective.allreduce.bind([actor.one.bind() for actor in actors])\n"
        "try:\n"
        "    crossfade.MultiOutputNode(nodes).compile()\n"
        "except crossfade.MissingDependency as error:\n"
        "    print(error.hint)\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert "crossfade[torch]" in ran.stdout


@pytest.mark.parametrize("overlap", [False, True])
def test_debug_mode_finds_a_result_that_was_changed(bench: Bench, overlap: bool) -> None:
    """Its actor changes it in one method and uses it in another."""

    def build(actors: list[Any], inp: Any) -> list[Any]:
        first, second = allreduce.bind([actor.make.bind(inp, (3,), "float32") for actor in actors[:2]])
        return [second, actors[0].spoil.bind(first), actors[0].whatever.bind(first)]

    ((whole, _, spoilt),) = bench.run(build, (1,), overlap=overlap, debug=True)
    assert same(whole, expected_reduction(all_makes(1, (3,), "float32")[:2], ReduceOp.SUM))
    assert isinstance(spoilt, crossfade.TaskError)
    assert "the value c0.0 of allreduce c0 was changed" in str(spoilt)
