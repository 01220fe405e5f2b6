"""Blocks of `(u32 length | data)*`, and the length table for decoding them without a walk.

The start of a record is known only after the header of the record before it is read. Such a walk in Python
costs more than everything else together, so blocks written here end with a table of lengths:

    lengths  count x width bytes (u8, u16 or u32, little-endian)
    width    u8 (1, 2 or 4)
    count    u32
    magic    8 bytes, "PSTKLEN1"

Readers ignore bytes after the last record, so the table does not affect readers that do not know it. A table
is used only if every length in it equals the length in the record's header. By induction from offset 0, it
then gives exactly the records that the walk would find.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from penstock.errors import Corrupt, InvalidInput, LimitExceeded

TABLE_MAGIC = b"PSTKLEN1"
TABLE_RECORDS_MIN = 64
"""Below this number of records, a walk is cheaper than a table."""

_TAIL = struct.Struct("<BI8s")
_HEADER = struct.Struct("<I")
_WIDTHS: dict[int, str] = {1: "<u1", 2: "<u2", 4: "<u4"}
_SLICE_END = 2**31 - 1
_INLINE_BYTES_MAX = 12  # Arrow keeps view values up to this length inside the view itself
_OFFSET_MAX = 2**31 - 1
_HEADER_OFFSETS = np.arange(0, 4 << 16, 4, dtype="<i4")

MANY_WALKS_MIN = 8192
"""Below this number of records, one walk is as fast as many."""
_SAMPLE = 64  # records that determine the usual length in this block
_GUESSES = 8  # positions that are tried for the start of one walk
_HOPS = 2  # plausible headers that must follow a guess
_STEPS_BETWEEN_LOOKS = 16

Lengths: TypeAlias = npt.NDArray[np.uint32]
Positions: TypeAlias = npt.NDArray[np.int64]


def as_binary_array(values: object) -> pa.BinaryArray:
    """Convert records in any supported form into one `binary` array.

    The records are a sequence of `bytes`, or a pyarrow array (or chunked array) of binary, large_binary,
    fixed_size_binary or binary_view without nulls. Raise `InvalidInput`, which names the first invalid one.
    """
    if isinstance(values, pa.ChunkedArray):
        values = _one_chunk(values)
    if isinstance(values, pa.Array):
        return _checked_array(values)
    if isinstance(values, (bytes, bytearray, memoryview, str)) or not isinstance(values, Sequence):
        raise InvalidInput(
            f"records must be a list of bytes or a pyarrow binary array, not {type(values).__name__}"
        )
    check_records(values)
    try:
        return pa.array(values, pa.binary())
    except (pa.ArrowCapacityError, pa.ArrowInvalid) as error:
        raise LimitExceeded(f"records of one call exceed 2 GiB: {error}") from error


def _one_chunk(values: pa.ChunkedArray) -> pa.Array:
    try:
        return values.combine_chunks() if values.num_chunks != 1 else values.chunk(0)
    except pa.ArrowInvalid as error:
        raise LimitExceeded(f"records of one call exceed 2 GiB: {error}") from error


def check_records(records: Sequence[bytes]) -> int:
    """Return the size of all records. Raise `InvalidInput`, which names the first that is not `bytes`."""
    try:
        return sum(map(bytes.__len__, records))  # one pass sums and checks: this `len` accepts only bytes
    except TypeError:
        number, wrong = next((i, v) for i, v in enumerate(records) if not isinstance(v, bytes))
        raise InvalidInput(
            f"record {number} is {type(wrong).__name__}; records are bytes (encode it first)"
        ) from None


def _checked_array(values: pa.Array) -> pa.BinaryArray:
    kind = values.type
    if not (
        pa.types.is_binary(kind)
        or pa.types.is_large_binary(kind)
        or pa.types.is_fixed_size_binary(kind)
        or pa.types.is_binary_view(kind)
    ):
        raise InvalidInput(
            f"an array of {kind} cannot be stored as records; cast it to pyarrow.binary() first"
        )
    if values.null_count:
        raise InvalidInput(f"the array has {values.null_count} nulls; a record is bytes, possibly empty")
    if pa.types.is_binary(kind):
        return values
    try:
        return values.cast(pa.binary())
    except pa.ArrowInvalid as error:
        raise LimitExceeded(f"records of one call exceed 2 GiB: {error}") from error


def _offsets(values: pa.BinaryArray) -> npt.NDArray[np.int32]:
    if len(values) == 0:
        return np.zeros(1, "<i4")
    buffer = values.buffers()[1]
    return np.frombuffer(buffer, "<i4", count=len(values) + 1, offset=values.offset * 4)


def record_bytes(values: pa.BinaryArray) -> int:
    """Return the sum of the record lengths, without reading the records."""
    offsets = _offsets(values)
    return int(offsets[-1]) - int(offsets[0])


def record_lengths(values: pa.BinaryArray) -> Lengths:
    """Return the length of every record, without reading the records."""
    return np.diff(_offsets(values)).view("<u4")


def encode_records(values: pa.BinaryArray, lengths: Lengths | None = None) -> memoryview:
    """Encode all values as `(u32 length | data)*`. `lengths` avoids computing their lengths again."""
    count = len(values)
    if count == 0:
        return memoryview(b"")
    if lengths is None:
        lengths = record_lengths(values)
    headers = pa.Array.from_buffers(
        pa.binary(), count, [None, pa.py_buffer(_header_offsets(count)), pa.py_buffer(lengths)]
    )
    joined = pc.binary_join_element_wise(headers, values, b"")
    return memoryview(joined.buffers()[2])[: record_bytes(values) + 4 * count]


def _header_offsets(count: int) -> npt.NDArray[np.int32]:
    """Return 0, 4, 8, …: the offsets of `count` adjacent headers. Small results are cached."""
    if count < len(_HEADER_OFFSETS):
        return _HEADER_OFFSETS[: count + 1]
    return np.arange(0, 4 * count + 1, 4, dtype="<i4")


def length_table(lengths: Lengths) -> bytes:
    """Encode the table that follows the records of a block. It is empty for a block with few records."""
    count = len(lengths)
    if count < TABLE_RECORDS_MIN:
        return b""
    longest = int(lengths.max())
    width = 1 if longest < 1 << 8 else 2 if longest < 1 << 16 else 4
    return lengths.astype(_WIDTHS[width]).tobytes() + _TAIL.pack(width, count, TABLE_MAGIC)


@dataclass(frozen=True, slots=True)
class Block:
    """A block whose records have been found. They are converted on demand."""

    data: pa.Buffer
    lengths: Lengths
    starts: Positions
    """The offset of each header, and then the end of the records."""
    heads: npt.NDArray[np.uint64] | None = None
    """The eight bytes from the start of each header, if the check of the table has read them."""

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def record_bytes(self) -> int:
        return int(self.starts[-1]) - 4 * len(self.lengths)

    def to_list(self) -> list[bytes]:
        """Return each record as its own `bytes`."""
        if int(self.starts[-1]) <= _OFFSET_MAX:
            records: list[bytes] = self.to_arrow().to_pylist()
            return records
        raw = memoryview(self.data)
        begins, ends = self.starts[:-1] + 4, self.starts[1:]
        return [raw[begin:end].tobytes() for begin, end in zip(begins.tolist(), ends.tolist(), strict=True)]

    def to_arrow(self) -> pa.BinaryArray:
        """Return a `binary` array: one copy of the data, without an object per record."""
        count = len(self.lengths)
        if count == 0:
            return pa.array([], pa.binary())
        if int(self.starts[-1]) > _OFFSET_MAX:
            raise LimitExceeded("a block beyond 2 GiB does not fit one binary array; read it as a list")
        offsets = pa.py_buffer(self.starts.astype("<i4"))
        framed = pa.Array.from_buffers(pa.binary(), count, [None, offsets, self.data])
        return pc.binary_slice(framed, 4, _SLICE_END)

    def to_arrow_view(self) -> pa.Array:
        """Return a `binary_view` array that points into the block, without a copy of the data.

        The eight bytes from the start of a record's header are `length | first four data bytes`, which is the
        first half of an Arrow view. A block with records short enough to be stored inside the view is copied.
        """
        count = len(self.lengths)
        if count == 0 or int(self.lengths.min()) <= _INLINE_BYTES_MAX or len(self.data) > _OFFSET_MAX:
            return self.to_arrow().cast(pa.binary_view())
        views = _scratch(2 * count, "<u8").reshape(count, 2)
        views[:, 0] = _heads(self.data, self.starts) if self.heads is None else self.heads
        np.add(self.starts[:-1], 4, out=views[:, 1], casting="unsafe")
        views[:, 1] <<= np.uint64(32)
        return pa.Array.from_buffers(pa.binary_view(), count, [None, pa.py_buffer(views), self.data])


def index_block(data: pa.Buffer, count: int) -> Block:
    """Find the `count` records of a block. Raise `Corrupt` if they extend beyond it.

    `count` is checked against the size of the block before any memory is allocated for it.
    """
    if count * 4 > len(data):
        raise Corrupt(f"block of {len(data)} bytes cannot hold {count} records")
    return (
        _by_table(data, count)
        or _by_stride(data, count)
        or _by_many_walks(data, count)
        or _by_walk(data, count)
    )


def _starts(lengths: npt.NDArray[np.unsignedinteger[npt.NBitBase]]) -> Positions:
    """Return the header positions for records of these lengths, and the end of the last record."""
    starts = _scratch(len(lengths) + 1, "<i8")
    framed = starts[1:]
    starts[0] = 0
    np.add(lengths, 4, out=framed, dtype="<i8")
    np.cumsum(framed, out=framed)
    return starts


def _scratch(count: int, kind: str) -> npt.NDArray[np.int64]:
    """Allocate an uninitialised array from Arrow's memory pool.

    The pool reuses freed memory. The C library returns a freed megabyte to the system immediately, and the
    page faults of the next allocation cost as much as the work on it.
    """
    return np.frombuffer(pa.allocate_buffer(count * np.dtype(kind).itemsize), kind)


def _heads(data: pa.Buffer, starts: Positions) -> npt.NDArray[np.uint64]:
    """Return the u64 at every header. The caller guarantees that eight bytes follow each position."""
    # Every u64 of the block at every byte offset, without a copy.
    words = np.ndarray((len(data) - 7,), "<u8", buffer=data, strides=(1,))
    return words[starts[:-1]]


def _by_table(data: pa.Buffer, count: int) -> Block | None:
    """Find the records by the table. Return None without a table that the headers confirm."""
    size = len(data)
    if count < TABLE_RECORDS_MIN or size < _TAIL.size:
        return None
    width, table_count, magic = _TAIL.unpack_from(data, size - _TAIL.size)
    if magic != TABLE_MAGIC or table_count != count or width not in _WIDTHS:
        return None
    table_start = size - _TAIL.size - count * width
    if table_start < 4 * count:
        return None
    table = np.frombuffer(data, _WIDTHS[width], count=count, offset=table_start)
    starts = _starts(table)
    if int(starts[-1]) != table_start:
        return None
    heads = _heads(data, starts)  # in bounds: the table's own tail follows the last record
    lengths = heads.astype("<u4")  # the low half of each value
    return Block(data, lengths, starts, heads) if bool((lengths == table).all()) else None


def _by_stride(data: pa.Buffer, count: int) -> Block | None:
    """Find the records with one strided comparison if all have the length of the first. Else return None."""
    if count < TABLE_RECORDS_MIN:
        return None
    (first,) = _HEADER.unpack_from(data, 0)
    stride = first + 4
    if stride * count > len(data):
        return None
    headers = np.ndarray((count,), "<u4", buffer=data, strides=(stride,))
    if not bool((headers == first).all()):
        return None
    return Block(data, np.full(count, first, "<u4"), np.arange(0, stride * (count + 1), stride, dtype="<i8"))


def _by_many_walks(data: pa.Buffer, count: int) -> Block | None:
    """Find the records by many parallel walks, with one numpy step for all.

    Return None to leave the block to `_by_walk`.

    Each walk starts at a guessed header and ends where the next walk starts. A guess is used only if the walk
    before it, itself confirmed back to offset 0, arrives exactly there. Otherwise that part is walked one
    record at a time. A wrong guess therefore affects the speed and never the result.
    """
    if count < MANY_WALKS_MIN:
        return None
    begins = _guessed_starts(data, count)
    if len(begins) < count**0.5 / 2:
        return None  # the headers of this block are hard to guess
    ends = np.append(begins[1:], len(data) - 3)  # past the last position of a header
    rows = _walk_together(data, begins, ends, steps_max=8 * (count // len(begins) + 1))
    positions = np.stack(rows, axis=1)  # one line per walk
    inside = positions < ends[:, None]
    lengths = inside.sum(axis=1)
    finished = lengths < len(rows)
    arrivals = positions[np.arange(len(begins)), np.minimum(lengths, len(rows) - 1)]
    if bool(finished.all()) and bool((arrivals[:-1] == begins[1:]).all()):
        chain, end = positions[inside], int(arrivals[-1])
    else:
        chain, end = _stitched(data, begins, ends, positions, lengths, arrivals, finished)
    starts = np.append(chain[: count + 1], end)[: count + 1]
    if len(starts) <= count or int(starts[-1]) > len(data):
        return None  # too short: the plain walk finds the position for the error
    return Block(data, (np.diff(starts) - 4).astype("<u4"), starts)


def _guessed_starts(data: pa.Buffer, count: int) -> Positions:
    """Return offset 0, and about one probable header position per `sqrt(count)` records."""
    size, raw = len(data), memoryview(data)
    unpack = _HEADER.unpack_from
    position, longest = 0, 0
    for _ in range(_SAMPLE):
        if position + 4 > size:
            return np.zeros(1, "<i8")
        (length,) = unpack(raw, position)
        longest = max(longest, length)
        position += 4 + length
    longest = min(4 * longest + 64, 1 << 16)
    zeros = 2 if longest >= 1 << 8 else 3  # the zero bytes at the end of a usual record's header
    needle = bytes(zeros)
    window_bytes = (_HOPS + 2) * longest
    begins = [0]
    for tried, near in enumerate(range(0, size, max(1, size // int(count**0.5)))[1:]):
        if tried == 2 * len(begins) + _GUESSES:
            break
        first = max(near, begins[-1] + 1)
        window = raw[first : first + window_bytes].tobytes()
        hit = -1
        for _ in range(_GUESSES):
            hit = window.find(needle, hit + 1)
            if hit < 0:
                break
            guess = hit + zeros - 4
            if guess >= 0 and _is_plausible(window, guess, longest):
                begins.append(first + guess)
                break
    return np.array(begins, "<i8")


def _is_plausible(window: bytes, position: int, longest: int) -> bool:
    for _ in range(_HOPS + 1):
        if position + 4 > len(window):
            return False
        (length,) = _HEADER.unpack_from(window, position)
        if not 0 < length <= longest:  # a run of zeros looks like empty records at every position
            return False
        position += 4 + length
    return True


def _walk_together(data: pa.Buffer, begins: Positions, ends: Positions, *, steps_max: int) -> list[Positions]:
    """Return the positions of all walks after each step, until almost all have ended."""
    last = len(data) - 4
    words = np.ndarray((last + 1,), "<u4", buffer=data, strides=(1,))
    rows = [begins]
    few = len(begins) // 16
    while len(rows) <= steps_max:
        for _ in range(_STEPS_BETWEEN_LOOKS):
            at = rows[-1]
            row = at + words[np.minimum(at, last)]
            row += 4
            rows.append(row)
        if np.count_nonzero(rows[-1] < ends) <= few:
            break
    return rows


def _stitched(
    data: pa.Buffer,
    begins: Positions,
    ends: Positions,
    positions: npt.NDArray[np.int64],
    lengths: npt.NDArray[np.int64],
    arrivals: Positions,
    finished: npt.NDArray[np.bool_],
) -> tuple[Positions, int]:
    """Return the confirmed chain of headers from offset 0, and its end."""
    raw, unpack = memoryview(data), _HEADER.unpack_from
    pieces: list[Positions] = []
    position = 0
    for number, (begin, end) in enumerate(zip(begins.tolist(), ends.tolist(), strict=True)):
        if position == begin and finished[number]:
            pieces.append(positions[number, : lengths[number]])
            position = int(arrivals[number])
            continue
        walked: list[int] = []
        while position < end:
            walked.append(position)
            position += 4 + unpack(raw, position)[0]
        pieces.append(np.array(walked, "<i8"))
    return np.concatenate(pieces), position


def _by_walk(data: pa.Buffer, count: int) -> Block:
    size = len(data)
    raw = memoryview(data)
    unpack = _HEADER.unpack_from
    lengths: list[int] = []
    position = 0
    try:
        for _ in range(count):
            (length,) = unpack(raw, position)
            lengths.append(length)
            position += 4 + length
    except struct.error:
        position = size + 1
    if position > size:
        raise Corrupt(f"record {len(lengths) - 1} of {count} runs past the end of its {size}-byte block")
    found = np.array(lengths, "<u4")
    return Block(data, found, _starts(found))


@dataclass(frozen=True, slots=True)
class RecordChunk:
    """Records to encode: an Arrow array that is encoded later, or an encoded list.

    An array costs nothing to keep, so it is encoded in pieces while the block is written. A list is encoded
    immediately, because its objects are scattered over memory and accessing them costs more than a copy.
    """

    values: pa.BinaryArray | None
    lengths: Lengths
    encoded: memoryview | None = None

    @classmethod
    def of_array(cls, values: pa.BinaryArray) -> RecordChunk:
        """Create a chunk from a `binary` array without nulls."""
        return cls(values, record_lengths(values))

    @classmethod
    def of_list(cls, records: Sequence[bytes]) -> RecordChunk:
        """Create a chunk from records that were checked to be `bytes`."""
        values = pa.array(records, pa.binary())
        lengths = record_lengths(values)
        return cls(None, lengths, encode_records(values, lengths))

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def record_bytes(self) -> int:
        return int(self.lengths.sum(dtype=np.int64))

    def pieces(self, piece_bytes: int) -> Iterator[RecordChunk]:
        """Split the chunk without a copy, into slices of about `piece_bytes` and at least one record."""
        values = self.values
        if values is None or self.record_bytes <= piece_bytes:
            yield self
            return
        ends = np.cumsum(self.lengths, dtype="<i8")
        marks = np.arange(piece_bytes, int(ends[-1]), piece_bytes)
        cuts = np.unique(np.searchsorted(ends, marks) + 1).tolist()
        start = 0
        for stop in (*(cut for cut in cuts if cut < len(ends)), len(ends)):
            yield RecordChunk(values[start:stop], self.lengths[start:stop])
            start = stop

    def encode(self) -> memoryview:
        """Return all records encoded as `(u32 length | data)*`."""
        if self.encoded is not None:
            return self.encoded
        return encode_records(self.values, self.lengths)
