from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest
from tests.unit.compatibility.surface import PACKAGES

import penstock

ROOT = Path(penstock.__file__).parent
MODULES = {
    ".".join(("penstock", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__"): path
    for path in sorted(ROOT.rglob("*.py"))
    if path.name != "__main__.py"
}


def surface(path: Path) -> list[str] | None:
    """The module's `__all__` as it is written, without running the module; None if it has none."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == ["__all__"]:
            names = ast.literal_eval(node.value)
            assert isinstance(names, list)
            return names
    return None


def is_public(name: str) -> bool:
    """Whether other packages and users may import from it: every package, and a few modules of their own."""
    return MODULES[name].name == "__init__.py" or name in PACKAGES


def reading_order(name: str) -> tuple[int, str]:
    """Constants, then classes, then functions: the order in which `ruff` keeps `__all__` sorted."""
    kind = 0 if len(name) > 1 and name.isupper() else 1 if name[:1].isupper() else 2
    return kind, name


LISTED = {name: names for name, path in MODULES.items() if (names := surface(path)) is not None}


@pytest.mark.parametrize("name", [name for name in MODULES if is_public(name)])
def test_every_public_module_lists_its_names(name: str) -> None:
    assert name in LISTED, "a public module has a literal __all__"


@pytest.mark.parametrize("name", LISTED)
def test_listed_names_are_in_order(name: str) -> None:
    names = LISTED[name]
    assert names == sorted(names, key=reading_order)
    assert len(names) == len(set(names))


@pytest.mark.parametrize("name", MODULES)
def test_every_module_can_be_imported_and_has_what_it_lists(name: str) -> None:
    module = importlib.import_module(name)
    assert [public for public in LISTED.get(name, []) if not hasattr(module, public)] == []


LAZY = [name for name, path in MODULES.items() if "lazy_exports(" in path.read_text() and is_public(name)]


@pytest.mark.parametrize("name", LAZY)
def test_no_name_of_a_lazy_interface_is_a_module(name: str) -> None:
    """The import of such a module would replace the name."""
    assert [public for public in LISTED[name] if f"{name}.{public}" in MODULES] == []


@pytest.mark.parametrize("name", [name for name, path in MODULES.items() if path.name == "__init__.py"])
def test_every_package_states_its_promise(name: str) -> None:
    assert importlib.import_module(name).__doc__


def test_the_package_itself_imports_nothing_heavy() -> None:
    program = "import sys, penstock; print(*sorted({name.partition('.')[0] for name in sys.modules}))"
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT.parent
    )
    loaded = set(run.stdout.split())
    assert "penstock" in loaded
    assert loaded.isdisjoint({"numpy", "pyarrow", "obstore", "yaml", "click", "rich", "asyncio"})


def test_the_types_are_marked_as_usable() -> None:
    assert (ROOT / "py.typed").is_file()
