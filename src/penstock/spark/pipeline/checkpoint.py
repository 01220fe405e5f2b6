"""A reader of a query's Spark checkpoint: the query's id, and the end of each micro-batch.

metadata        {"id": "..."}: the query's id, which never changes
offsets/N       v1, settings, one JSON offset per source: written before micro-batch N runs
commits/N       written after micro-batch N is done
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from penstock.errors import Corrupt, Unsupported
from penstock.storage import OsFileSystem

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def parse_offsets(text: str, where: str) -> list[dict[str, object] | None]:
    """Parse a file in `offsets`. Return one offset per source, or None for a source without one.

    Raise `Corrupt` if the file is damaged.
    """
    lines = text.splitlines()
    if len(lines) < 3 or lines[0] != "v1":
        raise Corrupt(f"{where} is not an offset file of a known version: {text[:40]!r}")
    try:
        return [None if line == "-" else dict(json.loads(line)) for line in lines[2:]]
    except (ValueError, TypeError) as error:
        raise Corrupt(f"{where} does not decode: {error}") from error


class Checkpoint:
    """The checkpoint folder of a query, on a local or mounted disk or read through a Spark session.

    With `through_spark`, always use the session: a local path may belong to another machine.
    """

    def __init__(self, path: str, spark: SparkSession | None = None, *, through_spark: bool = False) -> None:
        self.path = path
        self._spark = spark
        self._local = None if through_spark else _local_path(path)

    @property
    def is_local(self) -> bool:
        return self._local is not None

    def prepare(self) -> None:
        """Create a local folder with Penstock's file modes. Spark creates its own files with the umask's."""
        if self._local is not None:
            OsFileSystem().make_dirs(os.path.abspath(self._local))

    @property
    def query_id(self) -> str | None:
        """The id of the query, or None before its first start."""
        text = self._read("metadata")
        if text is None:
            return None
        try:
            return str(json.loads(text)["id"])
        except (ValueError, TypeError, KeyError) as error:
            raise Corrupt(f"{self.path}/metadata does not decode: {error}") from error

    def offset(self, batch: int) -> dict[str, object] | None:
        """Return the end of micro-batch `batch` in the only source, or None if it is not planned yet."""
        text = self._read(f"offsets/{batch}")
        if text is None:
            return None
        offsets = parse_offsets(text, f"{self.path}/offsets/{batch}")
        if len(offsets) != 1:
            raise Corrupt(f"{self.path} belongs to a query with {len(offsets)} sources, not to a pipeline")
        return offsets[0]

    def planned(self) -> list[int]:
        """Return the numbers of the micro-batches that still have an `offsets` file, in order."""
        return self._numbers("offsets")

    def done(self) -> list[int]:
        """Return the numbers of the micro-batches that still have a `commits` file, in order."""
        return self._numbers("commits")

    def _numbers(self, folder: str) -> list[int]:
        if self._local is None:
            raise Unsupported(
                f"{self.path} cannot be listed from here; keep the checkpoint on a local or mounted disk"
            )
        try:
            names = os.listdir(self._local / folder)
        except FileNotFoundError:
            return []
        return sorted(int(name) for name in names if name.isdecimal())

    def _read(self, name: str) -> str | None:
        if self._local is not None:
            try:
                return (self._local / name).read_text(encoding="utf-8")
            except FileNotFoundError:
                return None
        if self._spark is None:
            raise Unsupported(f"{self.path} can be read only with a Spark session that reaches it")
        from pyspark.errors import AnalysisException

        try:
            rows = self._spark.read.text(f"{self.path.rstrip('/')}/{name}", wholetext=True).collect()
        except AnalysisException:
            return None
        return str(rows[0][0]) if rows else None


def _local_path(path: str) -> Path | None:
    if "://" not in path and not path.startswith("file:"):
        return Path(path)
    parts = urlsplit(path)
    return Path(unquote(parts.path)) if parts.scheme == "file" else None
