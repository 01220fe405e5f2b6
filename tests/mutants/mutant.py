"""A deliberate bug: a small change inside one function, and the one test that must notice it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Mutant"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """`old` stands exactly once in the function `where`; with `new` instead, `test` fails.

    `where` is a package or module below `penstock`, and the qualified name of a function in any of its
    files: `buffer:Producer.close`. Without a name it is the code outside of functions. Texts are indented
    as if the function began at the margin, so that a function can move without its mutants.
    """

    name: str
    where: str
    old: str
    new: str
    test: str

    @property
    def package(self) -> str:
        return self.where.partition(":")[0]

    def apply(self, sources: Path) -> None:
        """Change the file below `sources`. Fails unless `old` stands exactly once in one function."""
        path, text = self.changed(sources)
        path.write_text(text, encoding="utf-8")

    def changed(self, sources: Path) -> tuple[Path, str]:
        """The file that the bug is in, and its text with the bug. Fails as `apply` does."""
        found = [span for path in self._files(sources) for span in self._spans(path)]
        total = sum(text.count(self.old) for _, _, _, text in found)
        assert total == 1, f"the text to replace stands {total} times in what {self.where} names"
        path, (first, last), margin, text = next(span for span in found if self.old in span[3])
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        lines[first:last] = _indented(text.replace(self.old, self.new), margin)
        return path, "".join(lines)

    def _files(self, sources: Path) -> list[Path]:
        place = sources / "penstock" / self.package
        return sorted(place.rglob("*.py")) if place.is_dir() else [place.with_suffix(".py")]

    def _spans(self, path: Path) -> Iterator[tuple[Path, tuple[int, int], int, str]]:
        """Each part of the file that `where` means: its lines, its margin, its text at the margin."""
        name = self.where.partition(":")[2]
        text = path.read_text(encoding="utf-8")
        lines = text.splitlines(keepends=True)
        if not name:
            yield path, (0, len(lines)), 0, text
        elif f" {name.rpartition('.')[2]}" in text:
            for node in _named(ast.parse(text), name.split(".")):
                first = min([node.lineno, *(mark.lineno for mark in node.decorator_list)]) - 1
                last = node.end_lineno or first
                margin = node.col_offset
                own = "".join(line[margin:] if line.strip() else line for line in lines[first:last])
                yield path, (first, last), margin, own


_Named = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def _named(node: ast.AST, names: list[str]) -> Iterator[_Named]:
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, _Named):
            yield from _named(child, names)
        elif child.name == names[0]:
            if len(names) == 1:
                yield child
            else:
                yield from _named(child, names[1:])


def _indented(text: str, margin: int) -> list[str]:
    return [" " * margin + line if line.strip() else line for line in text.splitlines(keepends=True)]
