"""The reference of PromQL names what there is, and nothing else."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from tests.unit.timeseries.promql_expectations import data_sets

from penstock.errors import PenstockError
from penstock.timeseries.promql import EngineConfig, limits
from penstock.timeseries.promql.aggregation import AGGREGATIONS
from penstock.timeseries.promql.evaluation import PARAMETRIC_AGGREGATIONS
from penstock.timeseries.promql.functions import FUNCTIONS

ROOT = Path(__file__).parents[3]
TEXT = (ROOT / "docs" / "reference" / "promql.md").read_text(encoding="utf-8")


def section(title: str) -> str:
    return TEXT.split(f"\n## {title}\n", 1)[1].split("\n## ", 1)[0]


def words(text: str) -> set[str]:
    return set(re.findall(r"`(\w+)`", text))


def test_the_reference_names_every_function_and_no_other() -> None:
    told = words(section("Functions").split("\nNot here", 1)[0])
    assert told - {"le"} == FUNCTIONS


def test_the_reference_names_every_aggregation_and_no_other() -> None:
    told = words(section("Aggregations")) - {"by", "without"}
    assert told == AGGREGATIONS.keys() | PARAMETRIC_AGGREGATIONS


def test_the_reference_names_every_limit_with_its_default() -> None:
    for field in dataclasses.fields(EngineConfig):
        assert f"| `{field.name}` | `{field.default}` |" in section("Limits")


def test_the_reference_names_every_error() -> None:
    kinds = {
        name
        for name, kind in vars(limits).items()
        if isinstance(kind, type) and issubclass(kind, PenstockError) and kind.__module__ == limits.__name__
    }
    assert "QueryTimeout" in kinds
    assert kinds <= words(section("Errors"))


def test_the_reference_tells_how_many_expectations_are_compared() -> None:
    count = sum(len(one.cases) for one in data_sets())
    assert f"holds {count} expectations" in section("Compared with Prometheus")
    decision = (ROOT / "docs" / "decisions" / "0032-promql.md").read_text(encoding="utf-8")
    assert f"{count} expectations that the Prometheus project publishes" in decision
