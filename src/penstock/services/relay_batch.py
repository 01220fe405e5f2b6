"""The parts of a relay that do no I/O: its settings, its errors, and building a queue batch from topic pages.

A batch covers every record after `after` up to `through`. The metadata of the queue describes its records in
runs:

    {"topic": "clicks", "first": 11, "last": 20, "ts": 1748450001000}     records; `ts` is the last one's
    {"topic": "clicks", "gap": {"first": 21, "last": 30, "reason": "cap"}}     one record in place of a gap

Errors in addition to those of the server and of the store:

    PenstockError
    ├── Fenced    RelayTaken     another process relays under the same name
    └── Corrupt   RelayGap       records were evicted or expired before they were relayed
                  TopicChanged   the topic is not the one that was relayed so far
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias

import msgspec

from penstock.buffer import InvalidInputError, ProducerConfig, Transaction
from penstock.codec import RecordChunk
from penstock.errors import ConfigError, Corrupt, Fenced
from penstock.topics import SEQ_MAX, Page, UnreadableRecord, check_topic_name, unreadable
from penstock.units import DurationLike, convert_units, seconds_of

OnGap: TypeAlias = Literal["fail", "skip", "record"]
Value: TypeAlias = Literal["record", "data"]
Start: TypeAlias = int | Literal["earliest", "latest"]

GAPS: Final[tuple[OnGap, ...]] = ("fail", "skip", "record")
VALUES: Final[tuple[Value, ...]] = ("record", "data")


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayConfig:
    """The settings of a relay. Raises `ConfigError` for invalid values.

    A batch is closed like that of a producer: `flush_interval` after its first record or at
    `flush_size_bytes`, whichever comes first, or when the topic has no more records.
    """

    topic: str
    queue: ProducerConfig
    app: str = ""
    """The name of the position in the queue, by default `relay:TOPIC`.

    Topics of the same name on different servers need different names.
    """
    start: Start = "earliest"
    """The sequence to start after if nothing has been relayed yet. Ignored afterwards."""
    on_gap: OnGap = "fail"
    """The handling of lost records: raise an error, count them only, or add a record that stands for them."""
    value: Value = "record"
    """The contents of a record in the queue: the whole record of the topic, or only its data."""
    retry_for: DurationLike = "60s"
    """How long to retry while the server or the store is unavailable and nothing progresses."""

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
            raise ConfigError(f"app: {error}; use a shorter name") from error

    @property
    def name(self) -> str:
        return self.app or f"relay:{self.topic}"


def _is_start(start: object) -> bool:
    if isinstance(start, int) and not isinstance(start, bool):
        return 0 <= start <= SEQ_MAX
    return start in ("earliest", "latest")


class RelayTaken(Fenced):
    """Another process relays under the same name. Nothing was appended. Stop one of the two."""


class RelayGap(Corrupt):
    """Records were removed from the topic before they were relayed, and `on_gap` is `fail`."""


class TopicChanged(Corrupt):
    """The topic was recreated or restored, so its sequences refer to other records now."""


class Gap(msgspec.Struct, frozen=True, kw_only=True):
    """The records `first` to `last`, which were removed before they could be relayed."""

    first: int
    last: int
    reason: str

    @property
    def missed(self) -> int:
        return self.last - self.first + 1


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """A record that identifies its topic. Sequences start over in a new topic, times do not."""

    seq: int = msgspec.field(name="$seq")
    ts_ms: int = msgspec.field(name="$ts")


class RelayRun(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A run of records in a batch, as described by its metadata: `first` to `last`, or a record for a gap."""

    topic: str
    first: int | None = None
    last: int | None = None
    ts: int | None = None
    gap: Gap | None = None


class _Data(msgspec.Struct, gc=False):
    data: msgspec.Raw


_ENCODER: Final = msgspec.json.Encoder()
_RUN: Final = msgspec.json.Decoder(RelayRun)
_IDENTITY: Final = msgspec.json.Decoder(Identity)
_DATA: Final = msgspec.json.Decoder(list[_Data])


