from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from penstock.cli.health import Status
from penstock.cli.machine import PACKAGES, check_machine, java_version, release

PROJECT = Path(__file__).parents[3] / "pyproject.toml"


def test_the_checked_packages_are_those_the_project_depends_on() -> None:
    declared = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]["dependencies"]
    assert dict(line.split(">=") for line in declared) == PACKAGES


@pytest.mark.parametrize(
    ("output", "version"),
    [
        ('openjdk version "17.0.9" 2023-10-17', 17),
        ('openjdk version "21" 2023-09-19', 21),
        ('java version "1.8.0_392"', 8),
        ("command not found", None),
    ],
)
def test_the_java_version_is_read_from_what_java_prints(output: str, version: int | None) -> None:
    assert java_version(output) == version


def test_releases_compare_by_number_and_not_by_text() -> None:
    assert release("0.10.1") > release("0.9")
    assert release("8.1.0rc1") == (8, 1, 0)


def test_a_machine_that_runs_the_tests_passes() -> None:
    assert [check for check in check_machine() if check.status is Status.FAIL] == []
