"""Hypothesis profiles, and a marker for each tier of tests.

`HYPOTHESIS_PROFILE=explore` searches further, with new examples each time.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# A loaded machine is slow now and then: the time limit is the test's own, not the example's.
settings.register_profile(
    "ci",
    deadline=None,
    derandomize=True,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("explore", settings.get_profile("ci"), derandomize=False, max_examples=2000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

TESTS = Path(__file__).parent
SPARK_TIMEOUT_S = 300
"""A session starts within the first test that needs it, and a busy machine is slow to do so."""
TIERS = frozenset(
    {
        "browser",
        "conformance",
        "contract",
        "crash",
        "mutants",
        "process",
        "properties",
        "simulation",
        "spark",
        "unit",
    }
)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every test with the tier whose folder it stands in, before `-m` selects."""
    for item in items:
        tier = item.path.relative_to(TESTS).parts[0]
        if tier in TIERS:
            item.add_marker(tier)
        if tier == "spark" and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(SPARK_TIMEOUT_S))
