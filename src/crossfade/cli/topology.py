"""``crossfade topology``: measures the links between this host's GPUs, and shows what was measured."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from crossfade.cli.exits import UsersMistake, told
from crossfade.cli.measure import show_us
from crossfade.cli.shown import new_progress, new_table
from crossfade.errors import DeviceError, MissingDependency
from crossfade.profile.calibrate import calibrate, start_from
from crossfade.profile.crew import Crew, Processes
from crossfade.profile.steps import TRANSPORTS, steps_for
from crossfade.topology import Crowd, Link, Topology, load_topology, save_topology, topology_path

BAR_WIDTH = 12
_EIGHTHS = " ▏▎▍▌▋▊▉"


def measure_topology(path: Path | None, limit_s: float) -> None:
    """Measures, keeps the figures, and prints them. No step begins after ``limit_s``. ``path`` is None for the usual file."""
    from crossfade.device.capabilities import judge, read_facts, read_topology, require

    if find_spec("torch") is None:
        raise MissingDependency("torch", extra="gpu", needed_for="measuring GPUs")
    if path is not None and not path.parent.is_dir():
        raise UsersMistake(f"there is no folder {path.parent}", hint="name a file in a folder that exists")
    require(judge(read_facts({})))  # the processes have an environment of their own
    found = read_topology()
    run_steps(Console(highlight=False), found, Processes(len(found.devices)), path, limit_s)


def run_steps(console: Console, found: Topology, crew: Crew, path: Path | None, limit_s: float) -> None:
    """Runs a calibration with a progress bar; after each step the file has all that was measured until then."""
    is_device = path is not None and path.exists() and not path.is_file()  # reading from a pipe or terminal may not end
    topology, steps = start_from(found, None if is_device else load_topology(path)), steps_for(found)
    problems: list[str] = []
    with new_progress(console, "measuring") as bars:
        task = bars.add_task("starting", total=len(steps))
        running = calibrate(
            topology, steps, crew, limit_s=limit_s, before=lambda step: bars.update(task, description=str(step))
        )
        with contextlib.closing(running):
            for progress in running:
                topology = progress.topology
                bars.update(task, completed=progress.num_done)
                if progress.problem:
                    problems.append(f"{progress.step}: {progress.problem}")
                else:
                    _save(topology, path)
    for problem in problems:
        console.print(f"not measured: {problem}", markup=False)
    if len(problems) == len(steps):
        raise DeviceError("nothing could be measured", hint="the lines above say why")
    show_topology(console, topology)
    console.print(f"written to {path or topology_path()}", soft_wrap=True, markup=False)


def _save(topology: Topology, path: Path | None) -> None:
    try:
        with told(f"cannot write {path or topology_path()}", hint="name another file with --json"):
            save_topology(topology, path)
    except RuntimeError as error:
        raise UsersMistake(
            f"there is no folder to keep the topology in: {error}",
            hint="name a file with --json, or set CROSSFADE_CACHE_DIR",
        ) from None


def show_file(path: Path) -> None:
    """Prints a topology that was written."""
    try:
        with told(f"cannot read {path}", hint="`crossfade topology --json FILE` writes one"):
            topology = Topology.from_json(path.read_text(encoding="utf-8"))
    except ValueError as error:
        message = str(error).partition("\n")[0]
        raise UsersMistake(f"{path}: {message}", hint="`crossfade topology --json FILE` writes a new one") from None
    show_topology(Console(highlight=False), topology)


def bar(share: float, width: int = BAR_WIDTH) -> str:
    """A bar for a share of 1, in eighths of a letter."""
    eighths = round(max(0.0, min(1.0, share)) * width * 8)
    full, rest = divmod(eighths, 8)
    return ("█" * full + (_EIGHTHS[rest] if rest else "")).ljust(width)


def show_topology(console: Console, topology: Topology) -> None:
    """Prints what is known: the devices, then a table of each kind of figure that there is."""
    for table in (
        _hosts(topology),
        _devices(topology),
        _links(topology),
        _sizes(topology),
        _crowds(topology),
        _beside(topology),
        _launches(topology),
    ):
        if table.row_count:
            console.print(table)
    if len(topology.devices) < 2 and not topology.hosts:
        console.print("One GPU: there are no links to measure.")


def _hosts(topology: Topology) -> Table:
    table = new_table("Hosts", ("hosts", "GPU link"), ("cores", "GPUs", "NICs", "GB/s of a NIC", "latency us"))
    for group in topology.hosts:
        name = f"{group.name}0" + (f" to {group.name}{group.num - 1}" if group.num > 1 else "")
        link = group.gpu_link
        by = "" if link is None else f"{link.kind}, {link.gbs:g} GB/s"
        network = group.network
        figures = (group.num_cores, group.num_gpus, network.num_nics, f"{network.gbs:g}", f"{network.latency_us:g}")
        table.add_row(name, by, *map(str, figures))
    return table


def _devices(topology: Topology) -> Table:
    table = new_table("Devices", ("GPU", "name", "UUID"), ("SMs", "memory GB"))
    for index, device in enumerate(topology.devices):
        name, uuid, memory = escape(device.name), escape(device.uuid), f"{device.memory_bytes / 1e9:.0f}"
        table.add_row(str(index), name, uuid, str(device.num_sms), memory)
    return table


def _measured(topology: Topology) -> list[str]:
    found = {transport for link in topology.links for transport in link.transports}
    return [*(each for each in TRANSPORTS if each in found), *sorted(found - set(TRANSPORTS))]


def _best_gbs(link: Link, transport: str) -> float:
    return max((rate.rate_gbs for rate in link.rates if rate.transport == transport), default=0.0)


def _links(topology: Topology) -> Table:
    transports = _measured(topology)
    table = new_table("Links: GB/s at the best size", ("link", "kind", *transports), ("signal us",))
    most_gbs = max((_best_gbs(link, each) for link in topology.links for each in transports), default=0.0)
    for link in topology.links:
        name = f"{topology.index(link.source)} → {topology.index(link.target)}"
        signal = "" if link.signal_us is None else f"{link.signal_us:.1f}"
        table.add_row(name, str(link.kind), *(_rate(_best_gbs(link, each), most_gbs) for each in transports), signal)
    return table


def _rate(rate_gbs: float, most_gbs: float) -> str:
    return f"{bar(rate_gbs / most_gbs)} {rate_gbs:.0f}" if rate_gbs else ""


def _sizes(topology: Topology) -> Table:
    transports = _measured(topology)
    table = new_table("One transfer, median of the links: us (GB/s)", ("size",), transports)
    sizes = sorted({rate.size_bytes for link in topology.links for rate in link.rates})
    for size_bytes in sizes:
        table.add_row(_size(size_bytes), *(_typical(topology.links, each, size_bytes) for each in transports))
    return table


def _typical(links: Iterable[Link], transport: str, size_bytes: int) -> str:
    rates = [
        rate for link in links for rate in link.rates if (rate.transport, rate.size_bytes) == (transport, size_bytes)
    ]
    if not rates:
        return ""
    duration_us = median(rate.duration_us for rate in rates)
    return f"{show_us(duration_us)} ({size_bytes / duration_us / 1e3:.1f})"


def _size(size_bytes: int) -> str:
    return f"{size_bytes >> 20} MB" if size_bytes >= 1 << 20 else f"{size_bytes / 1024:g} KB"


def _crowds(topology: Topology) -> Table:
    table = new_table("Several at once", ("transfers", "by", "size", "GB/s of each"), ("of one alone",))
    most_gbs = max((crowd.rate_gbs for crowd in topology.crowds), default=0.0)
    links = {(link.source, link.target): link for link in topology.links}
    for crowd in topology.crowds:
        known = [links[each] for each in crowd.transfers if each in links]
        is_known = len(known) == len(crowd.transfers)
        times_us = [link.duration_us(crowd.transport, crowd.size_bytes) for link in known if is_known]
        alone_us = max((time_us for time_us in times_us if time_us is not None), default=None)
        share = "" if alone_us is None else f"{alone_us / crowd.duration_us:.2f}"
        by, rate = escape(crowd.transport), _rate(crowd.rate_gbs, most_gbs)
        table.add_row(_shape(topology, crowd), by, _size(crowd.size_bytes), rate, share)
    return table


def _shape(topology: Topology, crowd: Crowd) -> str:
    """``0 → 1, 2`` and the like."""
    by_source: dict[int, list[str]] = {}
    for source, target in crowd.transfers:
        by_source.setdefault(topology.index(source), []).append(str(topology.index(target)))
    if len(crowd.transfers) == len(topology.devices) * (len(topology.devices) - 1) > 2:
        return "each → all others"
    return "; ".join(f"{source} → {', '.join(targets)}" for source, targets in by_source.items())


def _beside(topology: Topology) -> Table:
    table = new_table("Side by side: times as long as alone", ("by", "beside"), ("transfer", "work"))
    for each in topology.slowdowns:
        table.add_row(escape(each.transport), escape(each.work), f"{each.communication:.2f}", f"{each.computation:.2f}")
    return table


def _launches(topology: Topology) -> Table:
    operations = list(dict.fromkeys(launch.operation for launch in topology.launches))
    table = new_table("To enqueue one: us of the host", ("GPU",), operations)
    for index, device in enumerate(topology.devices):
        costs = {each.operation: each.duration_us for each in topology.launches if each.device == device.uuid}
        if costs:
            table.add_row(str(index), *(show_us(costs[name]) if name in costs else "" for name in operations))
    return table
