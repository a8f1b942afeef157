"""What all tests share: how many examples hypothesis tries.

``default`` is for ``make test``, ``soak`` for ``make soak`` (``pytest --hypothesis-profile=soak``), which runs most properties
of ``make test`` again (``tests/soak/test_properties_long.py``).
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

# Examples start processes and move megabytes: how long one takes says nothing about whether it is right.
_SLOW_IS_FINE = (HealthCheck.too_slow, HealthCheck.data_too_large)

settings.register_profile(
    "default",
    max_examples=100,
    deadline=None,
    print_blob=True,
    suppress_health_check=_SLOW_IS_FINE,
    derandomize="CI" in os.environ,
)
settings.register_profile("soak", settings.get_profile("default"), max_examples=2_000, derandomize=False)
settings.load_profile("default")
