"""Copy channels between GPUs whose signals cannot be trusted are refused when a plan is opened: nobody may have measured them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from crossfade.engines import device_ends
from crossfade.engines.board import pushes
from crossfade.engines.device_ends import DeviceEnds
from crossfade.errors import DeviceError
from crossfade.graph.nodes import InputNode, MultiOutputNode
from crossfade.plan.plan import Plan
from crossfade.topology import LinkKind
from tests.helpers.small_graphs import actor, call, compiled


class Opened(Exception):
    """The check was passed: what comes next was begun."""


def fan_out(gpus: dict[str, tuple[int, ...]], transport: str = "auto") -> Plan:
    """A gives a value to B and C, and takes what B makes of it."""
    a, b, c = (actor(name, *gpus[name]) for name in "ABC")
    made = call(a, "take", InputNode()).with_tensor_transport(transport)
    outputs = [call(a, "take", call(b, "take", made)), call(c, "take", made)]
    return compiled(MultiOutputNode(outputs))


@pytest.mark.parametrize(
    ("gpus", "of_a", "of_b"),
    [
        ({"A": (0,), "B": (1,), "C": (2,)}, [(0, 1), (0, 2)], [(1, 0)]),
        ({"A": (0,), "B": (1,), "C": (1,)}, [(0, 1)], [(1, 0)]),
        ({"A": (0, 1), "B": (2, 3), "C": (2,)}, [(0, 2), (1, 3), (1, 2)], [(2, 0), (3, 1)]),
        ({"A": (0,), "B": (), "C": (0,)}, [(0, 0)], []),
    ],
)
def test_pushes(gpus: dict[str, tuple[int, ...]], of_a: list[tuple[int, int]], of_b: list[tuple[int, int]]) -> None:
    plan = fan_out(gpus)
    assert (pushes(plan, "A"), pushes(plan, "B"), pushes(plan, "C")) == (of_a, of_b, [])
    assert pushes(fan_out({"A": (), "B": (), "C": ()}, "copy"), "A") == []


@pytest.mark.parametrize("kind", LinkKind)
@pytest.mark.parametrize("is_host", [False, True])
def test_copies_over_anything_but_nvlink_are_refused(
    kind: LinkKind, is_host: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def streams(ends: Any) -> None:
        raise Opened

    links = {(0, 1): LinkKind.NVLINK, (0, 2): kind, (1, 0): kind}
    monkeypatch.setattr(device_ends, "read_facts", lambda: SimpleNamespace(links=links))
    monkeypatch.setattr(DeviceEnds, "_make_streams", streams)
    plan = fan_out({"A": (0,), "B": (1,), "C": (2,)})
    devices: Any = SimpleNamespace(homes=[SimpleNamespace(device=0, is_host=is_host)])
    wanted = Opened if is_host or kind is LinkKind.NVLINK else DeviceError
    for party, pair in {"A": "GPU 0 and GPU 2", "B": "GPU 1 and GPU 0"}.items():
        with pytest.raises(wanted) as caught:
            DeviceEnds(plan, party, {}, devices, {}, lambda delay_s: None)
        if wanted is DeviceError:
            assert str(caught.value).startswith(f"{pair} are not linked by NVLink")
            assert "\nhint: 'staged' goes through the host" in str(caught.value)
    with pytest.raises(Opened):  # C pushes nothing
        DeviceEnds(plan, "C", {}, devices, {}, lambda delay_s: None)
