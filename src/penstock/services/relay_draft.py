"""From pages of a topic to one batch of a queue. Plain values, no I/O.

A batch covers everything behind `after` up to `through`. What its records are is told beside them in the
metadata of the queue, run by run:

    {"topic": "clicks", "first": 11, "last": 20, "ts": 1748450001000}     records; `ts` is the last one's
    {"topic": "clicks", "gap": {"first": 21, "last": 30, "reason": "cap"}}     one record in place of a gap
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec

from penstock.codec import RecordChunk
from penstock.services.relay_config import OnGap, Value
from penstock.services.relay_errors import RelayGap, TopicChanged
from penstock.topics import Page, UnreadableRecord, unreadable

__all__ = ["Draft", "Gap", "Identity", "changed", "identity_of"]


class Gap(msgspec.Struct, frozen=True, kw_only=True):
    """Records `first` to `last` were gone before they could be relayed."""

    first: int
    last: int
    reason: str

    @property
    def missed(self) -> int:
        return self.last - self.first + 1


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """A record by which its topic is known again: numbers start over in a new topic, times do not."""

    seq: int = msgspec.field(name="$seq")
    ts_ms: int = msgspec.field(name="$ts")


class _Run(msgspec.Struct, kw_only=True, omit_defaults=True):
    topic: str
    first: int | None = None
    last: int | None = None
    ts: int | None = None
    gap: Gap | None = None


class _Data(msgspec.Struct, gc=False):
    data: msgspec.Raw


_ENCODER: Final = msgspec.json.Encoder()
_RUN: Final = msgspec.json.Decoder(_Run)
_IDENTITY: Final = msgspec.json.Decoder(Identity)
_DATA: Final = msgspec.json.Decoder(list[_Data])


@dataclass(slots=True, kw_only=True)
class Draft:
    """A batch in the making. It takes whole pages, so that `through` is always a place between records."""

    topic: str
    after: int
    value: Value
    on_gap: OnGap
    through: int = -1
    chunks: list[RecordChunk] = field(default_factory=list)
    count: int = 0
    """Records of the batch, those that tell of gaps included."""
    record_bytes: int = 0
    gaps: list[Gap] = field(default_factory=list)
    letters: list[tuple[UnreadableRecord, bytes]] = field(default_factory=list)
    """Records that decoders may refuse, and their text: they are set aside before the batch is appended."""
    last: Identity | None = None
    _runs: list[tuple[int, _Run]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.through = self.after

    def add(self, page: Page) -> None:
        """Take a page that was asked for behind `through`. Raises `RelayGap` and `TopicChanged`.

        After an error the draft is what it was.
        """
        gap = self._gap(page)
        if gap is not None:
            self._add_gap(gap)
        if page.fragments:
            self._add_records(page.fragments)
        self.through = page.next_from_seq

    def metadata(self) -> list[tuple[int, bytes]]:
        """(first record, payload) of every run."""
        return [(start, _ENCODER.encode(run)) for start, run in self._runs]

    def _gap(self, page: Page) -> Gap | None:
        gone = page.tombstone
        if gone is None:
            return None
        if gone.reason == "recreated" or page.next_from_seq < self.through:
            raise TopicChanged(changed(self.topic, self.through, page.head_seq))
        gap = Gap(first=max(gone.gap_from, self.through + 1), last=gone.gap_to, reason=gone.reason)
        if self.on_gap == "fail":
            raise RelayGap(
                f"records {gap.first} to {gap.last} of {self.topic} are gone ({gap.reason}) and were not "
                "relayed. To go on without them set on_gap to skip, or to record to keep a record that tells "
                "of them"
            )
        return gap

    def _add_gap(self, gap: Gap) -> None:
        self.gaps.append(gap)
        if self.on_gap == "record":
            self._runs.append((self.count, _Run(topic=self.topic, gap=gap)))
            self._keep([_ENCODER.encode({"gap": gap})])

    def _add_records(self, given: Sequence[bytes]) -> None:
        fragments = []
        for fragment in given:
            if (bad := unreadable(fragment)) is None:
                fragments.append(fragment)
            else:
                self.letters.append((bad, fragment))
        if not fragments:
            return
        first, last = _IDENTITY.decode(fragments[0]), _IDENTITY.decode(fragments[-1])
        run = self._runs[-1][1] if self._runs else None
        if run is None or run.gap is not None:
            self._runs.append((self.count, _Run(topic=self.topic, first=first.seq)))
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
    """What to say of a topic that ends before the position in it."""
    return (
        f"{topic} was relayed up to {through} and ends at {head} now: it was removed and made anew, or set "
        "back. Relay it under another name (app) to begin again"
    )


def identity_of(payloads: Sequence[bytes], topic: str) -> Identity | None:
    """The last record that metadata of a batch tells of; None where it tells of none of this topic."""
    for payload in reversed(payloads):
        try:
            run = _RUN.decode(payload)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return None
        if run.topic == topic and run.last is not None and run.ts is not None:
            return Identity(seq=run.last, ts_ms=run.ts)
    return None
