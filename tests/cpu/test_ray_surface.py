"""Programs in Ray Compiled Graph's documented style, with nothing but their imports changed and without a ``__main__`` guard."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.helpers.programs import environment, python
from tests.helpers.sessions import TORCH
from tests.helpers.two_at_a_time import Ran, two_at_a_time
from tests.helpers.warm import warm_python

HEAD = """
import crossfade as ray
import numpy as np
from crossfade.dag import InputNode, MultiOutputNode


@ray.remote
class Worker:
    def __init__(self, offset=0):
        self.offset = offset

    def echo(self, x):
        return x

    def add(self, x):
        return x + self.offset

    def inc(self, x):
        return x + 1

    def sum(self, *values):
        return sum(values)

    def scale(self, x, factor=1, *, shift=0):
        return factor * x + shift

    @ray.method(num_returns=2)
    def divide(self, x, y):
        return divmod(x, y)

    def fail(self, x):
        raise ValueError(f"no {x} here")

    def sleep(self, seconds):
        import time

        time.sleep(seconds)
        return seconds

    def ones(self, n):
        import torch

        return torch.ones(n)

    def total(self, *tensors):
        return float(sum(tensor.sum() for tensor in tensors))

    def array(self, n):
        return np.ones(n)
"""

FORMS = {
    "a_single_actor": """
ray.init(num_cpus=4, ignore_reinit_error=True)
worker = Worker.remote()
with InputNode() as inp:
    dag = worker.echo.bind(inp)
dag = dag.experimental_compile()
for i in range(10):
    assert ray.get(dag.execute(i)) == i
dag.teardown()
ray.shutdown()
""",
    "fan_out": """
workers = [Worker.remote(offset) for offset in range(3)]
with InputNode() as inp:
    dag = MultiOutputNode([worker.add.bind(inp) for worker in workers])
compiled_dag = dag.experimental_compile()
for i in range(3):
    assert ray.get(compiled_dag.execute(i)) == [i, i + 1, i + 2]
compiled_dag.teardown()
""",
    "fan_in": """
workers = [Worker.remote(offset) for offset in range(3)]
collector = Worker.remote()
with InputNode() as inp:
    dag = collector.sum.bind(*[worker.add.bind(inp) for worker in workers])
compiled_dag = dag.experimental_compile()
assert ray.get(compiled_dag.execute(10)) == 33
""",
    "multi_output": """
worker = Worker.remote()
with InputNode() as inp:
    quotient, rest = worker.divide.bind(inp, 3)
    dag = MultiOutputNode([quotient, rest, worker.inc.bind(rest)])
compiled_dag = dag.experimental_compile()
refs = compiled_dag.execute(11)
assert isinstance(refs, list) and ray.get(refs) == [3, 2, 3]
quotient, rest = worker.divide.options(num_returns=2).remote(7, 2)
assert ray.get([quotient, rest]) == [3, 1]
""",
    "input_attributes": """
a, b = Worker.remote(), Worker.remote()
with InputNode() as inp:
    dag = MultiOutputNode([a.inc.bind(inp[0]), b.inc.bind(inp.x), b.echo.bind(inp["y"])])
compiled_dag = dag.experimental_compile()
assert ray.get(compiled_dag.execute(1, x=2, y=3)) == [2, 3, 3]
with InputNode() as inp:
    dag = MultiOutputNode([a.inc.bind(inp[0]), b.inc.bind(inp[1])])
with dag.experimental_compile() as compiled_dag:
    assert ray.get(compiled_dag.execute((4, 5))) == [5, 6]
""",
    "exceptions": """
from crossfade.exceptions import RayError, RayTaskError

a, b = Worker.remote(), Worker.remote()
with InputNode() as inp:
    dag = MultiOutputNode([b.inc.bind(a.fail.bind(inp)), b.inc.bind(inp)])
compiled_dag = dag.experimental_compile()
bad, good = compiled_dag.execute(1)
for kind in (ValueError, RayTaskError, RayError, ray.exceptions.RayTaskError):
    try:
        ray.get(bad)
    except kind as error:
        assert "no 1 here" in str(error)
    else:
        raise AssertionError(kind)
assert ray.get(good) == 2
assert ray.get(compiled_dag.execute(5)[1]) == 6
""",
    "a_dead_actor": """
from crossfade.exceptions import ActorDiedError, RayActorError

worker = Worker.remote()
with InputNode() as inp:
    compiled_dag = worker.echo.bind(inp).experimental_compile()
