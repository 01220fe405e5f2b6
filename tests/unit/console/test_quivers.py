"""Repeated reads of a Quiver data directory, beside the process that writes it."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from penstock.console.sources import read_quiver
from penstock.objects.local import Workers
from penstock.quiver import Quiver
from penstock.storage.fs import OsFileSystem
from penstock.up import QuiverPlace


def fill(directory: Path, segments: int) -> None:
    with Quiver.open(str(directory), maintenance=False) as quiver:
        quiver.register("lake")
        for number in range(segments):
            quiver.ingest(pa.record_batch({"n": [number]}))
            quiver.flush()


async def test_the_description_of_a_segment_is_read_once_by_each_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = QuiverPlace(name="q", part="collector", path=str(tmp_path / "quiver"))
    fill(tmp_path / "quiver", 3)
    read: list[str] = []
    really = OsFileSystem.read

    def reading(self: OsFileSystem, path: str, *more: object) -> bytes:
        if path.endswith(".meta.json"):
            read.append(path)
        return really(self, path, *more)  # type: ignore[arg-type]

    monkeypatch.setattr(OsFileSystem, "read", reading)
    sources = [Workers("one", 1), Workers("two", 1)]
    try:
        for _ in range(3):
            assert len((await sources[0].run(read_quiver, place)).segments) == 3
        assert len(read) == 3
        assert (await sources[1].run(read_quiver, place)).items == 3
        assert len(read) == 6, "what one source knows is its own"
        fill(tmp_path / "quiver", 1)
        read.clear()
        assert len((await sources[0].run(read_quiver, place)).segments) == 4
        assert len(read) == 1
    finally:
        for source in sources:
            source.close()
