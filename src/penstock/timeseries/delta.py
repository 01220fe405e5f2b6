"""Writes in memory: series by bucket. A write is checked before it changes anything, and has one epoch."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise, starmap
from typing import Final, TypeAlias

import cramjam
import numpy as np
import numpy.typing as npt

from penstock.coordinator import KEY_BYTES_MAX, Delta, Position
from penstock.errors import Corrupt, InvalidInput
from penstock.timeseries.keys import FAMILY_PREFIX
from penstock.timeseries.model import (
    MINUTE_MS,
    Bucket,
    Floats,
    Integers,
    Labels,
    Metadata,
    MetricType,
    Samples,
    Series,
    Temporality,
    Times,
)
from penstock.timeseries.series_index import NewSeries, SeriesIndex, check_labels

Ids: TypeAlias = npt.NDArray[np.uint32]

ROW_BYTES: Final = 20
_VERSION: Final = 1
_HEAD: Final = struct.Struct("<BI")
_LEVEL: Final = 1
_COUNT_MAX: Final = 2**26
"""Limit on the rows of a block, above any real flush, so that a damaged count cannot exhaust memory."""


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Samples as three arrays of equal length: series ids, timestamps, values."""

    ids: Ids
    timestamps: Times
    values: Floats

    @classmethod
    def empty(cls) -> Rows:
        return cls(np.empty(0, np.uint32), np.empty(0, np.int64), np.empty(0, np.float64))

    @classmethod
    def joined(cls, parts: Iterable[Rows]) -> Rows:
        """Concatenate rows, in the order of writing."""
        rows = list(parts)
        if len(rows) < 2:
            return rows[0] if rows else cls.empty()
        return cls(
            np.concatenate([part.ids for part in rows]),
            np.concatenate([part.timestamps for part in rows]),
            np.concatenate([part.values for part in rows]),
        )

    @classmethod
    def of_series(cls, ids: Sequence[int], samples: Sequence[Samples]) -> Rows:
        """Return rows of whole series."""
        counts = np.fromiter(map(len, samples), np.int64, len(samples))
        joined = Samples.joined(samples)
        repeated: Ids = np.repeat(np.array(ids, np.uint32), counts)
        return cls(repeated, joined.timestamps, joined.values)

    def __len__(self) -> int:
        return len(self.ids)

    def of(self, wanted: Ids) -> Rows:
        """Return only the rows with an id in `wanted`, which must be sorted."""
        if not len(wanted):
            return Rows.empty()
        place = np.searchsorted(wanted, self.ids)
        place[place == len(wanted)] = 0
        return self._kept(wanted[place] == self.ids)

    def between(self, start_ms: int, end_ms: int) -> Rows:
        """Return only the rows with `start_ms <= timestamp <= end_ms`."""
        return self._kept((self.timestamps >= start_ms) & (self.timestamps <= end_ms))

    def in_order(self) -> Rows:
        """Return rows sorted by id and time. Of rows with the same id and time, keep the one written last."""
        ids, times = self.ids, self.timestamps
        rising = (ids[1:] > ids[:-1]) | ((ids[1:] == ids[:-1]) & (times[1:] > times[:-1]))
        if bool(rising.all()):
            return self
        order = np.lexsort((times, ids))  # stable: among equal rows, the last written stays last
        ids, times = ids[order], times[order]
        last = np.append((ids[1:] != ids[:-1]) | (times[1:] != times[:-1]), True)
        return Rows(ids[last], times[last], self.values[order][last])

    def by_series(self) -> tuple[list[int], list[Samples]]:
        """Return the ids and the samples of each. The rows must be in order."""
        if not len(self):
            return [], []
        begins = np.flatnonzero(np.append(True, self.ids[1:] != self.ids[:-1]))
        bounds = [*begins.tolist(), len(self)]
        samples = [
            Samples(self.timestamps[low:high], self.values[low:high]) for low, high in pairwise(bounds)
        ]
        return self.ids[begins].tolist(), samples

    def _kept(self, chosen: npt.NDArray[np.bool_]) -> Rows:
        if bool(chosen.all()):
            return self
        return Rows(self.ids[chosen], self.timestamps[chosen], self.values[chosen])


def encode_block(rows: Rows) -> bytes:
    """Encode rows, which must be in order, as one record."""
    ids = np.diff(rows.ids, prepend=np.uint32(0)).astype("<u4", copy=False)
    times = np.diff(rows.timestamps, prepend=np.int64(0)).astype("<i8", copy=False)
    plain = ids.tobytes() + times.tobytes() + rows.values.astype("<f8", copy=False).tobytes()
    return _HEAD.pack(_VERSION, len(rows)) + bytes(cramjam.zstd.compress(plain, _LEVEL))


