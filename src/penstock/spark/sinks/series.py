"""The mapping of columns to points of time series, checked before anything is written."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Final, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from penstock.errors import ConfigError, InvalidInput
from penstock.spark.sinks.options import listed, name_of
from penstock.spark.sinks.wire import (
    RECORD_COLUMNS,
    Part,
    as_column,
    content,
    ends_of,
    field,
    fixed_rows,
    flag,
    joined,
    message,
    pieces,
    present,
    rows_of,
)

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

SeriesKind = Literal["counter", "gauge"]

SERIES_FORMAT: Final = "penstock-timeseries"
SERIES_OPTIONS: Final = (
    "description",
    "kind",
    "labels",
    "metric",
    "metric_column",
    "timestamp",
    "unit",
    "value",
)
METRIC_NAME: Final = r"[A-Za-z_:][A-Za-z0-9_:]*"
LABEL_NAME: Final = r"[A-Za-z_][A-Za-z0-9_]*"
_RESERVED: Final = "__"
_NUMBERS: Final = ("double", "float", "tinyint", "smallint", "int", "bigint")
_LABEL_MAP: Final = "map<string,string>"


@dataclass(frozen=True, slots=True, kw_only=True)
class SeriesLayout:
    """The label columns of the rows: string columns, and optionally one map of names to values."""

    columns: tuple[str, ...]
    map_column: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SeriesColumns:
    """The role of each column. Raises `ConfigError` for roles that no row can satisfy."""

    metric: str | None = None
    """The name of the metric, if all rows have the same one."""
    metric_column: str | None = None
    """The column with the name of the metric, if rows have different ones."""
    value: str = "value"
    timestamp: str = "timestamp"
    labels: tuple[str, ...] | None = None
    """None: all other columns."""
    kind: SeriesKind = "gauge"
    unit: str = ""
    description: str = ""

    def __post_init__(self) -> None:
        if (self.metric is None) == (self.metric_column is None):
            raise ConfigError("give either `metric`, a name for all rows, or `metric_column`, not both")
        if self.metric is not None and not re.fullmatch(METRIC_NAME, self.metric, re.ASCII):
            raise ConfigError(f"metric: expected letters, digits, '_' and ':', found {self.metric!r}")
        if self.kind not in ("counter", "gauge"):
            raise ConfigError(f"kind: expected counter or gauge, found {self.kind!r}")
        taken = [self.value, self.timestamp, *([self.metric_column] if self.metric_column else [])]
        taken += self.labels or ()
        if len(set(taken)) < len(taken):
            raise ConfigError(f"a column is named twice in {', '.join(taken)}")

    @classmethod
    def parse(cls, given: Mapping[str, str]) -> SeriesColumns:
        """Parse the options of the format. Raise `ConfigError` for an invalid one."""
        kind = given.get("kind", "gauge").strip().lower()
        if kind not in ("counter", "gauge"):
            raise ConfigError(f"kind: expected counter or gauge, found {given['kind']!r}")
        return cls(
            metric=given.get("metric"),
            metric_column=given.get("metric_column"),
            value=name_of("value", given.get("value", "value")),
            timestamp=name_of("timestamp", given.get("timestamp", "timestamp")),
            labels=listed(given.get("labels")),
            kind="counter" if kind == "counter" else "gauge",
            unit=given.get("unit", ""),
            description=given.get("description", ""),
        )

    def to_options(self) -> dict[str, str]:
        """Return the options that `parse` reads."""
        given = {"value": self.value, "timestamp": self.timestamp, "kind": self.kind}
        given |= {"unit": self.unit, "description": self.description}
        for name in ("metric", "metric_column"):
            if (text := getattr(self, name)) is not None:
                given[name] = text
        return given | ({} if self.labels is None else {"labels": ",".join(self.labels)})

    def layout(self, schema: StructType) -> SeriesLayout:
        """Return the label columns of this schema.

        Raise `ConfigError` if a column is missing or unsuitable.
        """
        kinds = {column.name: column.dataType.simpleString() for column in schema.fields}
        if len(kinds) < len(schema.fields):
            raise ConfigError(f"{SERIES_FORMAT}: a column occurs twice in {', '.join(schema.fieldNames())}")
        self._demand(kinds, self.value, _NUMBERS, "a number")
        self._demand(kinds, self.timestamp, ("timestamp",), "a timestamp")
        if self.metric_column is not None:
            self._demand(kinds, self.metric_column, ("string",), "a string")
        others = [n for n in kinds if n not in (self.value, self.timestamp, self.metric_column)]
        labels = others if self.labels is None else list(self.labels)
        for name in labels:
            self._check_label(kinds, name)
        maps = [name for name in labels if kinds[name] == _LABEL_MAP]
        if len(maps) > 1:
            raise ConfigError(f"{SERIES_FORMAT}: {' and '.join(maps)} are maps; at most one may be a map")
        return SeriesLayout(
            columns=tuple(name for name in labels if name not in maps), map_column=maps[0] if maps else None
        )

    def _demand(self, kinds: Mapping[str, str], name: str, right: tuple[str, ...], what: str) -> None:
        if name not in kinds:
            raise ConfigError(
                f"{SERIES_FORMAT}: the rows have no column {name!r}; they have {', '.join(kinds) or 'none'}"
            )
        if kinds[name] not in right:
            raise ConfigError(
                f"{SERIES_FORMAT}: column {name!r} is {kinds[name]}, and must be {what}: cast it"
            )

    def _check_label(self, kinds: Mapping[str, str], name: str) -> None:
        self._demand(kinds, name, (kinds.get(name, ""),), "")
        if kinds[name] == _LABEL_MAP:
            return
        if kinds[name] != "string":
            raise ConfigError(
                f"{SERIES_FORMAT}: column {name!r} is {kinds[name]}, but a label is a string: cast it, drop "
                "it, or list the label columns in `labels`"
            )
        if not re.fullmatch(LABEL_NAME, name, re.ASCII) or name.startswith(_RESERVED):
            raise ConfigError(
                f"{SERIES_FORMAT}: column {name!r} cannot be the name of a label, which has letters, digits "
                "and '_' and does not start with a digit or '__'. Rename it with AS"
            )


METRICS_PAYLOAD: Final = b"\x01\x01\x01\x00"
"""The metadata payload of OTLP metrics in a queue: version 1, metrics, protobuf."""
RECORD_BYTES: Final = 1 << 20
LABEL_BYTES_MAX: Final = 16 * 1024
"""The database's limit for the name and value of a label together."""
SERIES_BYTES_MAX: Final = 64 * 1024
"""The database's limit for all labels of a point together."""
HOURS_MAX: Final = 1000
"""The database's limit for the number of hours in one record."""

