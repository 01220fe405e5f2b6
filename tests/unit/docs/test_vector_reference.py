"""The reference pages name everything that the vector database has."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from click.testing import CliRunner
from tests.unit.compatibility.surface import promised_names

from penstock.cli.main import cli
from penstock.clock import SYSTEM_CLOCK
from penstock.metrics import Registry
from penstock.servers.vector.routes import VectorApi
from penstock.servers.vector.settings import VectorSettings
from penstock.vector import VectorConfig

REFERENCE = Path(__file__).parents[3] / "docs" / "reference"


def section(page: str, title: str) -> str:
    text = (REFERENCE / page).read_text(encoding="utf-8")
    return text.split(f"\n## {title}\n", 1)[1].split("\n## ", 1)[0]


def test_settings_are_documented_with_their_defaults() -> None:
    rows = {
        row.split("|")[1].strip().strip("`"): row.split("|")[2].strip()
        for row in section("vector.md", "VectorConfig").splitlines()
        if row.startswith("| `")
    }
    fields = {field.name: field.default for field in dataclasses.fields(VectorConfig)}
    assert rows.keys() == fields.keys()
    for name, default in fields.items():
        if default and default is not dataclasses.MISSING:
            assert rows[name] == f"`{getattr(default, 'value', default)}`", name


def test_options_are_documented() -> None:
    shown = CliRunner().invoke(cli, ["vector", "serve", "--help"]).output
    told = set(re.findall(r"`(--[a-z-]+)", section("vector.md", "Options")))
    assert told == set(re.findall(r"^  (--[a-z][a-z-]+)", shown, re.MULTILINE)) - {"--help"}


def test_metrics_are_documented() -> None:
    registry = Registry()
    VectorApi(VectorSettings(), clock=SYSTEM_CLOCK, registry=registry)
    told = set(re.findall(r"`(\w+)`", section("vector.md", "Metrics")))
    assert {name.replace(".", "_") for name in registry.snapshot()} <= told


def test_every_public_name_is_documented() -> None:
    text = section("api.md", "`penstock.vector`")
    assert [name for name in promised_names("penstock.vector") if not re.search(rf"\b{name}\b", text)] == []
