"""The Ray engine: Ray places and watches the actors, crossfade moves the data.

An actor is a process that a Ray worker has started. It comes to the driver by `crossfade.engines.admission`, and from then on
everything is as with the local engine: the same messages, plans, rings and doorbells. What Ray is asked to do afterwards is to say
why something ended, to end it, or to restart it.

Two kinds of actors come. Those of ``@crossfade.remote`` classes are Ray actors of a class of ours: one of its methods holds the
main thread and serves there, and the user's object is made by our first message. Ray actors of the user's own, whose methods are in
a graph that is taken over, get a daemon thread that serves beside Ray's (`crossfade.engines.ray_graphs`).
"""

from __future__ import annotations

import inspect
import os
import queue
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from crossfade.engines import control
from crossfade.engines.admission import Admission, come_in
from crossfade.engines.agent import Agent
from crossfade.engines.far import FarHost, FarProcess, Told
from crossfade.engines.local import LocalEngine
from crossfade.engines.protocol import Places
from crossfade.engines.serving import exit_with, serve
from crossfade.errors import ActorDiedError, ActorError, ActorStartError, MissingDependency
from crossfade.host.doorbell import DEFAULT_SPIN_US
from crossfade.host.frames import new_key
from crossfade.host.tcp import let_nccl_meet_at, meet
from crossfade.types import DRIVER

_ADMISSION_S = 60.0
_MASK = "CUDA_VISIBLE_DEVICES"
_PASSED_ON = (
    "num_cpus",
    "num_gpus",
    "resources",
    "accelerator_type",
    "label_selector",
    "lifetime",
    "max_restarts",
    "memory",
    "namespace",
    "object_store_memory",
    "runtime_env",
    "scheduling_strategy",
)
"""Options of actors that are Ray's to see to."""


@dataclass(frozen=True, slots=True)
class Where:
    """Where Ray has placed an actor."""

    node: str  # Ray's id of the node
    address: str  # the node's IP address
    coroutines: frozenset[str] = frozenset()  # names of the actor's methods that are declared with ``async def``
    gpus: tuple[int, ...] = ()  # indices of the GPUs that Ray has given it, as its process counts them


class _Served:
    """The class of the Ray actors that run ``@crossfade.remote`` classes."""

    def crossfade_where(self) -> Where:
        """Asked first of all, before anything has started CUDA here: all GPUs of the host are to be seen, as by local actors, since
        memory of a GPU that is not seen cannot be opened.
        """
        where = _where(self)
        if all(each.isdigit() for each in os.environ.get(_MASK, "").split(",")):  # not names of GPUs, nor none at all
            os.environ.pop(_MASK, None)
        with suppress(OSError):  # no interface has it, behind a translation of addresses say: then NCCL chooses
            let_nccl_meet_at(where.address)
        return where

    def crossfade_serve(self, path: str, key: bytes, spin_us: float) -> None:
        """Holds the main thread until the actor is to stop, which ends the process."""
        import ray

        code = serve(come_in(path, key), spin_us)
        if code:
            exit_with(code)
        ray.actor.exit_actor()


class _AgentActor:
    """The class of the Ray actors in whose processes agents are."""

    def open(self, address: str, key: bytes) -> int:
        """The port at which the agent waits for the driver."""
        self._agent = Agent(address, key, lambda: exit_with(0))
        return self._agent.port


def _start_agent(where: Where, key: bytes) -> tuple[Any, int]:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    there = NodeAffinitySchedulingStrategy(where.node, soft=False)
    agent = ray.remote(_AgentActor).options(num_cpus=0, scheduling_strategy=there).remote()
    return agent, ray.get(agent.open.remote(where.address, key), timeout=_ADMISSION_S)


def _where(instance: object) -> Where:
    import ray

    context = ray.get_runtime_context()
    names = [name for name in dir(type(instance)) if inspect.iscoroutinefunction(getattr(type(instance), name))]
    ids = [str(each) for each in ray.get_gpu_ids()]
    gpus = sorted(int(each) if each.isdigit() else place for place, each in enumerate(ids))
    return Where(context.get_node_id(), ray.util.get_node_ip_address(), frozenset(names), tuple(gpus))


def _serve_beside(instance: object, path: str, key: bytes, spin_us: float) -> None:
    """In an actor of the user's: serves in a thread of its own, which does not keep the process from ending."""
    fds = come_in(path, key)
    threading.Thread(target=serve, args=(fds, spin_us, instance), name="crossfade-actor", daemon=True).start()


