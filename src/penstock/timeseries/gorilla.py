"""Samples as a compressed stream of bits: timestamps by the change of their distance, values by XOR.

A stream is in order of time, holds each timestamp once, and ends with a marker. No samples are no
bytes. The layout, most significant bit first:

    start 64 | 0 | first timestamp - start 14 | first value 64 | (timestamp, value)* | 1111 and 32 zeros

    timestamp   change of the distance d: 0 -> 0; -63..64 -> 10 and 7 bits; -255..256 -> 110 and 9;
                -2047..2048 -> 1110 and 12; else 1111 and 32
    value       XOR x with the value before: 0 -> 0; within the window of the last one -> 10 and its
                bits; else 11, leading zeros 6, length - 1 in 6, bits

Values are carried as bits, so a stale marker and any other NaN come back as they were.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Final

import numpy as np

from penstock.errors import InvalidInput
from penstock.timeseries.arrays import Floats, Mask, Times, Words
from penstock.timeseries.bits import leading_zeros, pack_fields, trailing_zeros
from penstock.timeseries.gorilla_decoding import decode, decode_many
from penstock.timeseries.model import Samples

__all__ = ["decode", "decode_many", "encode", "encode_many", "merge_streams"]

_CHANGE_MIN: Final = -(2**31) + 1
_CHANGE_MAX: Final = 2**31
_HEADER_BITS: Final = 64 + 1 + 14 + 64
_END: Final = 0b1111 << 32
_END_BITS: Final = 36
_TOO_FAR: Final = "samples of one stream are too far apart: at most 24 days between two"
_ENCODED_AT_ONCE: Final = 32_768
_FIELDS_PER_SAMPLE: Final = 3  # timestamp, header of the value, bits of the value


def encode(samples: Samples) -> bytes:
    """One stream. Raises `InvalidInput` if two samples are more than 24 days apart."""
    return encode_many([samples])[0]


def encode_many(batch: Sequence[Samples]) -> list[bytes]:
    """A stream for each. Samples may come in any order; of one timestamp the last one counts.

    Raises `InvalidInput`, with nothing encoded, if the distance between two neighbours changes by more
    than 32 bits of milliseconds hold.
    """
    ordered = [samples.in_order() for samples in batch]
    filled = [samples for samples in ordered if len(samples)]
    encoded = chain.from_iterable(map(_encoded, _pieces(filled)))
    return [next(encoded) if len(samples) else b"" for samples in ordered]


def merge_streams(streams: Sequence[bytes]) -> bytes:
    """One stream of all, oldest operand first: of one timestamp the newest operand counts.

    Associative. Raises `Corrupt` if a stream is damaged.
    """
    filled = [stream for stream in streams if stream]
    if len(filled) < 2:
        return filled[0] if filled else b""
    return encode(Samples.joined(decode_many(filled)))


def _pieces(batch: list[Samples]) -> Iterator[list[Samples]]:
    """Streams to encode at once: few enough that the fields of all stay in the cache."""
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
    """Streams of samples that are in order, none of them empty: every field at once."""
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
    if bool(np.any(distance < 0)):  # in order they are, so the difference went over 64 bits
        raise InvalidInput(_TOO_FAR)
    change = np.zeros_like(timestamps)
    change[1:] = distance[1:] - distance[:-1]
    change[is_first] = 0
    if len(change) and (int(change.min()) < _CHANGE_MIN or int(change.max()) > _CHANGE_MAX):
        raise InvalidInput(_TOO_FAR)
    fields = np.zeros(len(change), np.uint64)
    widths = np.ones(len(change), np.int64)
    # From the widest code to the narrowest, so that each change ends with the narrowest that holds it.
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
    """For each XOR: whether it opens a window, and the window it is written in.

    Each window depends on the one before, so this is the one loop over samples; it sees whole
    numbers only, and only of samples whose value changed.
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
    """The fields behind each stream's header, closed by its end, every stream on a word boundary."""
    behind = np.cumsum(widths)  # over samples and fields alike: the order in which they are written
    total = np.add.reduceat(widths.sum(axis=1), first)
    bits = _HEADER_BITS + total + _END_BITS
    words = (bits + 63) // 64
    start = (np.cumsum(words) - words) * 64
    before = behind[first * _FIELDS_PER_SAMPLE] - widths[first, 0]
    shift = np.repeat(start + _HEADER_BITS - before, counts * _FIELDS_PER_SAMPLE)
    offsets = behind - widths.ravel() + shift
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
