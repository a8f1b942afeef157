"""Files of figures that users hand to commands: descriptions of clusters, cost models, workloads."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from crossfade.cli.exits import UsersMistake, told
from crossfade.schedule.cost import CostModel
from crossfade.schedule.workload import Workload
from crossfade.topology import Topology

__all__ = ["read_cluster", "read_figures"]

_Figures = TypeVar("_Figures", Topology, CostModel, Workload)


def read_figures(kind: type[_Figures], path: Path) -> _Figures:
    """Reads what ``to_json`` of such figures wrote, or a person did."""
    with told(f"cannot read {path}", hint="name a file that exists"):
        text = path.read_text(encoding="utf-8", errors="replace")
    try:
        return kind.from_json(text)
    except ValueError as error:
        message, _, hint = str(error).partition("\nhint: ")
        raise UsersMistake(f"{path}: {message}", hint=hint or "the file is JSON") from None


def read_cluster(path: Path) -> Topology:
    """Reads the description of a cluster. One of a single host's links describes no hosts, and is refused."""
    found = read_figures(Topology, path)
    if not found.hosts:
        raise UsersMistake(
            f"{path} describes no hosts",
            hint="add 'hosts' to it, as docs/clusters.md shows; what was measured stands for each",
        )
    return found
