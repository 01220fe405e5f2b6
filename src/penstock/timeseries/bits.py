"""Fields of up to 64 bits, packed most significant bit first into bytes and read back, many at once."""

from __future__ import annotations

import numpy as np

from penstock.timeseries.arrays import Integers, Times, Words

__all__ = ["leading_zeros", "pack_fields", "trailing_zeros", "words_of"]


def leading_zeros(words: Words) -> Times:
    """How many zero bits each word starts with; 64 for zero."""
    smeared = words.copy()
    for distance in (1, 2, 4, 8, 16, 32):
        smeared |= smeared >> np.uint64(distance)
    return 64 - np.bitwise_count(smeared).astype(np.int64)


def trailing_zeros(words: Words) -> Times:
    """How many zero bits each word ends with; 64 for zero."""
    lowest = words & (~words + np.uint64(1))
    return np.bitwise_count(lowest - np.uint64(1)).astype(np.int64)


def pack_fields(fields: Words, widths: Times, offsets: Times, word_count: int) -> bytes:
    """Each field's low `width` bits at its bit offset in `word_count` zeroed 8-byte words.

    The caller promises that fields do not overlap, have no bits above their width, and that a width
    is 0 to 64.
    """
    # The word after the last one takes the empty spill of a field that ends exactly there.
    words = np.zeros(word_count + 1, np.uint64)
    index = offsets >> 6
    room = 64 - (offsets & 63) - widths  # bits left in the first word after the field; negative if it spills
    fits = room >= 0
    # A shift by 64 is undefined: a field of width 0 at the start of a word has room 64 and no bits.
    shift = np.where(fits, np.minimum(room, 63), 0).astype(np.uint64)
    spill = np.where(fits, 0, -room).astype(np.uint64)
    # The bits are disjoint, so adding is the same as or-ing.
    np.add.at(words, index, np.where(fits, fields << shift, fields >> spill))
    over = np.flatnonzero(~fits)
    np.add.at(words, index[over] + 1, fields[over] << (np.uint64(64) - spill[over]))
    return words[:word_count].astype(">u8").tobytes()


def words_of(streams: list[bytes]) -> tuple[Words, Integers, Integers]:
    """The streams as big-endian words, each on a word boundary with two spare zero words behind it.

    Returns the words, the bit offset at which each stream starts, and the one at which it ends.
    """
    lengths = np.fromiter((len(stream) for stream in streams), np.intp, len(streams))
    padded = (lengths + 7) // 8 * 8 + 16
    starts = np.cumsum(padded) - padded
    joined = b"".join(
        stream.ljust(size, b"\0") for stream, size in zip(streams, padded.tolist(), strict=True)
    )
    words = np.frombuffer(joined, ">u8").astype(np.uint64)
    return words, starts * 8, (starts + lengths) * 8
