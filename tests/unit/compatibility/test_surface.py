"""Nothing that users name changes without a golden file that says so."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from tests.unit.compatibility.surface import GOLDEN, PARTS

AGAIN = "python -m tests.unit.compatibility.surface"


def differences(want: Any, got: Any, path: str = "") -> Iterator[str]:
    if isinstance(want, dict) and isinstance(got, dict):
        for key in sorted(want.keys() | got.keys()):
            place = f"{path} / {key}" if path else key
            if key not in got:
                yield f"{place} is gone"
            elif key not in want:
                yield f"{place} is new"
            else:
                yield from differences(want[key], got[key], place)
    elif want != got:
        yield f"{path} was {want!r} and is {got!r}"


@pytest.mark.parametrize("part", PARTS)
def test_what_users_name_is_what_the_golden_file_says(part: str) -> None:
    want = json.loads((GOLDEN / f"{part}.json").read_text(encoding="utf-8"))
    found = list(differences(want, PARTS[part]()))
    assert not found, "\n".join([*found, f"for an addition, or an announced removal: {AGAIN}"])


def test_a_difference_names_its_place() -> None:
    want = {"a": {"x": 1, "y": "(one)"}, "b": {}}
    got = {"a": {"x": 1, "y": "(one, two=)"}, "c": {}}
    assert list(differences(want, got)) == ["a / y was '(one)' and is '(one, two=)'", "b is gone", "c is new"]
