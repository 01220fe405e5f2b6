"""What an earlier version stored opens, with everything in it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.unit.compatibility.stored import GOLDEN, KINDS, unpack

SETS = sorted(path.name for path in GOLDEN.iterdir())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SETS)
def test_data_of_an_earlier_version_opens_after(name: str, kind: str, tmp_path: Path) -> None:
    unpack(GOLDEN / name / f"{kind}.tar.gz", tmp_path)
    want = json.loads((GOLDEN / name / "expected.json").read_text(encoding="utf-8"))[kind]
    _, read = KINDS[kind]
    assert json.loads(json.dumps(read(tmp_path))) == want
