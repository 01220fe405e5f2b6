"""Which columns of a row make a point of a time series, checked before anything is written."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from penstock.errors import ConfigError
from penstock.spark.databases.options import listed, name_of

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

__all__ = [
    "LABEL_NAME",
    "METRIC_NAME",
    "SERIES_FORMAT",
    "SERIES_OPTIONS",
    "SeriesColumns",
    "SeriesKind",
    "SeriesLayout",
]

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
    """The labels of given rows: columns of text, and perhaps one that maps names to values."""

    columns: tuple[str, ...]
    map_column: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SeriesColumns:
    """What becomes of the columns. Raises `ConfigError` for what no row could satisfy."""

    metric: str | None = None
    """The name of the metric, if it is one for all rows."""
    metric_column: str | None = None
    """The column that names it otherwise."""
    value: str = "value"
    timestamp: str = "timestamp"
    labels: tuple[str, ...] | None = None
    """None: all other columns."""
    kind: SeriesKind = "gauge"
    unit: str = ""
    description: str = ""

    def __post_init__(self) -> None:
        if (self.metric is None) == (self.metric_column is None):
            raise ConfigError("give the name of the metric as `metric`, or the column of names, once")
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
        """From the options of the format."""
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
        """What `parse` reads."""
        told = {"value": self.value, "timestamp": self.timestamp, "kind": self.kind}
        told |= {"unit": self.unit, "description": self.description}
        for name in ("metric", "metric_column"):
            if (text := getattr(self, name)) is not None:
                told[name] = text
        return told | ({} if self.labels is None else {"labels": ",".join(self.labels)})

    def layout(self, schema: StructType) -> SeriesLayout:
        """The labels of rows with these columns. Raises `ConfigError` unless all are there and fit."""
        kinds = {column.name: column.dataType.simpleString() for column in schema.fields}
        if len(kinds) < len(schema.fields):
            raise ConfigError(f"{SERIES_FORMAT}: a column is there twice in {', '.join(schema.fieldNames())}")
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
            raise ConfigError(f"{SERIES_FORMAT}: {' and '.join(maps)} are maps, and one at most may be")
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
                f"{SERIES_FORMAT}: column {name!r} is {kinds[name]}, and a label is a string: cast it, drop "
                "it, or list the columns that are labels as `labels`"
            )
        if not re.fullmatch(LABEL_NAME, name, re.ASCII) or name.startswith(_RESERVED):
            raise ConfigError(
                f"{SERIES_FORMAT}: column {name!r} cannot be the name of a label: letters, digits and '_', "
                "no digit first, no '__' first. Give it another name with AS"
            )
