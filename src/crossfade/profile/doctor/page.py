"""The doctor's report as a page: one HTML file with its styles, scripts and data in it, which loads nothing.

`page.html` beside this file is the frame; `page_parts` holds what is put into it: the styles, and the scripts in the order in which
they stand in `_SCRIPTS`. A content security policy in the page keeps it from loading anything from anywhere.

The shape of a report (times and durations are floats in microseconds from the start of the first timeline)::

    {
        "title": str,                          # what was examined
        "summary": str,                        # one or two sentences, the page's headline
        "notes": [str],                        # what the trace leaves open
        "metrics": [[label, value], ...],      # texts, a small table
        "lanes": ["rank 0 · host", "rank 0 · stream 7", ...],
        "names": [str],                        # names of spans; a span has a name's index
        "now": timeline,                       # what was traced
        "diagnoses": [
            {
                "title": str,
                "is_remark": bool,             # too little or too unsure for a diagnosis
                "gain": str,                   # "12 to 15 % of the step"
                "confidence": str,
                "evidence": str,               # what in the trace shows it
                "where": str,                  # lines or operators of the program
                "fix": str,
                "code": str,                   # the fix as code; may be empty
                "marks": [[lane, start_us, end_us, label], ...],   # where the timeline "now" shows it; lane is an index
                "fixed": timeline or None,     # as predicted with the fix
            },
        ],
    }

    timeline = {"end_us": float, "spans": [[lane, start_us, duration_us, name, kind], ...]}

Spans are sorted by lane, then start; those of one lane may overlap (a host has threads). Their kinds: 0 computes, 1 communicates,
2 copies, 3 a host call that waits, 4 another host call. Lanes whose labels are equal up to " · " are drawn as one group.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

_FRAME = "page.html"
_PARTS = "page_parts"
_STYLES = "page.css"
_SCRIPTS = (
    "spans.js",
    "view.js",
    "words.js",
    "rows.js",
    "strips.js",
    "paint.js",
    "cards.js",
    "stage.js",
    "pointing.js",
    "page.js",
)
_PLACE = re.compile(r"\{\{(\w+)\}\}")


def page(report: Mapping[str, Any]) -> str:
    """The whole page. Encode it as UTF-8; any text of the report can be.

    Raises:
        ValueError: a time is infinite or not a number.
    """
    folder = files(__package__)
    parts = folder / _PARTS
    contents = {
        "title": html.escape(str(report["title"]).encode("utf-8", "replace").decode("utf-8")),
        "styles": (parts / _STYLES).read_text(encoding="utf-8"),
        "scripts": "\n".join((parts / name).read_text(encoding="utf-8") for name in _SCRIPTS),
        "report": _embedded(report),
    }
    frame = (folder / _FRAME).read_text(encoding="utf-8")
    return _PLACE.sub(lambda place: contents[place[1]], frame)


def _embedded(report: Mapping[str, Any]) -> str:
    """JSON that can stand in a script element: no ``<``, so that none of its texts ends the element or begins a comment.

    It is ASCII, so that half a surrogate pair in a name, which UTF-8 cannot hold, does no harm either.
    """
    text = json.dumps(report, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
