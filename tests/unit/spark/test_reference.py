from __future__ import annotations

from pathlib import Path

import pytest

from penstock.spark.columns import COLUMNS
from penstock.spark.options import _NAMES

TEXT = (Path(__file__).parents[3] / "docs" / "reference" / "spark.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", sorted({*_NAMES, *COLUMNS} - {"path"}))
def test_the_reference_names_every_option_and_column(name: str) -> None:
    assert f"`{name}`" in TEXT
