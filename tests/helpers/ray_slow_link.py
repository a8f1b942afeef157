"""What the Ray engine does over a slow link that loses packets (`tests.helpers.ray_two_hosts`), printed as JSON."""

from __future__ import annotations

import json
import os
import time
from random import Random
from typing import Any

import numpy as np

import crossfade
from crossfade.errors import ActorDiedError
from tests.helpers.ray_apart import Worker as Apart
from tests.helpers.ray_two_hosts import Hosts, place

_NUM = 60


class Worker(Apart):
    def pid(self) -> int:
        return os.getpid()


def main(hosts: Hosts) -> None:
    said: dict[str, Any] = {}
    with hosts.ray() as ray:
        actor = crossfade.remote(Worker)
        near, far = (actor.options(scheduling_strategy=place(ray, host)).remote() for host in (0, 1))
        with crossfade.InputNode() as inp:
            back = near.same.bind(far.same.bind(near.same.bind(inp)))
            graph = crossfade.MultiOutputNode([back, far.first.bind(inp)]).compile(max_inflight=5)
        crossfade.get(graph.execute(np.zeros(1)))
        start = time.monotonic()
        crossfade.get(graph.execute(np.zeros(1)))
        said["taken_s"] = time.monotonic() - start
        random = Random(0)
        values = [np.full(random.choice((1, 100, 10_000, 100_000)), number) for number in range(_NUM)]
        pending: list[tuple[Any, Any]] = []
        said["num_right"] = 0
        for value in values:
            if len(pending) == 5:
                said["num_right"] += _is_right(*pending.pop(0))
            pending.append((value, graph.execute(value)))
        said["num_right"] += sum(_is_right(*each) for each in pending)
        with crossfade.InputNode() as inp:
            reduced = crossfade.collective.allreduce.bind([each.ones.bind(inp) for each in (near, far)])
            sums = [each.sum.bind(one) for each, one in zip((near, far), reduced, strict=True)]
            with crossfade.MultiOutputNode(sums).compile() as reducing:
                said["reduced"] = [crossfade.get(reducing.execute(number)) for number in (1, 1000, 100_000)]
        said["num_sent_again"] = _num_sent_again()
        os_pid = crossfade.get(far.pid.remote())
        assert hosts.tell(f"kill {os_pid}") == "killed"
        start = time.monotonic()
        try:
            while time.monotonic() - start < 60:
                crossfade.get(graph.execute(np.zeros(1)))
        except ActorDiedError as error:
            said["death"] = str(error), time.monotonic() - start
    print(json.dumps(said), flush=True)


def _num_sent_again() -> int:
    """TCP's segments that had to be sent again from this host: without losses there are none."""
    with open("/proc/net/snmp") as file:
        names, numbers = (line.split() for line in file if line.startswith("Tcp:"))
    return int(numbers[names.index("RetransSegs")])


def _is_right(value: Any, references: Any) -> bool:
    back, first = crossfade.get(references)
    return bool(np.array_equal(back, value) and first == value[0])
