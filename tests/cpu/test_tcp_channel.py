"""The channel between hosts, over loopback: the conformance suite, and what is its own."""

from __future__ import annotations

from crossfade.testing import conformance
from tests.helpers.wires import open_tcp

TestTcp = conformance.suite(open_tcp)
