"""The reference pages name everything that write coordination has."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from tests.unit.compatibility.surface import promised_names

import penstock.coordinator
from penstock.coordinator import CoordinatorConfig, CoordinatorError
from penstock.coordinator.watermarks import Instruments
from penstock.metrics import Registry

REFERENCE = Path(__file__).parents[3] / "docs" / "reference"


def section(page: str, title: str) -> str:
    text = (REFERENCE / page).read_text(encoding="utf-8")
    return text.split(f"\n## {title}\n", 1)[1].split("\n## ", 1)[0]


def words(text: str) -> set[str]:
    return set(re.findall(r"`([\w.]+)", text))


def test_settings_are_documented_with_their_defaults() -> None:
    rows = {
        row.split("|")[1].strip().strip("`"): row.split("|")[2].strip()
        for row in section("config.md", "CoordinatorConfig").splitlines()
        if row.startswith("| `")
    }
    fields = {field.name: field.default for field in dataclasses.fields(CoordinatorConfig)}
    assert rows.keys() == fields.keys()
    for name, default in fields.items():
        if default is not None:
            assert rows[name] == f"`{getattr(default, 'value', default)}`", name


def test_metrics_are_documented_and_no_others() -> None:
    registry = Registry()
    Instruments(registry)
    told = words(section("metrics.md", "Write coordination")) - {"timeseries_write_coordinator_flush_total"}
    names = {name.replace(".", "_") for name in registry.snapshot()}
    assert {word for word in told if word.startswith("write_coordinator_")} == names


def test_errors_are_documented() -> None:
    errors = {
        name
        for name in promised_names("penstock.coordinator")
        if isinstance(kind := getattr(penstock.coordinator, name), type)
        and issubclass(kind, CoordinatorError)
    }
    assert errors <= words(section("errors.md", "Write coordination (`penstock.coordinator`)"))


def test_every_public_name_is_documented() -> None:
    text = section("api.md", "`penstock.coordinator`")
    assert [
        name for name in promised_names("penstock.coordinator") if not re.search(rf"\b{name}\b", text)
    ] == []
