"""Every deliberate bug fits the code, and names a test that exists. `make long` runs those tests."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest
from tests.mutants.mutant import Mutant
from tests.mutants.test_mutants import ALL_MUTANTS, ROOT, SOURCES

pytestmark = pytest.mark.mutants


@cache
def functions_of(path: Path) -> frozenset[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return frozenset(
        node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )


@pytest.mark.parametrize("mutant", ALL_MUTANTS, ids=lambda mutant: mutant.name.replace(" ", "-"))
def test_the_bug_fits_the_code_and_its_test_exists(mutant: Mutant) -> None:
    _, changed = mutant.changed(SOURCES)
    ast.parse(changed)
    file, _, name = mutant.test.partition("::")
    assert not name or name.rpartition("::")[2].partition("[")[0] in functions_of(ROOT / file)
