"""The page on the architecture names files that exist, and the packages in the order that is enforced."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
PROMISES = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in PAGE.splitlines()
    if line.startswith("| I")
]


def paths_in(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def test_every_promise_has_its_row() -> None:
    assert [row[0].split()[0] for row in PROMISES] == [f"I{number}" for number in range(1, 15)]


@pytest.mark.parametrize("row", PROMISES, ids=lambda row: row[0].split()[0])
def test_what_keeps_a_promise_and_what_shows_it_exist(row: list[str]) -> None:
    _, kept, shown = row
    assert paths_in(kept)
    assert paths_in(shown)
    assert [path for path in paths_in(kept) if not (ROOT / "src/penstock" / path).exists()] == []
    assert [path for path in paths_in(shown) if not (ROOT / "tests" / path).exists()] == []


def test_the_packages_are_those_of_the_enforced_order() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]
    layers = next(contract["layers"] for contract in settings["contracts"] if contract["type"] == "layers")
    enforced = {name.strip(" ()") for layer in layers for name in layer.split("|")}
    table = PAGE[PAGE.index("| layer |") : PAGE.index("Codecs, manifest edits")]
    assert enforced <= set(re.findall(r"`([a-z_]+)`", table))