@dataclass(slots=True)
class _Launched:
    """An actor that was asked of Ray."""

    name: str
    handle: Any
    first: control.Create
    is_borrowed: bool = False  # an actor of the user's
    can_restart: bool = False
    where: Where | None = None
    has_come: threading.Event = field(default_factory=threading.Event)
    error: BaseException | None = None

    def ask_where(self) -> Any:
        """Ray answers once the actor is there, also where it is being restarted: then it asks again by itself."""
        again = {"max_task_retries": -1 if self.can_restart else 0}
        if self.is_borrowed:
            return self.handle.__ray_call__.options(**again).remote(_where)
        return self.handle.crossfade_where.options(**again).remote()

    def ask_to_come(self, path: str, key: bytes, spin_us: float) -> Any:
        if self.is_borrowed:
            return self.handle.__ray_call__.options(max_task_retries=0).remote(_serve_beside, path, key, spin_us)
        return self.handle.crossfade_serve.remote(path, key, spin_us)


class RayEngine(LocalEngine):
    """Runs actors in Ray's workers. Ray is running; it is ended with the engine where ``owns_ray``."""

    name = "ray"
    places_actors = True

    def __init__(self, *, spin_us: float = DEFAULT_SPIN_US, owns_ray: bool = False) -> None:
        super().__init__(spin_us=spin_us, log_to_driver=False)
        self._owns_ray = owns_ray
        self._launched: dict[str, _Launched] = {}  # by the actor's name
        self._asked: queue.SimpleQueue[tuple[_Launched, Any] | None] = (
            queue.SimpleQueue()
        )  # that Ray has placed, or not
        self._restarting = threading.RLock()
        self._names: dict[str, str] = {}  # of actors of the user's, by their ids in Ray
        self._own = _where(self)
        self._hosts = {self._own.node: self._own.address}  # names of hosts, by Ray's ids of their nodes
        self.processes.addresses[self._own.address] = self._own.address
        self._agents: dict[str, Any] = {}  # handles, by the host's name
        self.processes.settle = self._settle
        self._placing = threading.Thread(target=self._place_all, name="crossfade-placing", daemon=True)
        self._placing.start()

    # Starting

    def _start(self, first: control.Create, options: Mapping[str, Any]) -> None:
        import ray

        passed = {name: options[name] for name in _PASSED_ON if options.get(name) is not None}
        can_restart = bool(passed.get("max_restarts"))
        handle = ray.remote(_Served).options(**passed).remote()
        self._launch(_Launched(first.actor, handle, first, can_restart=can_restart))

    def name_of(self, key: str) -> str | None:
        """What a Ray actor of the user's is called here, if it is known; ``key`` is its id in Ray."""
        return self._names.get(key)

    def where(self, actor: str) -> Where:
        """Where an actor is, and what it said of itself; waits until it has come."""
        self.processes.process(actor)
        where = self._launched[actor].where
        assert where is not None
        return where

    def adopt(self, key: str, name: str, handle: Any) -> None:
        """Makes a Ray actor of the user's one of ours, under a name. Does nothing if it is one already."""
        self._names[key] = name
        if name not in self._launched:
            self._launch(_Launched(name, handle, control.Create(name, b""), is_borrowed=True, can_restart=True))

    def _launch(self, launched: _Launched) -> None:
        self._launched[launched.name] = launched
        launched.error = None
        launched.has_come.clear()
        launched.ask_where().future().add_done_callback(lambda future: self._asked.put((launched, future)))

    def _place_all(self) -> None:
        """In a thread: takes actors on as Ray places them, one after the other."""
        while (placed := self._asked.get()) is not None:
            launched, future = placed
            try:
                launched.where = future.result()
                if not launched.is_borrowed:
                    launched.first = replace(launched.first, gpus=launched.where.gpus)
                self._take_on(launched)
            except Exception as error:  # whatever it was, others wait for the actor
                launched.error = error
            launched.has_come.set()

    def _take_on(self, launched: _Launched) -> None:
        key = new_key()
        where = launched.where
        assert where is not None
        if where.node != self._own.node:
            self._take_on_far(launched, where, key)
            return
        with Admission(key) as admission:
            reference = launched.ask_to_come(admission.path, key, self.processes.spin_us)
            self.processes.start(
                launched.name,
                launched.first,
                lambda fds: admission.admit(
                    fds,
                    _raise_if_failed(reference),
                    _ADMISSION_S,
                    is_borrowed=launched.is_borrowed,
                    where=f" on {self._hosts[where.node]}",
                ),
            )

    def _take_on_far(self, launched: _Launched, where: Where, key: bytes) -> None:
        host = self._far_host(where)
        process = FarProcess(launched.name, host, is_borrowed=launched.is_borrowed)
        self.processes.take_on_far(process)
        try:
            path = host.take_in(process, launched.first, key)
            reference = launched.ask_to_come(path, key, self.processes.spin_us)
            host.await_taken_in(process, _raise_if_failed(reference))
        except Exception as error:
            process.fate.end = process.fate.end or f"it did not come: {error}"
            self.processes.ended(process)
            raise

    def _far_host(self, where: Where) -> FarHost:
        """The host of a node, with an agent there; made when the first of its actors comes. Only the placing thread calls this."""
        processes = self.processes
        name = self._hosts.get(where.node)
        if name is not None and name in processes.far_hosts:
            return processes.far_hosts[name]
        if name is None:  # nodes of one machine have one address
            name = where.address if where.address not in self._hosts.values() else f"{where.address}-{where.node[:6]}"
            self._hosts[where.node] = name
        processes.addresses[name] = where.address
        key = new_key()
        agent, port = _start_agent(where, key)
        stream = meet(where.address, port, key, DRIVER, _ADMISSION_S)
        told = Told(processes.took, processes.ended, self._lost, processes.ending)
        host = FarHost(name, stream, key, processes.doorbell, told)
        self._agents[name] = agent
        host.align_clocks()
        processes.far_hosts[name] = host
        return host

    def _lost(self, host: FarHost) -> None:
        """A host is gone; the next actor on its node needs another agent."""
        self.processes.far_hosts.pop(host.name, None)

    def places(self, actors: Sequence[str]) -> Places:
        hosts = {DRIVER: self._hosts[self._own.node]}
        hosts |= {actor: self._hosts[self.where(actor).node] for actor in actors}
        gpus = {actor: launched.first.gpus for actor in actors if (launched := self._launched[actor]).first.gpus}
        return Places(hosts if len(set(hosts.values())) > 1 else {}, gpus)

    def _settle(self, actor: str) -> None:
        """Waits until an actor has come, also one that Ray is restarting. An `ActorError` if it does not."""
        launched = self._launched.get(actor)
        if launched is None:
            return
        launched.has_come.wait()
        if self._must_restart(launched):
            with self._restarting:  # only one of several threads that find it ended starts it again
                if launched.has_come.is_set() and self._must_restart(launched):
                    self._launch(launched)
            launched.has_come.wait()
        if launched.error is not None:
            raise _start_error(launched) from launched.error

    def _must_restart(self, launched: _Launched) -> bool:
        return launched.error is None and launched.can_restart and self.processes.has_ended(launched.name)

    # Ending

    def has_ended(self, actor: str) -> bool:
        launched = self._launched.get(actor)
        if launched is None or not launched.has_come.is_set():
            return launched is None
        return launched.error is not None or super().has_ended(actor)

    def hear_of_deaths(self, actors: Iterable[str]) -> None:
        """Asks Ray, once for each, whether these actors live; those that do not are lost at once. Their processes end later: 60 ms
        after ``ray.kill`` has returned.
        """
        import ray
        from ray._private import state  # ray.util.state needs the dashboard

        ray.util.list_named_actors()  # it goes the way of ray.kill: once it is answered, Ray knows what was killed before
        for actor in actors:
            launched, process = self._launched[actor], self.processes.living.get(actor)
            told = state.actors(launched.handle._actor_id.hex())
            if process is not None and launched.where is not None and told.get("State") in ("DEAD", "RESTARTING"):
                cause = told.get("DeathCause")
                why = cause.actor_died_error_context.error_message if cause else f"it is {told['State']}"
                process.fate.end = process.fate.end or f"on {self._hosts[launched.where.node]}, by what Ray says: {why}"
                self.processes.ended(process)

    def kill(self, actor: str) -> None:
        launched = self._launched[actor]
        launched.can_restart = False
        self._kill(launched.handle)
        launched.has_come.wait()
        super().kill(actor)

    def _kill(self, handle: Any) -> None:
        import ray

        if ray.is_initialized():
            with suppress(ray.exceptions.RayError, ValueError):  # it does not know it any more
                ray.kill(handle, no_restart=True)

    def close(self) -> None:
        super().close()
        self._asked.put(None)
        if self._owns_ray:
            import ray

            ray.shutdown()

    def _abandon(self) -> None:
        super()._abandon()
        for launched in list(self._launched.values()):
            if not launched.is_borrowed:
                self._kill(launched.handle)
        for agent in self._agents.values():
            self._kill(agent)


def _raise_if_failed(reference: Any) -> Callable[[], None]:
    def check() -> None:
        import ray

        if ray.wait([reference], timeout=0)[0]:
            ray.get(reference)

    return check


def _start_error(launched: _Launched) -> ActorError:
    cause = launched.error
    if isinstance(cause, ActorError):
        return cause
    words = str(cause).strip().split("\n")
    kind = ActorDiedError if launched.where is not None else ActorStartError
    reason = " ".join(words[:3])
    return kind(f"actor {launched.name} could not be reached in its Ray worker: {reason}", actor=launched.name)


def is_running() -> bool:
    """Whether this program has called ``ray.init()``."""
    import ray

    return bool(ray.is_initialized())


def start_ray(options: Mapping[str, Any]) -> bool:
    """Starts Ray, or joins the cluster at ``address``, unless the program has; returns whether it was done here."""
    try:
        import ray
    except ModuleNotFoundError as error:
        raise MissingDependency("ray", extra="ray", needed_for="engine='ray'") from error
    if ray.is_initialized():
        return False
    ray.init(**options)
    return True