_HOUR_US: Final = 3_600_000_000
_YEAR_2554_US: Final = (1 << 64) // 1000
_POINT_BYTES: Final = 18
_TIME, _DOUBLE = 0x19, 0x21
_CUMULATIVE: Final = 2


def metrics_records(
    batches: Iterable[pa.RecordBatch], columns: SeriesColumns, layout: SeriesLayout
) -> Iterator[pa.RecordBatch]:
    """Yield a queue's records with the columns `value` and `metadata`.

    Raise `InvalidInput` for invalid points.
    """
    for batch in batches:
        if batch.num_rows:
            records = list(_requests(batch, columns, layout))
            payloads = [METRICS_PAYLOAD] * len(records)
            yield pa.RecordBatch.from_pydict({"value": records, "metadata": payloads}, RECORD_COLUMNS)


def _requests(batch: pa.RecordBatch, columns: SeriesColumns, layout: SeriesLayout) -> Iterator[bytes]:
    micros = _times(batch, columns)
    is_wide = int(micros.max() - micros.min()) // _HOUR_US >= HOURS_MAX - 1
    if is_wide:
        by_hour = np.argsort(micros // _HOUR_US, kind="stable")
        batch, micros = batch.take(pa.array(by_hour)), micros[by_hour]
    names: pa.Array | None = None
    if columns.metric_column is not None:
        names = _names(batch.column(columns.metric_column), columns.metric_column)
        order = pc.sort_indices(names)  # stable: the rows of a metric keep their order
        batch, names, micros = batch.take(order), names.take(order), micros[order.to_numpy()]
    labels: list[Part] = [_label(name, batch.column(name)) for name in layout.columns]
    if layout.map_column is not None:
        labels.append(_mapped(layout.map_column, batch.column(layout.map_column), layout.columns))
    points = field(1, *labels, _numbers(micros, batch.column(columns.value)))
    if pc.max(pc.binary_length(points)).as_py() > SERIES_BYTES_MAX:
        raise InvalidInput(f"all labels of a row together exceed {SERIES_BYTES_MAX} bytes in some rows")
    for first, last in pieces(points, RECORD_BYTES):
        for start, stop in _by_hours(micros, first, last) if is_wide else ((first, last),):
            yield _request(points, start, stop, names, columns)


def _by_hours(micros: npt.NDArray[np.int64], start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Yield the bounds of runs of these rows that contain at most `HOURS_MAX` hours."""
    hours = micros[start:stop] // _HOUR_US
    changes = start + 1 + np.flatnonzero(hours[1:] != hours[:-1])
    cuts = [start, *changes[HOURS_MAX - 1 :: HOURS_MAX].tolist(), stop]
    yield from pairwise(cuts)


def _request(
    points: pa.LargeBinaryArray, start: int, stop: int, names: pa.Array | None, columns: SeriesColumns
) -> bytes:
    """Return the rows from `start` to `stop` as one OTLP request, grouped by metric."""
    starts, called = [0], [columns.metric]
    if names is not None:
        runs = pc.run_end_encode(names[start:stop])
        starts, called = [0, *runs.run_ends.to_pylist()[:-1]], runs.values.to_pylist()
    metrics = []
    for place, (first, name) in enumerate(zip(starts, called, strict=True)):
        last = starts[place + 1] if place + 1 < len(starts) else stop - start
        metrics.append(_metric(str(name), content(points, start + first, start + last), columns))
    return message(1, message(2, b"".join(message(2, metric) for metric in metrics)))


def _metric(name: str, points: bytes, columns: SeriesColumns) -> bytes:
    about = message(1, name.encode())
    for number, text in ((2, columns.description), (3, columns.unit)):
        if text:
            about += message(number, text.encode())
    if columns.kind == "counter":
        return about + message(7, points + flag(2, _CUMULATIVE) + flag(3, 1))
    return about + message(5, points)


def _times(batch: pa.RecordBatch, columns: SeriesColumns) -> npt.NDArray[np.int64]:
    """Return the timestamps in microseconds since 1970. Raise `InvalidInput` for rows that are not points."""
    times = batch.column(columns.timestamp)
    for name, column in ((columns.timestamp, times), (columns.value, batch.column(columns.value))):
        if column.null_count:
            raise InvalidInput(
                f"{name} is null in {column.null_count} rows, but a point needs a time and a value: filter "
                "them out. In a pipeline, `on_null: drop` does this and counts them"
            )
    in_micros = times.cast(pa.timestamp("us", times.type.tz)).cast(pa.int64())
    micros: npt.NDArray[np.int64] = in_micros.to_numpy(zero_copy_only=False)
    if micros.min() <= 0 or micros.max() >= _YEAR_2554_US:
        raise InvalidInput(f"{columns.timestamp} is not between 1970 and 2554 in some rows")
    return micros


def _numbers(micros: npt.NDArray[np.int64], values: pa.Array) -> pa.LargeBinaryArray:
    """Return the encoded time and value of every point."""
    points = np.empty((len(micros), _POINT_BYTES), np.uint8)
    points[:, 0], points[:, 9] = _TIME, _DOUBLE
    points[:, 1:9] = _bytes_of(micros.astype("<u8") * 1000)
    floats = pc.cast(values, pa.float64(), safe=False)  # rounds large integers to the nearest float
    points[:, 10:] = _bytes_of(floats.to_numpy(zero_copy_only=False).astype("<f8"))
    return fixed_rows(points)


def _bytes_of(numbers: npt.NDArray[np.generic]) -> npt.NDArray[np.uint8]:
    return np.ascontiguousarray(numbers).view(np.uint8).reshape(len(numbers), 8)


def _names(column: pa.Array, name: str) -> pa.Array:
    if column.null_count:
        raise InvalidInput(f"{name} is null in {column.null_count} rows, but every row needs a metric name")
    distinct = pc.unique(column)
    wrong = distinct.filter(pc.invert(pc.match_substring_regex(distinct, f"^{METRIC_NAME}$")))
    if len(wrong):
        raise InvalidInput(
            f"{name} is {wrong[0].as_py()!r} in some rows: a metric's name has letters, digits, '_' and ':', "
            "and does not start with a digit"
        )
    _check_lengths(distinct, len("__name__"), name)
    return column


def _label(name: str, column: pa.Array) -> pa.LargeBinaryArray:
    """Return each row's attribute for this label, empty for null. Encode each distinct value once."""
    coded = column.dictionary_encode()
    _check_lengths(coded.dictionary, len(name), name)
    encoded = _attributes(message(1, name.encode()), as_column(coded.dictionary))
    return present(encoded.take(coded.indices))


def _mapped(name: str, column: pa.MapArray, taken: tuple[str, ...]) -> pa.LargeBinaryArray:
    """Return each row's attributes for the entries of a map column. A null map counts as empty."""
    if column.null_count:
        column = pc.fill_null(column, pa.scalar([], column.type))
    ends = np.asarray(column.offsets).astype(np.int64)
    keys, values = (part[ends[0] : ends[-1]] for part in (column.keys, column.items))
    distinct = pc.unique(keys)
    wrong = pc.or_(
        pc.invert(pc.match_substring_regex(distinct, f"^{LABEL_NAME}$")), pc.starts_with(distinct, "__")
    )
    wrong = pc.or_(wrong, pc.is_in(distinct, pa.array(taken, distinct.type)))
    if pc.any(wrong).as_py():
        found = distinct.filter(wrong)[0].as_py()
        raise InvalidInput(
            f"{name} has the key {found!r}, which is also a column or cannot be the name of a label. A name "
            "has letters, digits and '_' and does not start with a digit or '__'"
        )
    longest = pc.max(pc.binary_length(keys)).as_py() or 0
    _check_lengths(values, longest, name)
    encoded = present(_attributes(field(1, as_column(keys)), as_column(values)))
    return rows_of(np.frombuffer(encoded.buffers()[2] or b"", np.uint8), ends_of(encoded)[ends - ends[0]])


def _attributes(key: Part, values: pa.LargeBinaryArray) -> pa.LargeBinaryArray:
    """Return string attributes of points. An attribute is null if its value is null."""
    return field(7, joined(key, field(2, field(1, values))))


def _check_lengths(texts: pa.Array, name_bytes: int, name: str) -> None:
    longest = pc.max(pc.binary_length(texts)).as_py() or 0
    if name_bytes + longest > LABEL_BYTES_MAX:
        raise InvalidInput(
            f"{name} has a text of {longest} bytes; a label and its name have at most {LABEL_BYTES_MAX}"
        )
