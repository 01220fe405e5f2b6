"""Links of the documentation site, checked by its build tool."""

from __future__ import annotations

import importlib.util
from pathlib import Path

TOOL = Path(__file__).parents[3] / "tools" / "docs_site.py"
_spec = importlib.util.spec_from_file_location("docs_site", TOOL)
assert _spec is not None
assert _spec.loader is not None
docs_site = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(docs_site)


def lost(text: str) -> list[str]:
    _, found = docs_site.with_links("how-to/console.md", text, {"how-to/console.md": text})
    return list(found)


def test_a_link_to_a_picture_is_valid_only_if_the_picture_exists() -> None:
    assert lost("![here](../images/console-trace.png)") == []
    assert lost("![gone](../images/console-gone.png)") == ["../images/console-gone.png"]
    assert lost("![gone](../../deploy/none.png)") == ["../../deploy/none.png"]
