"""A Ray cluster on two namespaces of the network that are joined by a pair of virtual interfaces (`tests.helpers.two_hosts`), or
where the environment has SLOW_LINK="DELAY_MS LOSS" by a slow link that loses packets (`tests.helpers.slow_link`).

``python -m tests.helpers.ray_two_hosts MODULE`` starts it and calls ``MODULE.main(hosts)`` on the first host; it exits with 77
where the system does not allow namespaces.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import IO, Any

from tests.helpers.two_hosts import ADDRESSES, LINKS, NOT_ALLOWED, UNSHARE, configure, ip
from tests.helpers.waiting import until

_PORT = 6391
_LIMIT_S = 60
_RAY = (sys.executable, "-m", "ray.scripts.scripts", "start", "--num-cpus=4", "--disable-usage-stats")


@dataclass
class Hosts:
    """The two hosts, as a program on the first one sees them."""

    said: IO[str]  # what the second host's program says
    told: IO[str]  # what it is told

    def num_bytes_sent(self) -> int:
        """What has left this host by the interface, by its own counter."""
        shown = subprocess.run(
            ["ip", "-s", "-j", "link", "show", LINKS[0]], check=True, capture_output=True, timeout=20
        ).stdout
        sent: int = json.loads(shown)[0]["stats64"]["tx"]["bytes"]
        return sent

    def cut(self) -> None:
        ip("link", "set", LINKS[0], "down")

    def mend(self) -> None:
        ip("link", "set", LINKS[0], "up")

    def tell(self, order: str) -> str:
        """Has the second host's program do something; what it answers."""
        self.told.write(f"{order}\n")
        self.told.flush()
        return self.said.readline().strip()

    @contextmanager
    def ray(self) -> Iterator[Any]:
        """Ray on both, and this process in it."""
        import ray

        _start_ray("--head", f"--port={_PORT}", f"--node-ip-address={ADDRESSES[0]}", "--include-dashboard=false")
        assert self.tell("join") == "joined"
        address = f"{ADDRESSES[0]}:{_PORT}"
        ray.init(address=address, logging_level="ERROR", log_to_driver=False, _node_ip_address=ADDRESSES[0])
        until(lambda: len(ray.nodes()) == 2, "the second host", _LIMIT_S, pause_s=0.1)
        yield ray


def place(ray: Any, host: int) -> Any:
    """A scheduling strategy that puts an actor on one of the two."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    (node,) = [node["NodeID"] for node in ray.nodes() if node["NodeManagerAddress"] == ADDRESSES[host]]
    return NodeAffinitySchedulingStrategy(node, soft=False)


def _start_ray(*arguments: str) -> None:
    subprocess.run([*_RAY, *arguments], check=True, stdout=subprocess.DEVNULL, timeout=_LIMIT_S)


def _second() -> None:
    print("here", flush=True)
    for order in sys.stdin:
        match order.split():
            case ["go"]:
                configure(1)
                print("gone", flush=True)
            case ["join"]:
                _start_ray(f"--address={ADDRESSES[0]}:{_PORT}", f"--node-ip-address={ADDRESSES[1]}")
                print("joined", flush=True)
            case ["kill", pid]:
                os.kill(int(pid), signal.SIGKILL)
                print("killed", flush=True)
            case ["run", module]:
                subprocess.Popen([sys.executable, "-m", module])
                print("runs", flush=True)


def _join(second: int) -> None:
    """Makes the link to the namespace of a process."""
    if slow := os.environ.get("SLOW_LINK"):
        command = [sys.executable, "-m", "tests.helpers.slow_link", str(second), *slow.split()]
        forwarder = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert forwarder.stdout is not None
        assert forwarder.stdout.readline() == "ready\n"
    else:
        ip("link", "add", LINKS[0], "type", "veth", "peer", "name", LINKS[1], "netns", str(second))


def _both(module: str) -> None:
    command = [*UNSHARE, sys.executable, "-m", "tests.helpers.ray_two_hosts", module, "second"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as second:
        assert second.stdin is not None
        assert second.stdout is not None
        assert second.stdout.readline() == "here\n"
        _join(second.pid)
        configure(0)
        hosts = Hosts(second.stdout, second.stdin)
        assert hosts.tell("go") == "gone"
        try:
            import_module(module).main(hosts)
        except BaseException:  # what follows would hide it
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            sys.stdout.flush()
            os._exit(0)  # with this process, the first of its namespace, all others of both hosts end


def main(module: str, what: str = "") -> None:
    if what == "second":
        _second()
    elif what == "both":
        _both(module)
    else:
        if not (shutil.which("unshare") and shutil.which("ip")):
            print("the commands unshare and ip are not installed", file=sys.stderr)
            raise SystemExit(NOT_ALLOWED)
        allowed = subprocess.run([*UNSHARE, "ip", "link", "add", "crossfade2", "type", "veth"], capture_output=True)
        if allowed.returncode:
            print(allowed.stderr.decode(), file=sys.stderr)
            raise SystemExit(NOT_ALLOWED)
        token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(16), "RAY_USAGE_STATS_ENABLED": "0"}
        command = [*UNSHARE, sys.executable, "-m", "tests.helpers.ray_two_hosts", module, "both"]
        raise SystemExit(subprocess.run(command, check=False, env={**os.environ, **token}).returncode)


if __name__ == "__main__":
    main(*sys.argv[1:])
