"""Samples as a compressed bit stream: timestamps as deltas of deltas, values as XOR with the previous one.

A stream is ordered by time, holds each timestamp once, and ends with a marker. An empty stream has no bytes.
The layout, most significant bit first:

    start 64 | 0 | first timestamp - start 14 | first value 64 | (timestamp, value)* | 1111 and 32 zeros

    timestamp   change of the distance d: 0 -> 0; -63..64 -> 10 and 7 bits; -255..256 -> 110 and 9;
                -2047..2048 -> 1110 and 12; else 1111 and 32
    value       XOR x with the previous value: 0 -> 0; within the window of the last one -> 10 and its
                bits; else 11, leading zeros 6, length - 1 in 6, bits

Values are stored as bits, so stale markers and other NaNs are preserved exactly.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Final

import numpy as np

from penstock.errors import Corrupt, InvalidInput
from penstock.timeseries.model import Floats, Integers, Mask, Samples, Times, Words


def leading_zeros(words: Words) -> Times:
    """Return the number of leading zero bits of each word; 64 for zero."""
    smeared = words.copy()
    for distance in (1, 2, 4, 8, 16, 32):
        smeared |= smeared >> np.uint64(distance)
    return 64 - np.bitwise_count(smeared).astype(np.int64)


def trailing_zeros(words: Words) -> Times:
    """Return the number of trailing zero bits of each word; 64 for zero."""
    lowest = words & (~words + np.uint64(1))
    return np.bitwise_count(lowest - np.uint64(1)).astype(np.int64)


def pack_fields(fields: Words, widths: Times, offsets: Times, word_count: int) -> bytes:
    """Write the low `width` bits of each field at its bit offset into `word_count` 8-byte words.

    Fields must not overlap or have bits above their width. A width is 0 to 64. Other bits are zero.
    """
    # The extra word receives the empty spill of a field that ends exactly at the end.
    words = np.zeros(word_count + 1, np.uint64)
    index = offsets >> 6
    room = 64 - (offsets & 63) - widths  # bits left in the first word after the field; negative if it spills
    fits = room >= 0
    # A shift by 64 is undefined: a field of width 0 at the start of a word has room 64 and no bits.
    shift = np.where(fits, np.minimum(room, 63), 0).astype(np.uint64)
    spill = np.where(fits, 0, -room).astype(np.uint64)
    # The bits are disjoint, so addition equals a bitwise OR.
    np.add.at(words, index, np.where(fits, fields << shift, fields >> spill))
    over = np.flatnonzero(~fits)
    np.add.at(words, index[over] + 1, fields[over] << (np.uint64(64) - spill[over]))
    return words[:word_count].astype(">u8").tobytes()


def words_of(streams: list[bytes]) -> tuple[Words, Integers, Integers]:
    """Return the streams as big-endian words, each on a word boundary and followed by two zero words.

    Return the words, and the bit offsets at which each stream starts and ends.
    """
    lengths = np.fromiter((len(stream) for stream in streams), np.intp, len(streams))
    padded = (lengths + 7) // 8 * 8 + 16
    starts = np.cumsum(padded) - padded
    joined = b"".join(
        stream.ljust(size, b"\0") for stream, size in zip(streams, padded.tolist(), strict=True)
    )
    words = np.frombuffer(joined, ">u8").astype(np.uint64)
    return words, starts * 8, (starts + lengths) * 8


_PARALLEL_MIN: Final = 24
"""Minimum number of streams for which parallel decoding is faster than sequential decoding."""

_HEADER_BITS: Final = 64 + 1 + 14 + 64
_MASKS: Final = np.array([(1 << width) - 1 for width in range(65)], np.uint64)
_CHANGE_PREFIX: Final = np.array([1, 2, 3, 4, 4], np.int64)
_CHANGE_BITS: Final = np.array([0, 7, 9, 12, 32], np.int64)
_LEADING_ONES: Final = np.array([0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 3, 4], np.int64)
"""Number of leading ones in each four-bit value."""
_INT64_MAX: Final = 2**63 - 1
_BEYOND: Final = "a stream of samples contains a timestamp beyond 64 bits"
_TWO_WORDS: Final = struct.Struct(">QQ")


def decode(stream: bytes) -> Samples:
    """Decode one stream. Raises `Corrupt` if it is truncated or breaks the format."""
    if not stream:
        return Samples.empty()
    if len(stream) * 8 < _HEADER_BITS:
        raise Corrupt(f"a stream of samples is truncated: {len(stream)} bytes are shorter than its header")
    one = _StreamReader(stream)
    timestamp, bits = one.header()
    timestamps, values = [timestamp], [bits]
    distance = 0
    while (change := one.change()) is not None:
        distance += change
        timestamp += distance
        bits ^= one.xor()
        timestamps.append(timestamp)
        values.append(bits)
    return _checked(timestamps, np.array(values, np.uint64))


class _StreamReader:
    """Reader of one stream, field by field."""

    def __init__(self, stream: bytes) -> None:
        # Padding lets every read take a fixed window. No field may end in the padding.
        self._padded = stream + bytes(16)
        self._total = len(stream) * 8
        self._at = 0
        self._lead, self._length = -1, 0

    def header(self) -> tuple[int, int]:
        """Read the first timestamp and the bits of the first value."""
        start = self._take(64)
        if self._take(1):
            raise Corrupt("a stream of samples starts with an unknown layout")
        timestamp = (start - (1 << 64) if start >> 63 else start) + self._take(14)
        return timestamp, self._take(64)

    def change(self) -> int | None:
        """Read the change of the distance to the next timestamp. Return None at the end."""
        take = self._take
        if not take(1):
            return 0
        width = 7 if not take(1) else 9 if not take(1) else 12 if not take(1) else 32
        raw = take(width)
        if not raw and width != 32:
            raise Corrupt("a stream of samples contains an explicit change of zero")
        if not raw:
            return None
        return raw if raw <= 1 << (width - 1) else raw - (1 << width)

    def xor(self) -> int:
        """Read the XOR of the next value with the previous one."""
        take = self._take
        if not take(1):
            return 0
        if take(1):
            self._lead, self._length = take(6), take(6) + 1
            if self._lead + self._length > 64:
                raise Corrupt("a stream of samples contains a window wider than a value")
        elif self._lead < 0:
            raise Corrupt("a stream of samples uses a window before it opens one")
        return take(self._length) << (64 - self._lead - self._length)

    def _take(self, width: int) -> int:
        at = self._at
        self._at = at + width
        if self._at > self._total:
            raise Corrupt("a stream of samples is truncated: it has no end")
        high, low = _TWO_WORDS.unpack_from(self._padded, at >> 3)
        bits: int = (high << 64 | low) >> (128 - width - (at & 7))
        return bits & ((1 << width) - 1)


def decode_many(streams: Sequence[bytes]) -> list[Samples]:
    """Decode each stream. Raises `Corrupt` if one is damaged."""
    filled = [stream for stream in streams if stream]
    if len(filled) < _PARALLEL_MIN:
        return [decode(stream) for stream in streams]
    if min(map(len, filled)) * 8 < _HEADER_BITS:
        raise Corrupt("a stream of samples is truncated: it is shorter than its header")
    decoded = iter(_ParallelReader(filled).read())
    return [next(decoded) if stream else Samples.empty() for stream in streams]


def _checked(timestamps: list[int], words: Words) -> Samples:
    if max(timestamps[0], timestamps[-1]) > _INT64_MAX:
        raise Corrupt(_BEYOND)
    times = np.array(timestamps, np.int64)
    _check_order(bool(np.all(times[1:] > times[:-1])))
    return Samples(times, words.view(np.float64))


def _check_order(in_order: bool) -> None:
    if not in_order:
        raise Corrupt("a stream of samples is not ordered by time")


class _ParallelReader:
    """Parallel reader of many streams, sample by sample. Streams that end are removed."""

    def __init__(self, streams: list[bytes]) -> None:
        self._words, start, self._end = words_of(streams)
        self._rows = np.arange(len(streams))
        self._at = start.astype(np.int64)
        self._stream_count = len(streams)

    def read(self) -> list[Samples]:
        """Decode streams in parallel. Raises `Corrupt` if any of them breaks the format."""
        steps = [self._header()]
        count = self._stream_count
        self._distance = np.zeros(count, np.int64)
        self._lead = np.full(count, -1, np.int64)
        self._length = np.zeros(count, np.int64)
        while len(self._rows):
            step = self._step(steps[-1])
            if len(step[0]):
                steps.append(step)
        return self._by_stream(steps)

    def _take(self, widths: Times | int) -> Words:
        """Read the next `widths` bits of each stream, at most 64."""
        index, shift = self._at >> 6, (self._at & 63).astype(np.uint64)
        words = self._words
        size = len(words) - 1
        high = words[np.minimum(index, size)] << shift
        # A shift by 64 is undefined, so use two shifts.
        low = words[np.minimum(index + 1, size)] >> np.uint64(1) >> (np.uint64(63) - shift)
        window = high | low
        self._at = self._at + widths
        if bool(np.any(self._at > self._end[self._rows])):
            raise Corrupt("a stream of samples is truncated: it has no end")
        shift_right = 64 - np.asarray(widths, np.int64)
        # A field of no bits is zero, whatever the window contains.
        taken: Words = (window >> np.minimum(shift_right, 63).astype(np.uint64)) & _MASKS[widths]
        return taken

    def _header(self) -> tuple[Integers, Times, Words]:
        start = self._take(64)
        layout = self._take(15)
        if bool(np.any(layout >> np.uint64(14))):
            raise Corrupt("a stream of samples starts with an unknown layout")
        timestamps = start.view(np.int64) + layout.astype(np.int64)
        if bool(np.any(timestamps < start.view(np.int64))):  # the sum overflowed
            raise Corrupt(_BEYOND)
        return self._rows, timestamps, self._take(64)

    def _step(self, before: tuple[Integers, Times, Words]) -> tuple[Integers, Times, Words]:
        """Read the next sample of every stream that has one."""
        change, ended = self._change()
        rows, timestamps, bits = before
        if bool(ended.any()):
            going = ~ended
            self._keep(going)
            change = change[going]
            rows, timestamps, bits = rows[going], timestamps[going], bits[going]
            if not len(rows):
                return rows, timestamps, bits
        self._distance = self._distance + change
        _check_order(bool(np.all((self._distance > 0) & (timestamps <= _INT64_MAX - self._distance))))
        return rows, timestamps + self._distance, bits ^ self._xor()

    def _keep(self, going: Mask) -> None:
        self._rows, self._at = self._rows[going], self._at[going]
        self._distance = self._distance[going]
        self._lead, self._length = self._lead[going], self._length[going]

    def _change(self) -> tuple[Times, Mask]:
        """Read the change of each distance, and which streams end here."""
        ones: Times = _LEADING_ONES[self._peek(4)]
        self._at = self._at + _CHANGE_PREFIX[ones]
        widths = _CHANGE_BITS[ones]
        raw = self._take(widths).astype(np.int64)
        ended: Mask = (ones == 4) & (raw == 0)
        if bool(np.any((widths > 0) & (raw == 0) & ~ended)):
            raise Corrupt("a stream of samples contains an explicit change of zero")
        limit = np.int64(1) << widths
        return np.where(raw <= limit >> 1, raw, raw - limit), ended

    def _peek(self, width: int) -> Times:
        """Return the next bits without advancing. Bits beyond the end are zeros."""
        index, shift = self._at >> 6, (self._at & 63).astype(np.uint64)
        high = self._words[index] << shift
        low = self._words[index + 1] >> np.uint64(1) >> (np.uint64(63) - shift)
        bits: Times = ((high | low) >> np.uint64(64 - width)).astype(np.int64)
        return bits

    def _xor(self) -> Words:
        code = self._peek(2)
        opens, again = code == 3, code == 2
        self._at = self._at + np.where(code >= 2, 2, 1)
        header = self._take(np.where(opens, 12, 0)).astype(np.int64)
        self._lead = np.where(opens, header >> 6, self._lead)
        self._length = np.where(opens, (header & 63) + 1, self._length)
        if bool(np.any(self._lead + self._length > 64)):
            raise Corrupt("a stream of samples contains a window wider than a value")
        if bool(np.any(again & (self._lead < 0))):
            raise Corrupt("a stream of samples uses a window before it opens one")
        changed = opens | again
        raw = self._take(np.where(changed, self._length, 0))
        shift = np.where(changed, 64 - self._lead - self._length, 0).astype(np.uint64)
        return raw << shift

    def _by_stream(self, steps: list[tuple[Integers, Times, Words]]) -> list[Samples]:
        rows = np.concatenate([step[0] for step in steps])
        order = np.argsort(rows, kind="stable")
        timestamps = np.concatenate([step[1] for step in steps])[order]
        values = np.concatenate([step[2] for step in steps])[order].view(np.float64)
        ends = np.cumsum(np.bincount(rows, minlength=self._stream_count)).tolist()
        return [
            Samples(timestamps[low:high], values[low:high])
            for low, high in zip([0, *ends[:-1]], ends, strict=True)
        ]


_CHANGE_MIN: Final = -(2**31) + 1
_CHANGE_MAX: Final = 2**31
_END: Final = 0b1111 << 32
_END_BITS: Final = 36
_TOO_FAR: Final = "samples of one stream are too far apart: the maximum distance is 24 days"
_ENCODED_AT_ONCE: Final = 32_768
_FIELDS_PER_SAMPLE: Final = 3  # timestamp, header of the value, bits of the value


def encode(samples: Samples) -> bytes:
    """Encode one stream. Raises `InvalidInput` if two samples are more than 24 days apart."""
    return encode_many([samples])[0]


def encode_many(batch: Sequence[Samples]) -> list[bytes]:
    """Encode one stream for each item. Samples may be in any order. The last one of equal timestamps wins.

    Raises `InvalidInput` if the distance between neighbours changes by more milliseconds than 32 bits hold.
    """
    ordered = [samples.in_order() for samples in batch]
    filled = [samples for samples in ordered if len(samples)]
    encoded = chain.from_iterable(map(_encoded, _pieces(filled)))
    return [next(encoded) if len(samples) else b"" for samples in ordered]


def merge_streams(streams: Sequence[bytes]) -> bytes:
    """Merge streams into one, oldest operand first. For equal timestamps, the newest operand wins.

    The function is associative. Raises `Corrupt` if a stream is damaged.
    """
    filled = [stream for stream in streams if stream]
    if len(filled) < 2:
        return filled[0] if filled else b""
    return encode(Samples.joined(decode_many(filled)))


def _pieces(batch: list[Samples]) -> Iterator[list[Samples]]:
    """Yield groups of streams to encode together, small enough that all fields stay in the cache."""
    piece: list[Samples] = []
    count = 0
    for samples in batch:
        piece.append(samples)
        count += len(samples)
        if count >= _ENCODED_AT_ONCE:
            yield piece
            piece, count = [], 0
    if piece:
        yield piece


def _encoded(batch: list[Samples]) -> list[bytes]:
    """Encode non-empty, ordered samples, field by field for all streams."""
    counts = np.fromiter(map(len, batch), np.int64, len(batch))
    first = np.cumsum(counts) - counts
    joined = Samples.joined(batch)
    is_first = np.zeros(len(joined), np.bool_)
    is_first[first] = True

    fields = np.zeros((len(joined), _FIELDS_PER_SAMPLE), np.uint64)
    widths = np.zeros((len(joined), _FIELDS_PER_SAMPLE), np.int64)
    fields[:, 0], widths[:, 0] = _timestamp_fields(joined.timestamps, is_first)
    _fill_value_fields(joined.values, is_first, fields, widths)
    return _packed(joined, counts, first, fields, widths)


def _timestamp_fields(timestamps: Times, is_first: Mask) -> tuple[Words, Times]:
    distance = np.zeros_like(timestamps)
    distance[1:] = timestamps[1:] - timestamps[:-1]
    distance[is_first] = 0  # a stream starts at its first timestamp
    if bool(np.any(distance < 0)):  # they are in order, so the difference overflowed 64 bits
        raise InvalidInput(_TOO_FAR)
    change = np.zeros_like(timestamps)
    change[1:] = distance[1:] - distance[:-1]
    change[is_first] = 0
    if len(change) and (int(change.min()) < _CHANGE_MIN or int(change.max()) > _CHANGE_MAX):
        raise InvalidInput(_TOO_FAR)
    fields = np.zeros(len(change), np.uint64)
    widths = np.ones(len(change), np.int64)
    # From the widest code to the narrowest, so that each change gets the narrowest code that holds it.
    for prefix, prefix_bits, bits in ((0b1111, 4, 32), (0b1110, 4, 12), (0b110, 3, 9), (0b10, 2, 7)):
        fitting = (change != 0) & (change > -(2 ** (bits - 1))) & (change <= 2 ** (bits - 1))
        raw = (change[fitting] & (2**bits - 1)) | (prefix << bits)
        fields[fitting] = raw.astype(np.uint64)
        widths[fitting] = prefix_bits + bits
    widths[is_first] = 0
    return fields, widths


def _fill_value_fields(values: Floats, is_first: Mask, fields: Words, widths: Times) -> None:
    bits = np.ascontiguousarray(values).view(np.uint64)
    xor = np.zeros_like(bits)
    xor[1:] = bits[1:] ^ bits[:-1]
    xor[is_first] = 0
    widths[:, 1] = np.where(is_first, 0, 1)
    changed = np.flatnonzero(xor)
    if not len(changed):
        return
    moved = xor[changed]
    leading, trailing = leading_zeros(moved), trailing_zeros(moved)
    stream: Times = np.cumsum(is_first, dtype=np.int64)[changed]
    new_window, lead, trail = _windows(leading, trailing, stream)
    length = 64 - lead - trail
    header = np.where(new_window, (0b11 << 12) | (lead << 6) | (length - 1), 0b10)
    fields[changed, 1] = header.astype(np.uint64)
    widths[changed, 1] = np.where(new_window, 14, 2)
    fields[changed, 2] = moved >> trail.astype(np.uint64)
    widths[changed, 2] = length


def _windows(leading: Times, trailing: Times, stream: Times) -> tuple[Mask, Times, Times]:
    """Return, for each XOR, whether it opens a window, and the window it is written in.

    Each window depends on the previous one, so this is the only loop over samples. It handles only integers,
    and only samples whose value changed.
    """
    opens: list[bool] = []
    leads: list[int] = []
    trails: list[int] = []
    lead, trail, current = 0, 0, 0
    for own_lead, own_trail, own_stream in zip(
        leading.tolist(), trailing.tolist(), stream.tolist(), strict=True
    ):
        opening = own_stream != current or own_lead < lead or own_trail < trail
        if opening:
            lead, trail, current = own_lead, own_trail, own_stream
        opens.append(opening)
        leads.append(lead)
        trails.append(trail)
    return np.array(opens, np.bool_), np.array(leads, np.int64), np.array(trails, np.int64)


def _packed(joined: Samples, counts: Times, first: Times, fields: Words, widths: Times) -> list[bytes]:
    """Pack each stream's header, fields and end marker. Each stream starts on a word boundary."""
    ends = np.cumsum(widths)  # over samples, then fields: the order in which they are written
    total = np.add.reduceat(widths.sum(axis=1), first)
    bits = _HEADER_BITS + total + _END_BITS
    words = (bits + 63) // 64
    start = (np.cumsum(words) - words) * 64
    before = ends[first * _FIELDS_PER_SAMPLE] - widths[first, 0]
    shift = np.repeat(start + _HEADER_BITS - before, counts * _FIELDS_PER_SAMPLE)
    offsets = ends - widths.ravel() + shift
    header_words = joined.values[first].view(np.uint64)
    streams = len(counts)
    all_fields = np.concatenate(
        [
            joined.timestamps[first].view(np.uint64),
            header_words,
            np.full(streams, _END, np.uint64),
            fields.ravel(),
        ]
    )
    all_widths = np.concatenate(
        [np.full(streams, 64), np.full(streams, 64), np.full(streams, _END_BITS), widths.ravel()]
    )
    all_offsets = np.concatenate([start, start + 79, start + bits - _END_BITS, offsets])
    packed = pack_fields(all_fields, all_widths, all_offsets, int(words.sum()))
    sizes = ((bits + 7) // 8).tolist()
    return [packed[at : at + size] for at, size in zip((start // 8).tolist(), sizes, strict=True)]
