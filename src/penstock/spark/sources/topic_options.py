"""The options for reading `penstock-topic`, parsed and checked once."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from penstock.errors import ConfigError
from penstock.spark.sources.options import choice_option, cores, count_option, named_options
from penstock.spark.sources.topic_columns import GAP_COLUMNS, TOPIC_COLUMNS, parse_topic_columns
from penstock.spark.sources.topic_offsets import Position, parse_position
from penstock.topics import check_topic_name

OnTopicGap = Literal["fail", "skip", "record"]

TOPIC_FORMAT: Final = "penstock-topic"
DEFAULT_URL: Final = "http://127.0.0.1:4000"
RECORDS_PER_TRIGGER: Final = 1_000_000
"""A bound on the tasks' memory for a micro-batch over a long backlog, and on the cost of a retry."""

_NAMES: Final = (
    "apiKey",
    "columns",
    "endingOffsets",
    "maxRecordsPerTrigger",
    "onGap",
    "partitions",
    "path",
    "startingOffsets",
    "topic",
    "url",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicAddress:
    """The URL of a server and its API key, which `repr` omits."""

    url: str
    key: str | None = field(repr=False)

    @classmethod
    def of(cls, plain: Mapping[str, str]) -> TopicAddress:
        """Return the address from `url` and `apiKey`, or from TOPICS_URL and TOPICS_API_KEY on the driver."""
        url = plain.get("url") or os.environ.get("TOPICS_URL") or DEFAULT_URL
        return cls(url=url, key=plain.get("apiKey") or os.environ.get("TOPICS_API_KEY") or None)


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicOptions:
    """The values of `.option(...)`. Spark ignores the case of names; `_` in them is optional."""

    address: TopicAddress
    topics: tuple[str, ...]
    """`topic` (or `load(path)`): one or several comma-separated names, sorted here."""
    columns: tuple[str, ...] = tuple(TOPIC_COLUMNS)
    starting: Position = "earliest"
    ending: Position = "latest"
    """Batch queries only: the first sequence that is not read."""
    records_per_trigger: int = RECORDS_PER_TRIGGER
    on_gap: OnTopicGap = "fail"
    """The handling of deleted records: an error, a warning in the log, or a row that describes the gap."""
    partitions: int | None = None
    """The most tasks of a read. None: two per core of the driver."""

    @classmethod
    def parse(cls, given: Mapping[str, str]) -> TopicOptions:
        """Parse the options.

        Raise a `ConfigError` that names the option, and suggests one if it is unknown.
        """
        plain = named_options(given, _NAMES, TOPIC_FORMAT)
        if ("topic" in plain) == ("path" in plain):
            raise ConfigError(
                f"{TOPIC_FORMAT}: give the topic once, as option 'topic' or as the path of load()"
            )
        options = cls(
            address=TopicAddress.of(plain),
            topics=_topics(plain.get("topic") or plain.get("path") or ""),
            columns=parse_topic_columns(plain["columns"]) if "columns" in plain else tuple(TOPIC_COLUMNS),
            starting=parse_position(plain.get("startingOffsets", "earliest"), "startingOffsets"),
            ending=parse_position(plain.get("endingOffsets", "latest"), "endingOffsets"),
            records_per_trigger=count_option(plain, "maxRecordsPerTrigger") or RECORDS_PER_TRIGGER,
            on_gap=choice_option(plain, "onGap", ("fail", "skip", "record"), "fail"),
            partitions=count_option(plain, "partitions"),
        )
        missing = [name for name in GAP_COLUMNS if name not in options.columns]
        if options.on_gap == "record" and missing:
            raise ConfigError(
                f"columns: onGap=record describes gaps in {', '.join(GAP_COLUMNS)}; add {', '.join(missing)}"
            )
        return options

    @property
    def tasks(self) -> int:
        """The most tasks of a read."""
        return self.partitions or 2 * cores()


def _topics(text: str) -> tuple[str, ...]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise ConfigError("topic: expected a name, or several separated by commas, found nothing")
    if len(set(names)) < len(names):
        raise ConfigError(f"topic: {text!r} names a topic twice")
    return tuple(sorted(map(check_topic_name, names)))
