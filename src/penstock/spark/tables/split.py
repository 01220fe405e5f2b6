"""Rows divided by the values of their partition columns. Pure, one pass of Arrow kernels per batch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

import numpy as np
import pyarrow as pa

from penstock.errors import InvalidInput
from penstock.spark.tables.table import PartitionValues

__all__ = ["NULL_FOLDER", "exact_folder", "safe_folder", "split"]

NULL_FOLDER: Final = "__HIVE_DEFAULT_PARTITION__"
"""The folder that every reader of such tables takes for null."""

_TEXT_MAX: Final = 100
_UNSAFE: Final = re.compile(r"[^A-Za-z0-9_.+-]")
# What readers would take apart or decode, and what the stores' own keys leave out.
_MISREAD: Final = re.compile(r'[\x00-\x1f"#%\'*/:=?\\{}\[\]^<>|`~\x7f-\x9f]')


def split(
    batch: pa.RecordBatch, columns: Sequence[str], *, keep: bool
) -> list[tuple[PartitionValues, pa.RecordBatch]]:
    """The rows of `batch` for each combination of values in `columns`; the order inside one is kept.

    With `keep` the columns stay in the rows. Without, the empty string counts as null: folders cannot tell
    them apart, and other writers do the same.
    """
    if not batch.num_rows:
        return []
    rest = batch if keep else batch.drop_columns(list(columns))
    encoded = [_encode(batch.column(name), keep) for name in columns]
    codes = np.zeros(batch.num_rows, dtype=np.int64)
    for indices, texts in encoded:
        codes = codes * len(texts) + indices
    starts, order = _groups(codes)
    if order is not None:
        rest = rest.take(pa.array(order))
    found: list[tuple[PartitionValues, pa.RecordBatch]] = []
    for start, end in zip(starts, [*starts[1:], batch.num_rows], strict=True):
        row = int(order[start]) if order is not None else start
        values = tuple(
            (name, texts[indices[row]]) for name, (indices, texts) in zip(columns, encoded, strict=True)
        )
        found.append((values, rest.slice(start, end - start)))
    return found


def _groups(codes: np.ndarray) -> tuple[list[int], np.ndarray | None]:
    """Where each run of equal codes starts, and the order of rows that makes the runs (None: as they are)."""
    if (codes == codes[0]).all():
        return [0], None
    order = np.argsort(codes, kind="stable")
    ordered = codes[order]
    starts = np.flatnonzero(np.diff(ordered, prepend=ordered[0] - 1))
    return [int(start) for start in starts], order


def _encode(column: pa.Array, keep: bool) -> tuple[np.ndarray, list[str | None]]:
    """For every row the number of its value, and the values as text."""
    encoded = column.dictionary_encode(null_encoding="encode")
    return encoded.indices.to_numpy(zero_copy_only=False), [
        _text(value) if value != "" or keep else None for value in encoded.dictionary.to_pylist()
    ]


def _text(value: object) -> str | None:
    if isinstance(value, bool):
        return "true" if value else "false"
    return None if value is None else str(value)


def safe_folder(partition: PartitionValues) -> str:
    """A folder for these values where only people read its name: the table knows the values itself."""
    return "/".join(f"{_clean(name)}={_clean(value)}" for name, value in partition)


def _clean(text: str | None) -> str:
    return NULL_FOLDER if text is None else _UNSAFE.sub("_", text)[:_TEXT_MAX]


def exact_folder(partition: PartitionValues) -> str:
    """The folder that readers take the values from. Raises `InvalidInput` for one that fits no path."""
    for name, value in partition:
        misread = _MISREAD.search(value or "")
        if misread:
            raise InvalidInput(
                f"partition column {name!r} has the value {value!r}: {misread.group()!r} cannot stand in the "
                "name of a folder that all readers understand. Replace it in the query "
                f"(regexp_replace({name}, ...)), divide by another column, or write a Delta table"
            )
    return "/".join(f"{name}={NULL_FOLDER if value is None else value}" for name, value in partition)
