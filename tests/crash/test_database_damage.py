"""Every file of a fed database, damaged in every way: reported or complete, never silent.

The files are SlateDB's. What it notices, an open or a read reports; what it does not notice, the position in
the queue shows, because rows and position are one write.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from pathlib import Path

import pytest
from tests.crash.damage import FEW, MANY, Damage, Tally, damages, files_below, replace_file, some_of
from tests.crash.test_position_damage import fed, produce

from penstock.errors import PenstockError, Unavailable

SECTION = "Databases"


async def make(root: Path) -> list[dict[str, bytes]]:
    """Eight records in the database and four more in the queue; copies of the files on the way."""
    older = []
    for first in (0, 3, 6):
        await produce(root, range(first, min(first + 3, 8)))
        assert await fed(root) == set(range(min(first + 3, 8)))
        older.append(files_below(root / "database"))
    await produce(root, range(8, 12))
    return older


async def check(root: Path, damage: Damage, caplog: pytest.LogCaptureFixture) -> tuple[str, str | None]:
    caplog.clear()
    try:
        await produce(root, range(12, 14))
        missing = set(range(14)) - await asyncio.wait_for(fed(root, open_timeout="2s"), 20)
    except PenstockError as error:
        return "refused", None if str(error) else "the error says nothing"
    reported = any(one.levelno >= logging.WARNING for one in caplog.records)
    if missing and not reported:
        return "wrong", f"records {sorted(missing)} are gone without a word"
    return ("lost and reported" if missing else "reported" if reported else "complete"), None


@pytest.mark.parametrize("parts", [FEW, pytest.param(MANY, marks=pytest.mark.long)], ids=["few", "many"])
@pytest.mark.timeout(600)
async def test_damage_to_any_file_of_a_fed_database_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, parts: tuple[int, ...]
) -> None:
    root, made = tmp_path / "root", tmp_path / "made"
    older = await make(root)
    shutil.copytree(root, made)
    files = files_below(root / "database")
    tally = Tally(SECTION)
    for file in some_of(SECTION, files, 1 if parts is FEW else len(files)):
        copies = [copy[file] for copy in older if file in copy]
        for damage in damages(file, files[file], copies, parts):
            shutil.rmtree(root)
            shutil.copytree(made, root)
            replace_file(root / "database", damage)
            tally.note(damage, *await check(root, damage, caplog))
    tally.finish()


async def test_an_open_ends_when_a_file_has_no_bytes(tmp_path: Path) -> None:
    await make(tmp_path)
    empty = min((tmp_path / "database" / "timeseries" / "compacted").iterdir())
    empty.write_bytes(b"")
    with pytest.raises(Unavailable, match="has no bytes"):
        await asyncio.wait_for(fed(tmp_path, open_timeout="2s"), 20)
