"""The promise ``static_shape``: every execution's value has tensors of the same number, order, shapes and dtypes.

What the first value had is the declaration. Each later one is compared where it is made, before anybody reads it: so the promise
is the same for every transport, for several at once, and between two methods of one actor, where nothing is sent.
"""

from __future__ import annotations

import sys
from functools import cache
from typing import TYPE_CHECKING, Any

from crossfade.channels.values.codec import PLAIN_TYPES
from crossfade.errors import Failure, StaticShapeError
from crossfade.plan.plan import Plan
from crossfade.types import DRIVER

if TYPE_CHECKING:
    from crossfade.channels.values.shapes import Shapes

_NUM_SHOWN = 4
_HINT = "leave static_shape out of with_tensor_transport for a value whose tensors change, or compile a graph for each shape"


class StaticShape:
    """The declaration of one value of a plan."""

    def __init__(self, plan: Plan, value: str) -> None:
        self._declared: Shapes | None = None
        self._edge = _edge_of(plan, value)

    def declare(self, value: object) -> None:
        """Takes a value for the first one."""
        self._declared = _shapes_of(value)

    def fault_of(self, value: object) -> StaticShapeError | None:
        """What is wrong with a value that was made just now; nothing with the first one, and with a `Failure`."""
        if type(value) is Failure:
            return None
        found = _shapes_of(value)
        if found == self._declared or found is None:
            return None
        if self._declared is None:
            self._declared = found
            return None
        expected, came = _shown(self._declared, found)
        return StaticShapeError(
            f"{self._edge} is declared to have a static shape: expected tensors with shapes and dtypes {expected}, as the first "
            f"value had; found {came}",
            hint=_HINT,
        )


def _shapes_of(value: object) -> Shapes | None:
    """What `crossfade.channels.values.shapes.shapes_of` gives; None for what cannot be pickled."""
    if type(value) in PLAIN_TYPES or sys.modules.get("torch") is None:
        return ()
    try:
        return _finder()(value)  # type: ignore[no-any-return]
    except Exception:
        return None


@cache
def _finder() -> Any:
    """What knows tensors; imported with the first value that may have any."""
    from crossfade.channels.values.shapes import shapes_of

    return shapes_of


def _shown(declared: Shapes, found: Shapes) -> tuple[str, str]:
    """Both, from a little before where they begin to differ."""
    at = next((i for i, (one, other) in enumerate(zip(declared, found, strict=False)) if one != other), None)
    first = max(0, (min(len(declared), len(found)) if at is None else at) - 1)
    return _part(declared, first), _part(found, first)


def _part(shapes: Shapes, first: int) -> str:
    parts = [f"({tuple(shape)}, {dtype})" for shape, dtype in shapes[first : first + _NUM_SHOWN]]
    before = ["..."] if first else []
    behind = ["..."] if first + _NUM_SHOWN < len(shapes) else []
    more = f" ({len(shapes)} in all)" if before or behind else ""
    return f"[{', '.join([*before, *parts, *behind])}]{more}"


def _edge_of(plan: Plan, value: str) -> str:
    """Who makes a value, and who reads it."""
    keys = {each.value: each.key for each in plan.inputs}
    node = plan.maker.get(value)
    if value in keys:
        maker = f"the graph's input {keys[value]} ({value})"
    elif node is None:
        maker = f"the value {value} of the collective that makes it"
    else:
        maker = f"the value {value} of {node.actor}.{node.method}"
    readers = [f"{each.actor}.{each.method} (node {each.id})" for each in plan.nodes if value in each.inputs]
    readers += [f"{each.kind} {each.id}" for each in plan.collectives if any(value in mine for mine in each.inputs)]
    readers += [f"the {DRIVER}"] if value in plan.outputs else []
    more = f" and {len(readers) - _NUM_SHOWN} others" if len(readers) > _NUM_SHOWN else ""
    return f"{maker}, read by {', '.join(readers[:_NUM_SHOWN])}{more},"
