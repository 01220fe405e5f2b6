"""The tests are tested: every deliberate bug is caught by its named test, which passes without the bug."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.mutants.coordinator_mutants import COORDINATOR_MUTANTS
from tests.mutants.database_mutants import DATABASE_MUTANTS
from tests.mutants.http_mutants import HTTP_MUTANTS
from tests.mutants.mutant import Mutant
from tests.mutants.mutants import MUTANTS
from tests.mutants.quiver_mutants_acks import QUIVER_ACK_MUTANTS
from tests.mutants.quiver_mutants_collector import COLLECTOR_MUTANTS
from tests.mutants.quiver_mutants_endings import QUIVER_ENDING_MUTANTS
from tests.mutants.quiver_mutants_otlp import OTLP_MUTANTS
from tests.mutants.quiver_mutants_segments import SEGMENT_MUTANTS
from tests.mutants.quiver_mutants_wal import QUIVER_WAL_MUTANTS
from tests.mutants.spark_mutants import SPARK_MUTANTS
from tests.mutants.timeseries_mutants import TIMESERIES_MUTANTS
from tests.mutants.topic_mutants import TOPIC_MUTANTS
from tests.mutants.vector_mutants import VECTOR_MUTANTS

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "src"
ALL_MUTANTS = (
    *MUTANTS,
    *TOPIC_MUTANTS,
    *SEGMENT_MUTANTS,
    *OTLP_MUTANTS,
    *QUIVER_ACK_MUTANTS,
    *QUIVER_WAL_MUTANTS,
    *QUIVER_ENDING_MUTANTS,
    *COLLECTOR_MUTANTS,
    *COORDINATOR_MUTANTS,
    *TIMESERIES_MUTANTS,
    *DATABASE_MUTANTS,
    *VECTOR_MUTANTS,
    *HTTP_MUTANTS,
    *SPARK_MUTANTS,
)
_SUMMARY = re.compile(r"^FAILED .+? - ([\w.]+)", re.MULTILINE)
_BROKEN = frozenset({"AttributeError", "ImportError", "NameError", "SyntaxError", "TypeError"})
"""A mutant that fails this way is a broken program, not a bug that a test noticed."""


def run_tests(sources: Path, *tests: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-rf", "--timeout=60", "-m", "", *tests]
    # Only what the named tests need: most of a run's time is the start of Python and its plugins.
    command += [
        "--noconftest",
        "-p",
        "pytest_asyncio.plugin",
        "-p",
        "pytest_timeout",
        "-p",
        "no:cacheprovider",
    ]
    command += ["-o", f"pythonpath={sources} {ROOT}"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": str(sources), "COLUMNS": "300"}
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=540, check=False
    )


@pytest.mark.parametrize("package", sorted({mutant.package for mutant in ALL_MUTANTS}))
def test_every_named_test_passes_without_its_bug(package: str) -> None:
    named = {mutant.test for mutant in ALL_MUTANTS if mutant.package == package}
    done = run_tests(SOURCES, *sorted(named))
    assert done.returncode == 0, done.stdout + done.stderr


def test_names_are_unique() -> None:
    assert len({mutant.name for mutant in ALL_MUTANTS}) == len(ALL_MUTANTS)


@pytest.mark.parametrize("mutant", ALL_MUTANTS, ids=lambda mutant: mutant.name.replace(" ", "-"))
def test_a_known_bug_is_caught_by_its_named_test(mutant: Mutant, tmp_path: Path) -> None:
    sources = tmp_path / "src"
    shutil.copytree(SOURCES, sources)  # with its compiled files, which stay valid where nothing changes
    mutant.apply(sources)

    done = run_tests(sources, mutant.test)
    assert done.returncode == 1, f"not caught: {done.stdout}{done.stderr}"
    reasons = _SUMMARY.findall(done.stdout)
    assert reasons, done.stdout
    assert not _BROKEN & set(reasons), done.stdout
