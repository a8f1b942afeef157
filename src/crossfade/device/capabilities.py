"""What the machine and the environment allow, each finding with what to do about it.

`read_facts` asks the driver; `judge` decides, and needs no GPU.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from crossfade.device.cuda_bindings import bindings, check
from crossfade.errors import DeviceError
from crossfade.topology import Device, Link, LinkKind, Topology

DEFAULT_CONNECTIONS, GOOD_CONNECTIONS = 8, 32
"""Hardware queues of a process's streams: what CUDA makes unasked, and the most that it makes."""

_NO_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}


class Severity(StrEnum):
    """How bad a finding is."""

    ERROR = "error"  # it would hang, or give wrong values
    WARNING = "warning"  # it is slower than it could be
    NOTE = "note"


@dataclass(frozen=True, slots=True)
class Finding:
    """One finding about the machine. ``name`` is short and fixed, for programs; ``message`` and ``hint`` are for people."""

    severity: Severity
    name: str
    message: str
    hint: str = ""

    def __str__(self) -> str:
        return f"{self.severity}: {self.message}" + (f"\nhint: {self.hint}" if self.hint else "")


@dataclass(frozen=True, slots=True)
class Facts:
    """The facts that `judge` judges."""

    num_devices: int  # devices that this process sees
    compute_capability: tuple[int, int]  # the lowest of them, as (major, minor)
    has_stream_memory: bool
    links: Mapping[tuple[int, int], LinkKind]  # for each ordered pair of devices, how they are linked
    environment: Mapping[str, str]


def judge(facts: Facts) -> list[Finding]:
    """All findings, errors first."""
    found = [*_devices(facts), *_links(facts), *_environment(facts)]
    order = list(Severity)
    return sorted(found, key=lambda finding: order.index(finding.severity))


def _devices(facts: Facts) -> list[Finding]:
    found = []
    if facts.num_devices == 0:
        found.append(
            Finding(Severity.ERROR, "no-device", "no GPU is visible", "look at nvidia-smi and CUDA_VISIBLE_DEVICES")
        )
    elif facts.compute_capability < (8, 0):
        major, minor = facts.compute_capability
        message = f"a GPU of compute capability {major}.{minor}: crossfade is tested from 8.0 (Ampere) on"
        found.append(Finding(Severity.WARNING, "old-device", message, "use transport='gloo' if something fails"))
    if facts.num_devices and not facts.has_stream_memory:
        message = "the driver has no stream memory operations, which every device transport needs"
        found.append(
            Finding(Severity.ERROR, "no-stream-memory", message, "update the NVIDIA driver, or use transport='gloo'")
        )
    return found


def _links(facts: Facts) -> list[Finding]:
    found = []
    for (here, there), kind in sorted(facts.links.items()):
        if here > there:
            continue
        if kind is LinkKind.HOST:
            message = (
                f"GPU {here} cannot reach GPU {there}: values between them go through the host's memory ('staged')"
            )
            found.append(Finding(Severity.WARNING, "no-peer-access", message, "nvidia-smi topo -p2p r shows why"))
        if kind is LinkKind.PCIE:
            message = f"GPU {here} and GPU {there} are linked by PCIe"
            hint = "signals are only trusted to arrive behind the data over NVLink; 'staged' is used here"
            found.append(Finding(Severity.WARNING, "pcie", message, hint))
    return found


def _environment(facts: Facts) -> list[Finding]:
    found = []
    environment = facts.environment
    found += _connections(environment.get("CUDA_DEVICE_MAX_CONNECTIONS", ""))
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        if "expandable_segments:true" in environment.get(name, "").lower().replace(" ", ""):
            message = f"{name} asks for expandable segments, whose memory cannot be exported"
            hint = "nothing to do: what crosses processes lies in crossfade's own memory"
            found.append(Finding(Severity.NOTE, "expandable-segments", message, hint))
    if environment.get("CUDA_LAUNCH_BLOCKING") == "1":
        message = "CUDA_LAUNCH_BLOCKING is 1: every launch waits for the device, so nothing can overlap"
        found.append(
            Finding(
                Severity.ERROR, "launch-blocking", message, "unset it: a launch behind a wait for a peer would hang"
            )
        )
    switches = [f"{name}={value}" for name, value in _NO_MULTICAST.items() if environment.get(name) != value]
    if switches:
        message = (
            "NVLink multicast is not switched off; crossfade does not use it, and on some machines it must not be used"
        )
        found.append(Finding(Severity.NOTE, "multicast", message, f"set {' and '.join(switches)} to be sure"))
    return found