def decode_block(value: bytes) -> Rows:
    """Decode the rows of a record. Raises `Corrupt` if it breaks the format."""
    try:
        version, count = _HEAD.unpack_from(value)
        if version != _VERSION:
            raise Corrupt(f"a block of samples has the version {version}, which is not known")
        if count > _COUNT_MAX:
            raise Corrupt(f"a block of samples claims to hold {count:,} of them")
        plain = bytearray(count * ROW_BYTES)  # bounds the unpacked size
        size = cramjam.zstd.decompress_into(value[_HEAD.size :], plain) if count else 0
    except (struct.error, cramjam.DecompressionError) as error:
        raise Corrupt(f"a block of samples breaks its format: {error}") from None
    if size != len(plain):
        raise Corrupt(f"a block of {count} samples holds {size} bytes")
    ids = np.cumsum(np.frombuffer(plain, "<u4", count), dtype=np.uint32)
    times = np.cumsum(np.frombuffer(plain, "<i8", count, count * 4), dtype=np.int64)
    return Rows(ids, times, np.frombuffer(plain, "<f8", count, count * 12).astype(np.float64, copy=False))


HOURS_MAX: Final = 1000
"""Limit on the hours of one write. Each is read from the storage first, and stored as a separate record."""
_HOUR_MS = 60 * MINUTE_MS
_SERIES_BYTES = 400
"""Size of a new series in memory and in the batch, excluding its texts."""
_METADATA_BYTES_MAX = 65_535
_FAMILY_BYTES_MAX = KEY_BYTES_MAX - len(FAMILY_PREFIX)
_FAMILY_SUFFIXES = ("_bucket", "_count", "_sum")


@dataclass(frozen=True, slots=True, eq=False)
class SeriesPart:
    """The part of a write that belongs to one bucket: each series with its sample count, and all samples."""

    labels: Sequence[Labels]
    metadata: Sequence[Metadata]
    counts: Integers
    timestamps: Times
    values: Floats


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SeriesWrite:
    """A write to one or more buckets. `position` is its position in a queue, if it came from one."""

    parts: Mapping[Bucket, SeriesPart]
    families: Mapping[str, Metadata]
    text_bytes: int
    """Approximate size of labels and metadata, counted once, because all hours share them."""
    position: Position | None = None


def prepare_write(
    series: Sequence[Series], families: Mapping[str, Metadata] | None = None, position: Position | None = None
) -> SeriesWrite:
    """Prepare a write of these series. Raises `InvalidInput` for times out of range or unstorable metadata.

    Also raises it for more than `HOURS_MAX` hours, unless there is a position: a batch of a queue is one
    write of many records, and each record has already been checked.
    """
    about = dict(families or {})
    for one in series:
        _check_metadata(
            one.metadata, one.labels
        )  # check each one: a new series stores its own metadata, not its family's
        if one.metadata.metric_type is not MetricType.UNKNOWN or one.metadata.description:
            about.setdefault(_family(one), one.metadata)
    for name, known in about.items():
        _check_name(name)
        _check_metadata(known, name)
    parts = _parts([one for one in series if len(one.samples)], HOURS_MAX if position is None else None)
    texts = _label_bytes(one.labels for one in series) + sum(starmap(_family_bytes, about.items()))
    return SeriesWrite(parts=parts, families=about, text_bytes=texts, position=position)


def write_size(write: SeriesWrite) -> int:
    """Return the approximate size of an unapplied write, in the units of `SeriesDelta.estimate_size`."""
    return sum(ROW_BYTES * len(part.values) for part in write.parts.values()) + write.text_bytes


def _label_bytes(series: Iterable[Labels]) -> int:
    return sum(map(len, chain.from_iterable(chain.from_iterable(series))))


def _family_bytes(family: str, about: Metadata) -> int:
    return len(family) + len(about.unit) + len(about.description)


def _check_name(family: str) -> None:
    if len(_utf8(family)) > _FAMILY_BYTES_MAX:
        raise InvalidInput(f"metadata for a name of more than {_FAMILY_BYTES_MAX:,} bytes: {family[:80]!r}")


def _check_metadata(about: Metadata, whose: Labels | str) -> None:
    """Check that metadata can be stored, because a failed flush would stop the database.

    Raises `InvalidInput`.
    """
    for text in (about.unit, about.description):
        if not isinstance(text, str) or _size(text) > _METADATA_BYTES_MAX:
            found = f"not a text of at most {_METADATA_BYTES_MAX:,} bytes: {text!r:.40}"
            raise InvalidInput(f"the metadata of {str(whose)[:80]!r}: {found}")
    if not isinstance(about.metric_type, MetricType) or not isinstance(about.temporality, Temporality):
        found = f"{about.metric_type!r} and {about.temporality!r}"
        raise InvalidInput(
            f"the metadata of {str(whose)[:80]!r}: not a metric type and a temporality: {found}"
        )


def check_series(series: Sequence[Series]) -> None:
    """Raise `InvalidInput` for series that `prepare_write` or, later, the delta would refuse."""
    prepare_write(series)
    for one in series:
        check_labels(one.labels)


def _family(series: Series) -> str:
    """Return the name of the metric. For a histogram or summary, strip the suffixes of its series."""
    name = series.labels.metric
    if series.metadata.metric_type in (MetricType.HISTOGRAM, MetricType.SUMMARY):
        for suffix in _FAMILY_SUFFIXES:
            name = name.removesuffix(suffix)
    return name


def _size(text: str) -> int:
    """Return the length in UTF-8. Raises `InvalidInput`."""
    return len(text) if text.isascii() else len(_utf8(text))


