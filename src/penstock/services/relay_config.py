"""The configuration of a relay: its topic, its queue, and what it does with gaps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from penstock.buffer import InvalidInputError, ProducerConfig, Transaction
from penstock.errors import ConfigError
from penstock.topics import SEQ_MAX, check_topic_name
from penstock.units import DurationLike, convert_units, seconds_of

OnGap: TypeAlias = Literal["fail", "skip", "record"]
Value: TypeAlias = Literal["record", "data"]
Start: TypeAlias = int | Literal["earliest", "latest"]

GAPS: Final[tuple[OnGap, ...]] = ("fail", "skip", "record")
VALUES: Final[tuple[Value, ...]] = ("record", "data")


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayConfig:
    """The configuration of a relay. Raises `ConfigError` for values that cannot work.

    A batch is stored `flush_interval` after its first record, at `flush_size_bytes`, or when the topic has no
    more records, whichever comes first.
    """

    topic: str
    queue: ProducerConfig
    app: str = ""
    """The name of its position in the queue; by default `relay:TOPIC`. Topics of the same name on different
    servers need different names."""
    start: Start = "earliest"
    """Where to start while the queue has no position: after this sequence. Ignored afterwards."""
    on_gap: OnGap = "fail"
    """What to do about deleted records: fail, count them, or write a record that describes the gap."""
    value: Value = "record"
    """The content of a record in the queue: all fields of the topic's record, or only its data."""
    retry_for: DurationLike = "60s"
    """How long to retry while the server or the store is unavailable and nothing is relayed."""

    retry_for_s = seconds_of("retry_for")

    def __post_init__(self) -> None:
        convert_units(self)
        check_topic_name(self.topic)
        if self.on_gap not in GAPS:
            raise ConfigError(f"on_gap: expected {', '.join(GAPS)}, found {self.on_gap!r}")
        if self.value not in VALUES:
            raise ConfigError(f"value: expected {' or '.join(VALUES)}, found {self.value!r}")
        if not _is_start(self.start):
            raise ConfigError(f"start: expected earliest, latest or a sequence, found {self.start!r}")
        try:
            Transaction(app=self.name, version=0)
        except InvalidInputError as error:
            raise ConfigError(f"app: {error}; give a short one") from error

    @property
    def name(self) -> str:
        return self.app or f"relay:{self.topic}"


def _is_start(start: object) -> bool:
    if isinstance(start, int) and not isinstance(start, bool):
        return 0 <= start <= SEQ_MAX
    return start in ("earliest", "latest")
