"""Reading streams of samples: one at a time, or many side by side. See `gorilla` for the layout.

Each field's place depends on the one before it, so a stream is read field by field; many streams
are read abreast, the k-th sample of all of them in one step.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final

import numpy as np

from penstock.errors import Corrupt
from penstock.timeseries.arrays import Integers, Mask, Times, Words
from penstock.timeseries.bits import words_of
from penstock.timeseries.model import Samples

__all__ = ["decode", "decode_many"]

_ABREAST_MIN: Final = 24
"""Below this many streams, one after the other is quicker than abreast."""

_HEADER_BITS: Final = 64 + 1 + 14 + 64
_MASKS: Final = np.array([(1 << width) - 1 for width in range(65)], np.uint64)
_CHANGE_PREFIX: Final = np.array([1, 2, 3, 4, 4], np.int64)
_CHANGE_BITS: Final = np.array([0, 7, 9, 12, 32], np.int64)
_LEADING_ONES: Final = np.array([0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 3, 4], np.int64)
"""How many ones four bits start with."""
_INT64_MAX: Final = 2**63 - 1
_BEYOND: Final = "a stream of samples holds a timestamp beyond 64 bits"
_TWO_WORDS: Final = struct.Struct(">QQ")


def decode(stream: bytes) -> Samples:
    """The samples of one stream, in order. Raises `Corrupt` if it is cut or breaks the format."""
    if not stream:
        return Samples.empty()
    if len(stream) * 8 < _HEADER_BITS:
        raise Corrupt(f"a stream of samples is cut: {len(stream)} bytes are fewer than its header")
    one = _Single(stream)
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


class _Single:
    """One stream, read field by field."""

    def __init__(self, stream: bytes) -> None:
        # Spare bytes let every read take a fixed window; none may end in them.
        self._padded = stream + bytes(16)
        self._total = len(stream) * 8
        self._at = 0
        self._lead, self._length = -1, 0

    def header(self) -> tuple[int, int]:
        """The first timestamp, and the bits of the first value."""
        start = self._take(64)
        if self._take(1):
            raise Corrupt("a stream of samples starts with an unknown layout")
        timestamp = (start - (1 << 64) if start >> 63 else start) + self._take(14)
        return timestamp, self._take(64)

    def change(self) -> int | None:
        """How the distance to the next timestamp changes; None at the end."""
        take = self._take
        if not take(1):
            return 0
        width = 7 if not take(1) else 9 if not take(1) else 12 if not take(1) else 32
        raw = take(width)
        if not raw and width != 32:
            raise Corrupt("a stream of samples holds a change of nothing")
        if not raw:
            return None
        return raw if raw <= 1 << (width - 1) else raw - (1 << width)

    def xor(self) -> int:
        """The bits in which the next value differs from the one before."""
        take = self._take
        if not take(1):
            return 0
        if take(1):
            self._lead, self._length = take(6), take(6) + 1
            if self._lead + self._length > 64:
                raise Corrupt("a stream of samples holds a window wider than a value")
        elif self._lead < 0:
            raise Corrupt("a stream of samples uses a window before it opened one")
        return take(self._length) << (64 - self._lead - self._length)

    def _take(self, width: int) -> int:
        at = self._at
        self._at = at + width
        if self._at > self._total:
            raise Corrupt("a stream of samples is cut: it has no end")
        high, low = _TWO_WORDS.unpack_from(self._padded, at >> 3)
        bits: int = (high << 64 | low) >> (128 - width - (at & 7))
        return bits & ((1 << width) - 1)


def decode_many(streams: Sequence[bytes]) -> list[Samples]:
    """The samples of each stream. Raises `Corrupt` if one is damaged."""
    filled = [stream for stream in streams if stream]
    if len(filled) < _ABREAST_MIN:
        return [decode(stream) for stream in streams]
    if min(map(len, filled)) * 8 < _HEADER_BITS:
        raise Corrupt("a stream of samples is cut: it is shorter than its header")
    decoded = iter(_Abreast(filled).read())
    return [next(decoded) if stream else Samples.empty() for stream in streams]


def _checked(timestamps: list[int], words: Words) -> Samples:
    if max(timestamps[0], timestamps[-1]) > _INT64_MAX:
        raise Corrupt(_BEYOND)
    times = np.array(timestamps, np.int64)
    _refuse_disorder(bool(np.all(times[1:] > times[:-1])))
    return Samples(times, words.view(np.float64))


def _refuse_disorder(in_order: bool) -> None:
    if not in_order:
        raise Corrupt("a stream of samples is not in order of time")


class _Abreast:
    """Many streams, read sample by sample; those that end leave the ranks."""

    def __init__(self, streams: list[bytes]) -> None:
        self._words, start, self._end = words_of(streams)
        self._rows = np.arange(len(streams))
        self._at = start.astype(np.int64)
        self._stream_count = len(streams)

    def read(self) -> list[Samples]:
        """Raises `Corrupt` if any of them breaks the format."""
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
        """The next `widths` bits of each stream, most of them 64 wide at the utmost."""
        index, shift = self._at >> 6, (self._at & 63).astype(np.uint64)
        words = self._words
        size = len(words) - 1
        high = words[np.minimum(index, size)] << shift
        # Shifting by 64 is undefined; two shifts are not.
        low = words[np.minimum(index + 1, size)] >> np.uint64(1) >> (np.uint64(63) - shift)
        window = high | low
        self._at = self._at + widths
        if bool(np.any(self._at > self._end[self._rows])):
            raise Corrupt("a stream of samples is cut: it has no end")
        shift_right = 64 - np.asarray(widths, np.int64)
        # A field of no bits is zero, whatever the window shows.
        taken: Words = (window >> np.minimum(shift_right, 63).astype(np.uint64)) & _MASKS[widths]
        return taken

    def _header(self) -> tuple[Integers, Times, Words]:
        start = self._take(64)
        layout = self._take(15)
        if bool(np.any(layout >> np.uint64(14))):
            raise Corrupt("a stream of samples starts with an unknown layout")
        timestamps = start.view(np.int64) + layout.astype(np.int64)
        if bool(np.any(timestamps < start.view(np.int64))):  # the sum went round
            raise Corrupt(_BEYOND)
        return self._rows, timestamps, self._take(64)

    def _step(self, before: tuple[Integers, Times, Words]) -> tuple[Integers, Times, Words]:
        """The next sample of every stream that has one."""
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
        _refuse_disorder(bool(np.all((self._distance > 0) & (timestamps <= _INT64_MAX - self._distance))))
        return rows, timestamps + self._distance, bits ^ self._xor()

    def _keep(self, going: Mask) -> None:
        self._rows, self._at = self._rows[going], self._at[going]
        self._distance = self._distance[going]
        self._lead, self._length = self._lead[going], self._length[going]

    def _change(self) -> tuple[Times, Mask]:
        """The change of each distance, and which streams end here."""
        ones: Times = _LEADING_ONES[self._peek(4)]
        self._at = self._at + _CHANGE_PREFIX[ones]
        widths = _CHANGE_BITS[ones]
        raw = self._take(widths).astype(np.int64)
        ended: Mask = (ones == 4) & (raw == 0)
        if bool(np.any((widths > 0) & (raw == 0) & ~ended)):
            raise Corrupt("a stream of samples holds a change of nothing")
        limit = np.int64(1) << widths
        return np.where(raw <= limit >> 1, raw, raw - limit), ended

    def _peek(self, width: int) -> Times:
        """The next bits without moving on; beyond the end they read as zeros."""
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
            raise Corrupt("a stream of samples holds a window wider than a value")
        if bool(np.any(again & (self._lead < 0))):
            raise Corrupt("a stream of samples uses a window before it opened one")
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