def _utf8(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise InvalidInput(f"metadata is not text that UTF-8 can encode: {error}") from None


def _parts(series: list[Series], hours_max: int | None) -> dict[Bucket, SeriesPart]:
    if not series:
        return {}
    samples = Samples.joined(one.samples for one in series)
    counts = np.fromiter((len(one.samples) for one in series), np.intp, len(series))
    labels, metadata = [one.labels for one in series], [one.metadata for one in series]
    low = _hour_of(series, samples, samples.timestamps.argmin())
    high = _hour_of(series, samples, samples.timestamps.argmax())
    if low == high:
        return {low: SeriesPart(labels, metadata, counts, samples.timestamps, samples.values)}
    hours = samples.timestamps // _HOUR_MS
    order = np.argsort(hours, kind="stable")  # within an hour: series by series, in the order written
    hours, owner = hours[order], np.repeat(np.arange(len(series)), counts)[order]
    times, values = samples.timestamps[order], samples.values[order]
    begins = _begins(hours)
    if hours_max is not None and len(begins) > hours_max:
        raise InvalidInput(
            f"the write has samples of {len(begins):,} hours, more than {hours_max:,}: send it in parts"
        )
    parts = {}
    for start, stop in pairwise((*begins.tolist(), len(hours))):
        members = owner[start:stop]
        firsts = _begins(members)
        places = members[firsts].tolist()
        parts[Bucket(int(hours[start]) * 60)] = SeriesPart(
            [labels[place] for place in places],
            [metadata[place] for place in places],
            np.diff(firsts, append=len(members)).astype(np.intp, copy=False),
            times[start:stop],
            values[start:stop],
        )
    return parts


def _hour_of(series: list[Series], samples: Samples, place: np.intp) -> Bucket:
    """Return the hour of one sample. Raises `InvalidInput` that names its series."""
    try:
        return Bucket.at(int(samples.timestamps[place]))
    except InvalidInput as error:
        ends = np.cumsum([len(one.samples) for one in series])
        owner = series[int(np.searchsorted(ends, place, side="right"))]
        raise InvalidInput(f"series {str(owner.labels)[:200]}: {error}") from None


def _begins(values: Integers) -> Integers:
    """Return the positions where the value changes."""
    begins: Integers = np.flatnonzero(np.append(True, values[1:] != values[:-1]))
    return begins


@dataclass(slots=True)
class BucketDelta:
    """The additions to one bucket since the last flush. The samples are stored as block number `block`."""

    block: int
    new: list[NewSeries] = field(default_factory=list)
    chunks: list[Rows] = field(default_factory=list)


class SeriesDelta(Delta[SeriesWrite, SeriesIndex]):
    """Series and samples since the last flush."""

    directory: SeriesIndex

    def __init__(self, *, unflushed_max: int) -> None:
        """Create an empty delta. Up to `unflushed_max` other deltas may wait for their flush."""
        self._unflushed_max = unflushed_max
        self._size = 0
        self.buckets: dict[Bucket, BucketDelta] = {}
        self.families: dict[str, Metadata] = {}
        self.position: Position | None = None
        self.samples = 0

    def init(self, image: SeriesIndex) -> None:
        self.directory = image

    def apply_one(self, write: SeriesWrite) -> None:
        """Apply all of the write, or raise and apply nothing."""
        directory = self.directory
        directory.release(write.parts)
        with directory.source.taking(write.position):
            self._take(write)

    def _take(self, write: SeriesWrite) -> None:
        directory = self.directory
        looked_up = [
            (bucket, part, directory[bucket].lookup(part.labels, part.metadata))
            for bucket, part in write.parts.items()
        ]
        for bucket, part, (ids, new) in looked_up:
            self._add(bucket, part, ids, new)
        self._describe(write.families)
        if write.position is not None:
            self.position = write.position

    def _add(self, bucket: Bucket, part: SeriesPart, ids: list[int], new: list[NewSeries]) -> None:
        known = self.directory[bucket]
        self.directory.touch(bucket)
        changed = self.buckets.get(bucket)
        if changed is None:
            changed = self.buckets[bucket] = BucketDelta(known.take_block())
        if new:
            known.add(new)
            changed.new += new
            self._size += 3 * _label_bytes(one.labels for one in new)
            self._size += sum(_SERIES_BYTES + len(one.metadata.unit) for one in new)
        repeated = np.repeat(np.array(ids, np.uint32), part.counts)
        changed.chunks.append(Rows(repeated, part.timestamps, part.values))
        self.samples += len(repeated)
        self._size += ROW_BYTES * len(repeated)

    def _describe(self, families: Mapping[str, Metadata]) -> None:
        known = self.directory.families
        for name, metadata in families.items():
            if known.get(name) != metadata:
                known[name] = self.families[name] = metadata
                self._size += _SERIES_BYTES + 2 * _family_bytes(name, metadata)

    def estimate_size(self) -> int:
        return self._size

    def freeze(self) -> SeriesIndex:
        self.directory.freezes += 1
        self.directory.forget(self._unflushed_max + 1)
        return self.directory
