"""The reference of the API lists exactly the existing paths."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.unit.console.hosts import FixedFleet

from penstock.console import Console, ConsoleSettings
from penstock.console import console as console_module

REFERENCE = Path(__file__).parents[3] / "docs" / "reference" / "console-api.md"
DOCUMENTED = re.compile(r"`(GET|POST) ([^`?]+)(?:\?[^`]*)?`")


async def test_every_path_is_documented_and_every_documented_path_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    served: set[tuple[str, str]] = set()

    class Listed(console_module.ConsoleApp):
        def __init__(self, access, static, routes) -> None:  # type: ignore[no-untyped-def]
            served.update((method.decode(), path.decode()) for method, path, _ in routes)
            super().__init__(access, static, routes)

    monkeypatch.setattr(console_module, "ConsoleApp", Listed)
    console = Console(FixedFleet(), ConsoleSettings(port=0))
    await console.start()
    await console.close()
    section = REFERENCE.read_text().partition("## Paths")[2].partition("\n### ")[0]
    assert served
    assert set(DOCUMENTED.findall(section)) == served
