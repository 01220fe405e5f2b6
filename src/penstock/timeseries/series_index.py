"""The ids of series by bucket: the image that each delta passes to the next one.

It only grows, so it is passed on without a copy. A delta keeps its own additions for its flush. Only the
coordinator's loop adds to the index. If a flush fails, the coordinator stops and the index is discarded, so
ids that were never stored are never used.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from penstock.clock import SYSTEM_CLOCK, Clock
from penstock.coordinator import FedSource, Position
from penstock.errors import InvalidInput
from penstock.timeseries.model import LABEL_BYTES_MAX, SERIES_BYTES_MAX, Bucket, Fingerprint, Labels, Metadata

_IDS_MAX: Final = 2**32 - 1
_SHOWN_MAX: Final = 200
_KEPT_BUCKETS: Final = 2
"""Number of buckets whose series stay in memory without writes."""
_EXPECTED_S: Final = 60.0
"""Time that buckets stay in memory for a writer to retry. Senders wait at most half a minute."""
_EXPECTED_MAX: Final = 1000
"""Limit on the buckets kept for retries of all writers. It equals the hours that one write may cover."""


class NewSeries(NamedTuple):
    """A series that is new in its bucket."""

    series_id: int
    labels: Labels
    fingerprint: Fingerprint
    metadata: Metadata


@dataclass(slots=True)
class BucketSeries:
    """The series of one bucket. `reserved` counts pending writes that need it."""

    ids: dict[Labels, int] = field(default_factory=dict)
    labels: dict[int, Labels] = field(default_factory=dict)
    fingerprints: dict[Fingerprint, int] = field(default_factory=dict)
    next_id: int = 0
    next_block: int = 0
    reserved: int = 0
    touched: int = 0
    """Number of freezes at the last write to the bucket."""
    damaged: Sequence[str] = ()
    """Descriptions of records left out when the bucket was read, each a name and a reason."""

    def lookup(
        self, labels: Sequence[Labels], metadata: Sequence[Metadata]
    ) -> tuple[list[int], list[NewSeries]]:
        """Return the id of each series and the new series. Do not change the bucket.

        Raises `InvalidInput` for labels that cannot be stored, and for two series with the same fingerprint.
        """
        known = self.ids
        found = [known.get(one) for one in labels]
        ids = [one for one in found if one is not None]
        if len(ids) == len(found):
            return ids, []
        return self._with_new(labels, metadata, found)

    def _with_new(
        self, labels: Sequence[Labels], metadata: Sequence[Metadata], found: list[int | None]
    ) -> tuple[list[int], list[NewSeries]]:
        ids: list[int] = []
        new: list[NewSeries] = []
        fresh: dict[Labels, int] = {}
        prints: dict[Fingerprint, Labels] = {}
        for one, about, series_id in zip(labels, metadata, found, strict=True):
            if series_id is None and (series_id := fresh.get(one)) is None:
                series_id = fresh[one] = self.next_id + len(new)
                fingerprint = _checked(one)
                if fingerprint in self.fingerprints or fingerprint in prints:
                    raise InvalidInput(f"series {one} has the fingerprint of another series")
                prints[fingerprint] = one
                new.append(NewSeries(series_id, one, fingerprint, about))
            ids.append(series_id)
        if self.next_id + len(new) > _IDS_MAX:
            raise InvalidInput("a bucket can hold at most 4,294,967,295 series")
        return ids, new

    def add(self, new: Iterable[NewSeries]) -> None:
        """Add the new series that `lookup` returned."""
        for one in new:
            self.ids[one.labels] = one.series_id
            self.labels[one.series_id] = one.labels
            self.fingerprints[one.fingerprint] = one.series_id
            self.next_id = one.series_id + 1

    def take_block(self) -> int:
        """Return the number of the next block and advance it."""
        number, self.next_block = self.next_block, self.next_block + 1
        return number


class SeriesIndex:
    """The buckets in memory for writes, the metadata of metrics, and the position of the feeding queue."""

    def __init__(
        self,
        *,
        families: dict[str, Metadata] | None = None,
        position: Position | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._buckets: dict[Bucket, BucketSeries] = {}
        self._expected: dict[Bucket, float] = {}
        self._clock = clock
        self.families = families if families is not None else {}
        self.source = FedSource(position)
        self.freezes = 0

    def __contains__(self, bucket: object) -> bool:
        return bucket in self._buckets

    def __getitem__(self, bucket: Bucket) -> BucketSeries:
        return self._buckets[bucket]

    def labels_of(self, bucket: Bucket) -> Mapping[int, Labels]:
        """Return the labels by id of a bucket in memory, including those of unflushed writes."""
        known = self._buckets.get(bucket)
        return known.labels if known is not None else {}

    def __iter__(self) -> Iterator[Bucket]:
        return iter(self._buckets)

    def load(self, bucket: Bucket, series: BucketSeries) -> None:
        """Add a bucket that was read from the storage. Call it once for each bucket."""
        assert bucket not in self._buckets, f"{bucket} was loaded twice"
        series.touched = self.freezes
        self._buckets[bucket] = series

    def reserve(self, buckets: Iterable[Bucket]) -> None:
        """Keep these buckets in memory until `release`."""
        for bucket in buckets:
            self._buckets[bucket].reserved += 1

    def release(self, buckets: Iterable[Bucket]) -> None:
        for bucket in buckets:
            self._buckets[bucket].reserved -= 1

    def expect(self, buckets: Iterable[Bucket]) -> None:
        """Keep these buckets in memory for a minute, for a writer that was asked to retry.

        Without this, a write whose preparation takes longer than its sender waits would start over each time.
        If too many buckets are expected, later ones are not kept, so that the first writers succeed.
        """
        now_s = self._clock.monotonic()
        self._expected = {bucket: until_s for bucket, until_s in self._expected.items() if until_s > now_s}
        for bucket in buckets:
            if bucket in self._expected or len(self._expected) < _EXPECTED_MAX:
                self._expected[bucket] = now_s + _EXPECTED_S

    def touch(self, bucket: Bucket) -> None:
        """Record a write to the bucket."""
        self._buckets[bucket].touched = self.freezes
        self._expected.pop(bucket, None)

    def forget(self, unflushed_max: int) -> list[Bucket]:
        """Drop buckets without recent writes, and return them.

        A bucket stays while a write holds it, and while one of up to `unflushed_max` unflushed deltas may
        contain parts of it that the storage does not have yet. It also stays while its writer is expected to
        retry.
        """
        now_s = self._clock.monotonic()
        idle = sorted(self._buckets, key=lambda bucket: self._buckets[bucket].touched)[:-_KEPT_BUCKETS]
        dropped = [
            bucket
            for bucket in idle
            if not self._buckets[bucket].reserved
            and self.freezes - self._buckets[bucket].touched > unflushed_max
            and self._expected.get(bucket, now_s) <= now_s
        ]
        for bucket in dropped:
            del self._buckets[bucket]
        return dropped


def check_labels(labels: Labels) -> None:
    """Check that labels can be stored. Raises `InvalidInput`."""
    _check_sizes(labels)
    if Labels.of(labels) != labels:
        raise InvalidInput(f"labels {labels} are not in order: build them with Labels.of")


def _check_sizes(labels: Labels) -> None:
    if 4 * sum(len(name) + len(value) for name, value in labels) <= LABEL_BYTES_MAX:
        return  # no character has more than four bytes
    sizes = [len(name) + len(value) for name, value in labels.encoded()]
    for (name, _), size in zip(labels, sizes, strict=True):
        if size > LABEL_BYTES_MAX:
            reason = f"label {name[:40]!r} takes {size} bytes, more than {LABEL_BYTES_MAX}"
            raise InvalidInput(f"series {_short(labels)}: {reason}")
    if sum(sizes) > SERIES_BYTES_MAX:
        raise InvalidInput(
            f"series {_short(labels)}: its {len(labels)} labels take {sum(sizes):,} bytes, more than "
            f"{SERIES_BYTES_MAX:,}"
        )


def _short(labels: Labels) -> str:
    text = f"{labels.metric[:80]}{{"
    for name, value in labels.without_name():
        text += f'{name[:40]}="{value[:40]}", '
        if len(text) > _SHOWN_MAX:
            return f"{text}…}}"
    return f"{text.removesuffix(', ')}}}"


def _checked(labels: Labels) -> Fingerprint:
    check_labels(labels)
    return labels.fingerprint()