def _connections(text: str) -> list[Finding]:
    """With n connections, n - 1 streams can wait at the same time; with one more, no other stream gets on (measured)."""
    number = int(text) if text.isdigit() else DEFAULT_CONNECTIONS
    if number >= GOOD_CONNECTIONS:
        return []
    hint = f"set CUDA_DEVICE_MAX_CONNECTIONS={GOOD_CONNECTIONS} before CUDA starts"
    if number <= 1:
        message = "CUDA_DEVICE_MAX_CONNECTIONS is 1: all streams share one hardware queue, and a wait for a peer stops them all"
        return [Finding(Severity.ERROR, "one-connection", message, hint)]
    severity = Severity.WARNING if number < DEFAULT_CONNECTIONS else Severity.NOTE
    message = f"CUDA makes {number} connections: no more than {number - 1} streams of a process can wait for peers at the same time"
    return [Finding(severity, "few-connections", message, hint)]


def require(findings: list[Finding]) -> None:
    """Raises a `DeviceError` for the first error, or gives a Python warning for each warning."""
    for finding in findings:
        if finding.severity is Severity.ERROR:
            raise DeviceError(finding.message, hint=finding.hint or None)
    for finding in findings:
        if finding.severity is Severity.WARNING:
            warnings.warn(str(finding), RuntimeWarning, stacklevel=2)


def check_pairs(kinds: Mapping[tuple[int, int], LinkKind], pairs: Iterable[tuple[int, int]], *, hint: str) -> None:
    """Raises a `DeviceError` where the two of a pair are not linked by NVLink, so that signals between them cannot be trusted.
    ``kinds`` says how each ordered pair of the host's devices is linked; within one device signals can be trusted. ``hint`` says
    what to do.
    """
    for here, there in pairs:
        if here != there and kinds.get((here, there)) is not LinkKind.NVLINK:
            raise DeviceError(
                f"GPU {here} and GPU {there} are not linked by NVLink, over which alone data is known to arrive before its signal",
                hint=hint,
            )


def _attribute(name: str, device: int) -> int:
    cu = bindings()
    attribute = getattr(cu.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
    return int(check(cu.cuDeviceGetAttribute(attribute, device), f"reading {name} of GPU {device}"))


def _num_devices() -> int:
    return int(check(bindings().cuDeviceGetCount(), "counting GPUs"))


def _link_kind(here: int, there: int) -> LinkKind:
    """Atomic operations work natively over NVLink and not over PCIe, which tells the two apart without another library."""
    cu = bindings()
    if not int(check(cu.cuDeviceCanAccessPeer(here, there), "asking for peer access")):
        return LinkKind.HOST
    native = cu.CUdevice_P2PAttribute.CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED
    return (
        LinkKind.NVLINK
        if int(check(cu.cuDeviceGetP2PAttribute(native, here, there), "asking for atomics"))
        else LinkKind.PCIE
    )


def _pairs(num_devices: int) -> list[tuple[int, int]]:
    return [(here, there) for here in range(num_devices) for there in range(num_devices) if here != there]


def read_facts(environment: Mapping[str, str] | None = None) -> Facts:
    """Asks the driver. Creates no context."""
    num_devices = _num_devices()
    capabilities = [
        (_attribute("COMPUTE_CAPABILITY_MAJOR", device), _attribute("COMPUTE_CAPABILITY_MINOR", device))
        for device in range(num_devices)
    ]
    words = [_attribute("CAN_USE_STREAM_WAIT_VALUE_NOR", device) for device in range(num_devices)]
    return Facts(
        num_devices=num_devices,
        compute_capability=min(capabilities, default=(0, 0)),
        has_stream_memory=all(words),
        links={pair: _link_kind(*pair) for pair in _pairs(num_devices)},
        environment=os.environ if environment is None else environment,
    )


def _uuid(device: int) -> str:
    import ctypes
    import uuid

    raw = check(bindings().cuDeviceGetUuid(device), f"the UUID of GPU {device}")
    return f"GPU-{uuid.UUID(bytes=ctypes.string_at(raw.getPtr(), 16))}"


def read_topology() -> Topology:
    """The devices and links of this host, nothing measured."""
    cu = bindings()
    uuids = [_uuid(device) for device in range(_num_devices())]
    devices = []
    for index, uuid in enumerate(uuids):
        name = check(cu.cuDeviceGetName(128, index), f"the name of GPU {index}")
        memory_bytes = int(check(cu.cuDeviceTotalMem(index), f"the memory of GPU {index}"))
        text = name.split(b"\0")[0].decode() if isinstance(name, bytes) else str(name)
        devices.append(Device(uuid, text, _attribute("MULTIPROCESSOR_COUNT", index), memory_bytes))
    links = [Link(uuids[here], uuids[there], _link_kind(here, there)) for here, there in _pairs(len(uuids))]
    return Topology(tuple(devices), tuple(links))