assert ray.get(compiled_dag.execute(1)) == 1
ray.kill(worker)
for kind in (RayActorError, ActorDiedError):
    try:
        ray.get(compiled_dag.execute(1))
    except kind as error:
        assert "Worker0" in str(error) and "SIGKILL" in str(error)
    else:
        raise AssertionError(kind)
""",
    "overlap_arguments": """
a, b = Worker.remote(), Worker.remote(1)
with InputNode() as inp:
    dag = b.add.bind(a.inc.bind(inp))
for overlap in (False, True):
    compiled_dag = dag.experimental_compile(
        _submit_timeout=10, _buffer_size_bytes=1000000, enable_asyncio=False, _max_inflight_executions=5,
        _max_buffered_results=1000, _overlap_gpu_communication=overlap, _default_communicator="create")
    assert ray.get([compiled_dag.execute(i) for i in range(5)]) == [2, 3, 4, 5, 6]
    compiled_dag.teardown()
dag.experimental_compile(enable_asyncio=True).teardown(kill_actors=True)
""",
    "two_graphs_on_shared_actors": """
a, b = Worker.remote(), Worker.remote(10)
with InputNode() as inp:
    first = b.add.bind(a.inc.bind(inp)).experimental_compile()
with InputNode() as inp:
    second = a.inc.bind(b.add.bind(inp)).experimental_compile()
refs = [(first.execute(i), second.execute(i)) for i in range(5)]
assert [ray.get(list(pair)) for pair in refs] == [[i + 11, i + 11] for i in range(5)]
first.teardown()
assert ray.get(second.execute(1)) == 12
assert ray.get(a.inc.remote(1)) == 2
""",
    "with_tensor_transport": """
from crossfade.experimental.channel.torch_tensor_type import TorchTensorType

a, b = Worker.remote(), Worker.remote()
with InputNode() as inp:
    dag = b.total.bind(a.ones.bind(inp).with_tensor_transport())
assert ray.get(dag.experimental_compile().execute(10)) == 10.0
with InputNode() as inp:
    dag = b.total.bind(a.ones.bind(inp).with_tensor_transport(transport="shm", _static_shape=True, _direct_return=True))
assert ray.get(dag.experimental_compile().execute(20)) == 20.0
with InputNode() as inp:
    dag = b.total.bind(a.ones.bind(inp).with_type_hint(TorchTensorType(transport="auto", _static_shape=True)))
assert ray.get(dag.experimental_compile().execute(30)) == 30.0
""",
    "kwargs": """
worker = Worker.remote()
with InputNode() as inp:
    dag = worker.scale.bind(inp.x, factor=inp.k, shift=worker.inc.bind(inp.x))
compiled_dag = dag.experimental_compile()
assert ray.get(compiled_dag.execute(x=2, k=10)) == 23
""",
    "get_with_a_list": """
worker = Worker.remote()
with InputNode() as inp:
    compiled_dag = worker.inc.bind(inp).experimental_compile(_max_inflight_executions=4)
refs = [compiled_dag.execute(i) for i in range(4)]
assert ray.get(refs, timeout=30) == [1, 2, 3, 4]
assert ray.get([refs[2], worker.inc.remote(9), ray.put("x")]) == [3, 10, "x"]
""",
    "timeouts": """
from crossfade.exceptions import GetTimeoutError, RayChannelTimeoutError, RayCgraphCapacityExceeded

worker = Worker.remote()
with InputNode() as inp:
    compiled_dag = worker.sleep.bind(inp).experimental_compile(_submit_timeout=0.05, _max_inflight_executions=2)
ref = compiled_dag.execute(1.5)
try:
    ray.get(ref, timeout=0.01)
except RayChannelTimeoutError as error:
    assert isinstance(error, TimeoutError)
else:
    raise AssertionError
second = compiled_dag.execute(0.01)
try:
    compiled_dag.execute(0)
except RayCgraphCapacityExceeded:
    pass
else:
    raise AssertionError
assert ray.get(ref) == 1.5 and ray.get(ref) == 1.5 and ray.get(second) == 0.01
del ref, second
compiled_dag.execute(1.5), compiled_dag.execute(0)
try:
    compiled_dag.execute(0)  # no room, and nobody wants the results in the way
except RayChannelTimeoutError:
    pass
else:
    raise AssertionError
slow = worker.sleep.remote(1.5)
try:
    ray.get(slow, timeout=0.01)
