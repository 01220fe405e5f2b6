"""What may become of a durable file, the table that names every such file, and the count of what was tried.

The table is `docs/reference/durable-files.md`. A sweep damages the files that its scenario really wrote, and
fails if one of them has no row there, or if a row of its section was not written.
"""

from __future__ import annotations

import functools
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["Damage", "Tally", "damages", "files_below", "name_of", "names_in", "replace_file", "some_of"]

TABLE = Path(__file__).parents[2] / "docs" / "reference" / "durable-files.md"
FEW = (0, 60)
MANY = (0, 1, 7, 20, 35, 50, 65, 80, 90, 97, 99)


@dataclass(frozen=True, slots=True)
class Damage:
    """One file and what it becomes; None is a file that is gone."""

    file: str
    how: str
    data: bytes | None

    def __str__(self) -> str:
        return f"{self.file}, {self.how}"


def damages(file: str, raw: bytes, older: Iterable[bytes], parts: Sequence[int] = MANY) -> Iterator[Damage]:
    """Truncated and zeroed at several offsets, replaced by each older copy, and missing."""
    used = len(raw.rstrip(b"\0"))
    offsets = {used * part // 100 for part in parts} | ({max(used - 1, 0)} if len(parts) > 2 else set())
    for offset in sorted(offsets):
        if offset < len(raw):
            yield Damage(file, f"truncated to {offset}", raw[:offset])
            if used > offset:
                yield Damage(file, f"zeroed from {offset}", raw[:offset] + bytes(len(raw) - offset))
    for number, copy in enumerate(dict.fromkeys(older)):
        if copy != raw:
            yield Damage(file, f"older copy {number}", copy)
    yield Damage(file, "missing", None)


@functools.cache
def names_in(section: str) -> dict[str, re.Pattern[str]]:
    """The names of files in a section of the table: `<…>` stands for a part of a name, `…` for anything."""
    text = TABLE.read_text(encoding="utf-8")
    _, heading, rest = text.partition(f"\n## {section}\n")
    assert heading, f"{TABLE.name} has no section {section!r}"
    rows = [line for line in rest.partition("\n## ")[0].splitlines() if line.startswith("| `")]
    names = [name for row in rows for name in re.findall(r"`([^`]+)`", row.split("|")[1])]
    return {name: re.compile(_pattern(name)) for name in names}


def _pattern(name: str) -> str:
    parts = re.split(r"(<[^>]+>|…)", name)
    return "".join(
        ".*" if part == "…" else "[^/]+" if part.startswith("<") else re.escape(part) for part in parts
    )


def name_of(section: str, file: str) -> str:
    """The row of a file. Fails for one that the table does not know."""
    found = [name for name, pattern in names_in(section).items() if pattern.fullmatch(file)]
    assert found, f"{file} has no row under {section!r} in {TABLE.name}: add it, and what a start reports"
    return min(found, key=lambda name: name.count("<") + 10 * name.count("…"))


def some_of(section: str, files: Iterable[str], most: int) -> list[str]:
    """The files, but at most so many of each row of the table: the newest names, and the first."""
    rows: dict[str, list[str]] = {}
    for file in sorted(files):
        rows.setdefault(name_of(section, file), []).append(file)
    return [file for names in rows.values() for file in dict.fromkeys([*names[:1], *names[::-1][: most - 1]])]


@dataclass
class Tally:
    """What a sweep has tried. `outcomes` says how often it went how; `silent` must stay empty."""

    section: str
    tried: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    silent: list[str] = field(default_factory=list)
    seen: set[str] = field(default_factory=set)

    def note(self, damage: Damage, outcome: str, wrong: str | None = None) -> None:
        self.seen.add(name_of(self.section, damage.file))
        self.tried += 1
        self.outcomes[outcome] += 1
        if wrong is not None:
            self.silent.append(f"{damage}: {wrong}")

    def finish(self, *, but: Iterable[str] = ()) -> None:
        """Fail on silent losses, and on rows that no file stood for, other than `but`."""
        print(f"{self.section}: {self.tried} damages tried, {len(self.silent)} silent; {dict(self.outcomes)}")
        assert not self.silent, "\n".join(self.silent)
        missed = names_in(self.section).keys() - self.seen - set(but)
        assert not missed, f"no file of this kind was damaged: {sorted(missed)}"


def files_below(root: Path) -> dict[str, bytes]:
    """Every file in a directory, by its name from there."""
    return {
        os.path.relpath(path, root): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()
    }


def replace_file(root: Path, damage: Damage) -> None:
    path = root / damage.file
    if damage.data is None:
        path.unlink()
    else:
        path.write_bytes(damage.data)