@dataclass(slots=True, kw_only=True)
class RelayBatch:
    """A batch under construction. It takes whole pages, so `through` is always between records."""

    topic: str
    after: int
    value: Value
    on_gap: OnGap
    through: int = -1
    chunks: list[RecordChunk] = field(default_factory=list)
    count: int = 0
    """The number of records in the batch, including those that stand for gaps."""
    record_bytes: int = 0
    gaps: list[Gap] = field(default_factory=list)
    dead_letters: list[tuple[UnreadableRecord, bytes]] = field(default_factory=list)
    """The records that decoders may refuse, with their text. They are stored before the batch is appended."""
    last: Identity | None = None
    _runs: list[tuple[int, RelayRun]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.through = self.after

    def add(self, page: Page) -> None:
        """Add the page that follows `through`. Raise `RelayGap` and `TopicChanged`.

        After an error the batch is unchanged.
        """
        gap = self._gap(page)
        if gap is not None:
            self._add_gap(gap)
        if page.fragments:
            self._add_records(page.fragments)
        self.through = page.next_from_seq

    def metadata(self) -> list[tuple[int, bytes]]:
        """Return (first record, payload) of every run."""
        return [(start, _ENCODER.encode(run)) for start, run in self._runs]

    def _gap(self, page: Page) -> Gap | None:
        tombstone = page.tombstone
        if tombstone is None:
            return None
        if tombstone.reason == "recreated" or page.next_from_seq < self.through:
            raise TopicChanged(changed(self.topic, self.through, page.head_seq))
        gap = Gap(
            first=max(tombstone.gap_from, self.through + 1), last=tombstone.gap_to, reason=tombstone.reason
        )
        if self.on_gap == "fail":
            raise RelayGap(
                f"records {gap.first} to {gap.last} of {self.topic} are gone ({gap.reason}) and were not "
                "relayed. To continue without them set on_gap to skip, or to record to add a record that "
                "stands for them"
            )
        return gap

    def _add_gap(self, gap: Gap) -> None:
        self.gaps.append(gap)
        if self.on_gap == "record":
            self._runs.append((self.count, RelayRun(topic=self.topic, gap=gap)))
            self._keep([_ENCODER.encode({"gap": gap})])

    def _add_records(self, records: Sequence[bytes]) -> None:
        fragments = []
        for fragment in records:
            if (bad := unreadable(fragment)) is None:
                fragments.append(fragment)
            else:
                self.dead_letters.append((bad, fragment))
        if not fragments:
            return
        first, last = _IDENTITY.decode(fragments[0]), _IDENTITY.decode(fragments[-1])
        run = self._runs[-1][1] if self._runs else None
        if run is None or run.gap is not None:
            self._runs.append((self.count, RelayRun(topic=self.topic, first=first.seq)))
        self._runs[-1][1].last, self._runs[-1][1].ts = last.seq, last.ts_ms
        self.last = last
        self._keep(fragments if self.value == "record" else _data_of(fragments))

    def _keep(self, records: Sequence[bytes]) -> None:
        chunk = RecordChunk.of_list(records)
        self.chunks.append(chunk)
        self.count += len(chunk)
        self.record_bytes += chunk.record_bytes


def _data_of(fragments: Sequence[bytes]) -> list[bytes]:
    return [bytes(record.data) for record in _DATA.decode(b"[" + b",".join(fragments) + b"]")]


def changed(topic: str, through: int, head: int) -> str:
    """Return a message about a topic that ends before the relayed position."""
    return (
        f"{topic} was relayed up to {through} and now ends at {head}: it was deleted and created again, or "
        "restored from an older copy. To start over, relay it under another name (app)"
    )


def decode_run(payload: bytes) -> RelayRun | None:
    """Decode the metadata that a relay wrote for a run of records, or return None for other payloads."""
    try:
        return _RUN.decode(payload)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def identity_of(payloads: Sequence[bytes], topic: str) -> Identity | None:
    """Return the last record of a topic that the metadata of a batch names, or None."""
    for payload in reversed(payloads):
        run = decode_run(payload)
        if run is None:
            return None
        if run.topic == topic and run.last is not None and run.ts is not None:
            return Identity(seq=run.last, ts_ms=run.ts)
    return None