except GetTimeoutError:
    assert ray.get(slow) == 1.5
""",
    "an_event_loop": """
import asyncio

worker = Worker.remote(3)
with InputNode() as inp:
    dag = worker.add.bind(inp)
compiled_dag = dag.experimental_compile(enable_asyncio=True)

async def main():
    fut = await compiled_dag.execute_async(1)
    assert await fut == 4
    futs = [await compiled_dag.execute_async(i) for i in range(20)]
    assert await asyncio.gather(*futs) == [i + 3 for i in range(20)]

asyncio.run(main())
compiled_dag.teardown()
""",
    "collective": """
import torch
from crossfade.experimental import collective
from crossfade.experimental.channel.torch_tensor_type import TorchTensorType
from crossfade.experimental.util.types import ReduceOp


@ray.remote
class Trainer:
    def __init__(self, rank):
        self.rank = rank

    def grad(self, x):
        return torch.full((4,), float(x + self.rank))

    def norm(self, tensor):
        return float(tensor.sum())

trainers = [Trainer.remote(rank) for rank in range(2)]
assert ray.get([trainer.__ray_ready__.remote() for trainer in trainers], timeout=-1) == [True, True]
with InputNode() as inp:
    grads = [trainer.grad.bind(inp) for trainer in trainers]
    reduced = collective.allreduce.bind(grads, ReduceOp.SUM)
    reduced = collective.allreduce.bind(reduced, ReduceOp.MAX, transport=TorchTensorType(TorchTensorType.CPU))
    reduced = collective.allreduce.bind(reduced, ReduceOp.MAX, transport=TorchTensorType.CPU)
    dag = MultiOutputNode([trainer.norm.bind(value) for trainer, value in zip(trainers, reduced)])
compiled_dag = dag.experimental_compile()
assert ray.get(compiled_dag.execute(10)) == [84.0, 84.0]
compiled_dag.teardown()
""",
    "named_actors_put_and_wait": """
Worker.options(name="counter", namespace="tests", lifetime="detached").remote(7)
handle = ray.get_actor("counter", namespace="tests")
assert isinstance(handle, ray.actor.ActorHandle)
value = ray.put(np.arange(100_000))
assert ray.get(handle.add.remote(value))[0] == 7
refs = [handle.inc.remote(i) for i in range(4)]
ready, rest = ray.wait(refs, num_returns=4, timeout=30)
assert ray.get(ready) == [1, 2, 3, 4] and not rest
ray.kill(handle, no_restart=True)
try:
    ray.get_actor("counter")
except ValueError as error:
    assert "counter" in str(error)
else:
    raise AssertionError
""",
    "types_for_annotations": """
from crossfade.actor import ActorClass, ActorHandle, ActorMethod
from crossfade.dag import ClassMethodNode, CompiledDAG, DAGNode, InputAttributeNode
from crossfade.experimental.compiled_dag_ref import CompiledDAGRef

worker = Worker.remote()
assert isinstance(Worker, ActorClass) and isinstance(worker, ActorHandle) and isinstance(worker.inc, ActorMethod)
with InputNode() as inp:
    dag = worker.inc.bind(inp.x)
assert isinstance(dag, ClassMethodNode) and isinstance(dag, DAGNode) and isinstance(inp.x, InputAttributeNode)
compiled_dag = dag.experimental_compile()
assert isinstance(compiled_dag, CompiledDAG)
ref = compiled_dag.execute(x=1)
assert isinstance(ref, CompiledDAGRef) and ref.get() == 2
""",
}


def run(form: str, folder: Path) -> subprocess.CompletedProcess[str]:
    script = folder / f"{form}.py"
    script.write_text(f"{HEAD}\n{FORMS[form]}\nprint('done')\n")
    if not (TORCH and "torch" in FORMS[form]):
        return python(str(script), timeout_s=90)
    variables = environment(CROSSFADE_PRELOAD=",".join(TORCH))
    return warm_python(TORCH, str(script), cwd=folder, env=variables, timeout_s=90)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ran]:
    folder = tmp_path_factory.mktemp("forms")
    with two_at_a_time({form: partial(run, form, folder) for form in sorted(FORMS)}) as ran:
        yield ran


@pytest.mark.parametrize("form", sorted(FORMS))
def test_a_program_in_rays_style_runs(form: str, runs: Ran) -> None:
    done = runs[form].result()
    assert done.returncode == 0, done.stderr
    assert done.stdout == "done\n"
    assert done.stderr == ""
