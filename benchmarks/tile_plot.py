"""The plot of ``benchmarks.tile_ops``: for each row, how many times faster than cuBLAS + NCCL; a small SVG, written by hand."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from benchmarks.tile_figures import Measured
from benchmarks.tile_rows import CROSSFADE, SERIAL

PANEL, TOP, BOTTOM, LEFT = 150, 26, 78, 40
STEP, BAR = 46, 14
BASELINE_COLOUR, OWN_COLOUR, BOUND_COLOUR = "#9aa5b1", "#1f6feb", "#c2410c"


def svg(found: Sequence[Measured]) -> str:
    """A panel for each operator: bars of the best baseline and of crossfade, a line where the bound is."""
    operators = list(dict.fromkeys(each.row.operator for each in found))
    most = max((sum(each.row.operator == operator for each in found) for operator in operators), default=1)
    width, height = LEFT + STEP * most + 20, (PANEL + TOP + BOTTOM) * max(len(operators), 1) + 24
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" font-size="10">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        *_legend(),
    ]
    for number, operator in enumerate(operators):
        rows = [each for each in found if each.row.operator == operator]
        parts += _panel(operator, rows, 24 + number * (PANEL + TOP + BOTTOM), width)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _legend() -> list[str]:
    found, x = [], LEFT
    for colour, words in ((BASELINE_COLOUR, "best baseline"), (OWN_COLOUR, CROSSFADE), (BOUND_COLOUR, "bound")):
        found.append(f'<rect x="{x}" y="6" width="10" height="10" fill="{colour}"/>')
        found.append(f'<text x="{x + 14}" y="15">{words}</text>')
        x += 96
    return found


def _panel(operator: str, rows: Sequence[Measured], top: int, width: int) -> list[str]:
    values = [_values(each) for each in rows]
    highest = max([1.5, *(value for row in values for value in row if value is not None)])
    scale = PANEL / highest
    ground = top + TOP + PANEL
    parts = [
        f'<text x="{LEFT}" y="{top + 14}" font-size="12">{escape(operator)}: times faster than cuBLAS + NCCL</text>'
    ]
    for tick in range(int(highest / 0.5) + 1):
        y = ground - tick * 0.5 * scale
        colour = "#333" if tick == 2 else "#ddd"
        parts.append(f'<line x1="{LEFT}" x2="{width - 10}" y1="{y:.1f}" y2="{y:.1f}" stroke="{colour}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 3:.1f}" text-anchor="end">{tick * 0.5:.1f}</text>')
    for number, (each, (baseline, own, bound)) in enumerate(zip(rows, values, strict=True)):
        x = LEFT + number * STEP + 8
        for k, (value, colour) in enumerate(((baseline, BASELINE_COLOUR), (own, OWN_COLOUR))):
            if value is not None:
                high = value * scale
                parts.append(
                    f'<rect x="{x + k * BAR}" y="{ground - high:.1f}" width="{BAR - 1}" height="{high:.1f}" fill="{colour}"/>'
                )
        if bound is not None:
            y = ground - bound * scale
            parts.append(
                f'<line x1="{x - 2}" x2="{x + 2 * BAR + 1}" y1="{y:.1f}" y2="{y:.1f}" stroke="{BOUND_COLOUR}" stroke-width="2"/>'
            )
        parts.append(
            f'<text transform="translate({x + BAR},{ground + 8}) rotate(45)" font-size="8">{escape(each.row.sizes)}</text>'
        )
    return parts


def _values(each: Measured) -> tuple[float | None, float | None, float | None]:
    """How many times faster than the bare calls: the best baseline, crossfade, and what the bound allows."""
    serial, best, bound = each.us(SERIAL), each.fastest(each.baselines), each.bound
    if serial is None:
        return None, None, None
    times = (None if best is None else each.us(best), each.us(CROSSFADE), None if bound is None else bound.time_us)
    baseline, own, limit = (None if time_us is None else serial / time_us for time_us in times)
    return baseline, own, limit
