"""The names that users may rely on: adding, renaming or removing one shows here."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

import crossfade
from crossfade import errors, exceptions
from crossfade.not_here import NAMES_OF_RAY

ROOT = Path(__file__).resolve().parents[2]

PUBLIC = {
    "ActorClass",
    "ActorDiedError",
    "ActorError",
    "ActorHandle",
    "ActorStartError",
    "BatchesError",
    "CallRef",
    "CapacityExceeded",
    "ChannelBroken",
    "ChannelClosed",
    "ChannelError",
    "ChannelTimeout",
    "CompiledGraph",
    "CompiledRef",
    "CostModel",
    "CrossfadeError",
    "DeviceError",
    "GetTimeoutError",
    "GraphClosed",
    "GraphError",
    "InputNode",
    "MissingDependency",
    "MultiOutputNode",
    "MutatedValueError",
    "Plan",
    "Recording",
    "PlanError",
    "PlanSyntaxError",
    "SessionError",
    "Span",
    "StaticShapeError",
    "TaskError",
    "TeardownTimeout",
    "TimedOut",
    "TraceError",
    "Timeline",
    "Transport",
    "UnknownActor",
    "UnknownTransport",
    "Workload",
    "calibrate",
    "calibrate_tcp",
    "compile",
    "draw_timelines",
    "dump",
    "get",
    "get_actor",
    "init",
    "interleave",
    "interleaved",
    "is_initialized",
    "kill",
    "method",
    "parse_plan",
    "put",
    "record",
    "remote",
    "shutdown",
    "wait",
    "yield_point",
}


def guides() -> str:
    """Everything that users read: the README and docs/, decisions left out."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    return "\n".join(page.read_text() for page in pages)


def test_the_public_names_are_the_expected_ones() -> None:
    assert set(crossfade.__all__) == PUBLIC


def test_all_is_sorted_and_has_no_name_twice() -> None:
    assert list(crossfade.__all__) == sorted(set(crossfade.__all__))


def test_dir_shows_every_public_name() -> None:
    assert set(dir(crossfade)) >= PUBLIC


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        crossfade.no_such_name  # noqa: B018


@pytest.mark.parametrize("name", sorted(NAMES_OF_RAY))
def test_a_name_that_only_ray_has_says_what_to_do_instead(name: str) -> None:
    with pytest.raises(AttributeError, match=rf"^module 'crossfade' has no attribute '{name}'\nhint: ."):
        getattr(crossfade, name)
    assert name not in dir(crossfade)
    for ours in re.findall(r"crossfade\.(\w+)", NAMES_OF_RAY[name]):
        assert ours in PUBLIC


def test_rays_import_paths_lead_to_our_names() -> None:
    from crossfade.experimental.util.types import Device, ReduceOp

    assert crossfade.collective.ReduceOp is ReduceOp
    assert [Device.DEFAULT, Device.CPU, Device.CUDA, Device.GPU] == ["default", "cpu", "cuda", "cuda"]


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_a_public_name_resolves_and_has_a_docstring_of_its_own(name: str) -> None:
    public = getattr(crossfade, name)
    docstring = vars(public).get("__doc__") if inspect.isclass(public) else public.__doc__
    assert docstring
    assert docstring.strip()


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_a_public_name_is_in_the_guides(name: str) -> None:
    assert re.search(rf"\b{name}\b", guides()), f"hint: say what {name} is for in README.md or docs/"


def test_every_error_is_public_and_drawn_in_the_guide() -> None:
    made = {name for name in errors.__all__ if issubclass(getattr(errors, name), BaseException)}
    drawing = (ROOT / "docs" / "errors.md").read_text().split("```text\n")[1].split("```")[0]
    drawn = set(re.findall(r"^[│├└─ ]*(\w+)", drawing, re.MULTILINE))
    assert made <= PUBLIC
    assert made <= set(exceptions.__all__)
    assert made == drawn
