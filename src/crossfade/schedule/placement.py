"""Which host of a described cluster each actor is on, and which GPUs it has there.

Actors come in the order in which they were made. The first pattern of the placement that fits an actor's name says which hosts it
may be on, else all may; among these its rule decides (`crossfade.cluster.Rule`). A host has room for an actor with GPUs while it
has as many free, for one without while it has a core that no actor without GPUs has; where all cores are taken, the host with the
fewest such actors for each core takes it. Actors that booked parts of one GPU share one in the cluster too. The driver is on the
first host unless the placement says another one, and takes no room.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from crossfade.cluster import Cluster, Host, Placement, Places, Rule
from crossfade.errors import GraphError
from crossfade.hints import nearest
from crossfade.topology import Topology
from crossfade.types import DRIVER


def place(topology: Topology, actors: Mapping[str, Sequence[int]]) -> Places:
    """Places the actors. ``actors`` has the GPUs that each has booked, by any numbers: equal ones are one GPU. Raises a
    `GraphError`, if no host has room for an actor, or a pattern of the placement fits no actor or no host.
    """
    found = _Placing(topology.cluster, topology.placement)
    _check_patterns(topology, [DRIVER, *actors])
    hosts = {DRIVER: found.candidates(DRIVER)[0].name}
    for actor, booked in actors.items():
        hosts[actor] = found.place(actor, booked).name
    return Places(
        hosts, {actor: tuple(found.gpus[each] for each in booked) for actor, booked in actors.items() if booked}
    )


def _check_patterns(topology: Topology, parties: Sequence[str]) -> None:
    names = list(topology.cluster.by_name)
    for actor, host in topology.placement.hosts.items():
        for what, pattern, known in (("actor", actor, parties), ("host", host, names)):
            if not any(fnmatchcase(name, pattern) for name in known):
                few = f"the {what}s are {', '.join(known[:6])}" + (", ..." if len(known) > 6 else "")
                raise GraphError(
                    f"placement.hosts names {pattern!r}, and no {what} is called so", hint=nearest(pattern, known, few)
                )


@dataclass
class _Placing:
    cluster: Cluster
    placement: Placement
    gpus: dict[int, int] = field(default_factory=dict)  # by the booked number
    num_taken: Counter[str] = field(default_factory=Counter)  # GPUs, of each host
    num_actors: Counter[str] = field(default_factory=Counter)  # of each host
    num_on_cores: Counter[str] = field(default_factory=Counter)  # actors without GPUs, of each host
    # by pattern of hosts, those that fit, and how many of them are full for actors with GPUs and without.
    fitting: dict[str, list[Host]] = field(default_factory=dict)
    num_full: Counter[tuple[str, bool]] = field(default_factory=Counter)

    def candidates(self, actor: str) -> list[Host]:
        """The hosts on which an actor may be."""
        return self._fitting(self._pattern(actor))

    def _pattern(self, actor: str) -> str:
        given = self.placement.hosts
        return next((host for pattern, host in given.items() if fnmatchcase(actor, pattern)), "*")

    def _fitting(self, pattern: str) -> list[Host]:
        if pattern not in self.fitting:
            self.fitting[pattern] = [host for host in self.cluster.hosts if fnmatchcase(host.name, pattern)]
        return self.fitting[pattern]

    def place(self, actor: str, booked: Sequence[int]) -> Host:
        """Finds a host, and takes room there."""
        known = {self.cluster.of_gpu[self.gpus[each]].name for each in booked if each in self.gpus}
        new = [each for each in booked if each not in self.gpus]
        pattern = self._pattern(actor)
        may = [host for host in self._fitting(pattern) if not known or {host.name} == known]
        host = self._choose(may, (pattern, bool(booked)), len(new))
        if host is None:
            raise GraphError(
                f"no host has room for {actor}, which asks for {len(booked)} GPUs: "
                f"{len(self.cluster.of_gpu)} GPUs on {len(self.cluster.hosts)} hosts",
                hint="all GPUs of an actor are on one host; describe more hosts, or change the placement",
            )
        self._take(host, new, has_gpus=bool(booked))
        return host

    def _choose(self, may: Sequence[Host], kind: tuple[str, bool], num_gpus: int) -> Host | None:
        has_gpus = kind[1]
        if self.placement.rule is Rule.PACK:
            # Hosts that are full stay full, so that each is passed once.
            while self.num_full[kind] < len(may) and not self._has_room(may[self.num_full[kind]], has_gpus, 1):
                self.num_full[kind] += 1
            found = next(
                (host for host in may[self.num_full[kind] :] if self._has_room(host, has_gpus, num_gpus)), None
            )
        else:
            roomy = [host for host in may if self._has_room(host, has_gpus, num_gpus)]
            found = min(roomy, key=lambda host: self.num_actors[host.name], default=None)
        if found is None and not has_gpus:
            return min(may, key=lambda host: self.num_on_cores[host.name] / host.group.num_cores, default=None)
        return found

    def _has_room(self, host: Host, has_gpus: bool, num_gpus: int) -> bool:
        if has_gpus:
            return self.num_taken[host.name] + num_gpus <= host.group.num_gpus
        return self.num_on_cores[host.name] < host.group.num_cores

    def _take(self, host: Host, new: Sequence[int], *, has_gpus: bool) -> None:
        for each in new:
            self.gpus[each] = host.first_gpu + self.num_taken[host.name]
            self.num_taken[host.name] += 1
        self.num_actors[host.name] += 1
        self.num_on_cores[host.name] += not has_gpus
