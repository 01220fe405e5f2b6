"""The records of one write: checked against every limit, compacted, measured and wrapped for storage.

The accounted size of a record is the length of its `data` and `meta` as a compact serialiser writes them:
without blanks between tokens, and without escapes in strings where a character can stand for itself. The text
is stored with its original escapes, so the stored and the accounted length can differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias, TypeGuard, cast

import msgspec
import numpy as np
import numpy.typing as npt

from penstock.jsontext import json_problem, members
from penstock.topics.errors import BatchTooLarge, InvalidRequest, RecordTooLarge
from penstock.topics.limits import (
    BATCH_RECORDS_MAX,
    META_BYTES_MAX,
    META_KEYS_MAX,
    NODE_BYTES_MAX,
    RECORD_BYTES_MAX,
    TAG_BYTES_MAX,
)
from penstock.topics.model import BareRecord, NewRecord
from penstock.topics.segments.format import HAS_META, HAS_NODE, HAS_TAG

Text: TypeAlias = bytes | msgspec.Raw
Counts: TypeAlias = npt.NDArray[np.int64]

DATA_WRAP_BYTES: Final = len(b'{"d":}')
"""The bytes that a stored payload has around `data`."""
META_WRAP_BYTES: Final = len(b',"m":')

_SPACE, _LINE_FEED, _RETURN, _TAB, _BACKSLASH = b" \n\r\t\\"
_SCANNED_BYTES_MIN: Final = 64 * 1024
_META = b',"m":'
_LIST = msgspec.json.Decoder(list[msgspec.Raw])


class _Payload(msgspec.Struct, gc=False):
    d: msgspec.Raw
    m: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


_PAYLOAD = msgspec.json.Decoder(_Payload)


def checked(text: Text, what: str) -> bytes:
    """Return the same JSON, compact.

    Raise `InvalidRequest` naming `what` unless it is one JSON value in UTF-8.
    """
    plain = bytes(text)
    problem = json_problem(plain)
    if problem is not None:
        raise InvalidRequest(f"{what} {problem}")
    try:
        str(plain, "utf-8")
        return msgspec.json.format(plain, indent=-1)
    except (UnicodeDecodeError, msgspec.DecodeError, RecursionError) as error:
        raise InvalidRequest(f"{what} is not JSON: {error}") from None


def compact(text: Text) -> bytes:
    """Return valid JSON without blanks between its tokens."""
    plain = bytes(text)
    # Search for numbers: searching bytes for bytes costs four times as much.
    if _SPACE in plain or _LINE_FEED in plain or _RETURN in plain or _TAB in plain:
        try:
            return msgspec.json.format(plain, indent=-1)
        except RecursionError:  # stored, already compact, before there was a limit on nesting
            return plain
    return plain


def compact_all(texts: Sequence[Text]) -> tuple[Sequence[Text], bytes]:
    """Compact many texts. Return them, and all of them joined by commas."""
    blob = b",".join(texts)
    if not (_LINE_FEED in blob or _RETURN in blob or _TAB in blob):
        if _SPACE not in blob:
            return texts, blob
        # For smaller texts it is faster to let the formatter find that there is nothing to do.
        if len(blob) > _SCANNED_BYTES_MIN and not _blank_at_a_token(blob):
            return texts, blob
    formatted = msgspec.json.format(b"[%b]" % blob, indent=-1)
    if len(formatted) == len(blob) + 2:
        return texts, blob
    return _LIST.decode(formatted), formatted[1:-1]


def _blank_at_a_token(blob: bytes) -> bool:
    """Return whether a space is next to one of `{}[],:`, as every space between two tokens is.

    False positives are possible: a bar or a backslash counts as a token.
    """
    chars = np.frombuffer(blob, np.uint8)
    # Setting bit 5 maps the brackets to the braces and keeps the comma and the colon.
    folded = chars | np.uint8(0x20)
    token = folded - np.uint8(0x7B) <= 2
    found = np.equal(folded, np.uint8(0x2C))
    token |= found
    token |= np.equal(folded, np.uint8(0x3A), out=found)
    space = np.equal(chars, np.uint8(0x20), out=found)
    beside = token[:-2] | token[2:]
    beside &= space[1:-1]
    return bool(space[0] or space[-1] or beside.any())


def has_savings(text: bytes) -> bool:
    """Return whether there may be an escape that a compact serialiser would write shorter."""
    return _BACKSLASH in text and (b"\\u" in text or b"\\/" in text)


def escape_savings(text: bytes) -> tuple[Counts, Counts]:
    """Find escapes in valid JSON that a compact serialiser would write shorter, and the bytes saved."""
    if not has_savings(text):
        nothing = np.zeros(0, np.int64)
        return nothing, nothing
    chars = np.frombuffer(text, np.uint8)
    starts = _escape_starts(chars)
    kind = chars[starts + 1]
    slashes, coded = starts[kind == ord("/")], starts[kind == ord("u")]
    saved = 6 - _written_bytes(_code_units(chars, coded))
    places = np.concatenate([slashes, coded[saved > 0]])
    return places, np.concatenate([np.ones(len(slashes), np.int64), saved[saved > 0]])


def _escape_starts(chars: npt.NDArray[np.uint8]) -> Counts:
    """Return the backslashes that begin an escape. In a sequence, every second one is itself escaped."""
    places = np.flatnonzero(chars == ord("\\"))
    row_starts = np.flatnonzero(np.diff(places, prepend=-2) != 1)
    within = np.arange(len(places)) - np.repeat(row_starts, np.diff(row_starts, append=len(places)))
    starts: Counts = places[within % 2 == 0]
    return starts


def _code_units(chars: npt.NDArray[np.uint8], starts: Counts) -> Counts:
    units = np.zeros(len(starts), np.int64)
    for digit in range(2, 6):
        char = chars[starts + digit].astype(np.int64)
        units = units * 16 + (char & 0xF) + 9 * (char >= ord("A"))
    return units


def _written_bytes(units: Counts) -> Counts:
    """Return the bytes that a compact serialiser writes for each UTF-16 unit. A surrogate pair makes four."""
    size = np.where(units < 0x80, 1, np.where(units < 0x800, 2, 3))
    size = np.where((units >= 0xD800) & (units < 0xE000), 2, size)
    size = np.where(np.isin(units, (0x08, 0x09, 0x0A, 0x0C, 0x0D, 0x22, 0x5C)), 2, size)
    return np.where((units < 0x20) & (size == 1), 6, size)


def saved_by_record(blob: bytes, lengths: Counts) -> Counts | None:
    """Return the savings per text of a blob joined by commas, or None if there are none."""
    places, saved = escape_savings(blob)
    if not len(places):
        return None
    owner = np.searchsorted(np.cumsum(lengths + 1), places, side="right")
    return np.bincount(owner, saved, len(lengths)).astype(np.int64)


def split_payload(payload: bytes) -> tuple[bytes, bytes | None]:
    """Split a stored payload that was written with meta into `data` and `meta`."""
    # Outside a string `,"m":` can only begin a member, and inside one it cannot occur. A single occurrence is
    # the wrapper's own. With more, `data` or `meta` has a member of that name, and the payload must be
    # parsed.
    if payload.count(_META) == 1:
        data, _, meta = payload.partition(_META)
        return data[5:], meta[:-1]
    try:
        parsed = _PAYLOAD.decode(payload)
    except RecursionError:
        return _split_deep(payload)
    return bytes(parsed.d), None if parsed.m is msgspec.UNSET else bytes(parsed.m)


def _split_deep(payload: bytes) -> tuple[bytes, bytes | None]:
    """Split a payload that is nested deeper than the decoder allows. Some versions stored such payloads."""
    found = members(payload)
    return found["d"], found.get("m")


ESCAPED: Final = 32
"""A flag: the payload has escapes that are accounted shorter than they are stored."""

_FEW: Final = 3
"""The number of records up to which a plain loop is faster than arrays."""
_OPEN: Final = b'{"d":'
_CLOSE: Final = b"}"
_KEYS = msgspec.json.Decoder(dict[str, msgspec.Raw])


@dataclass(slots=True)
class RecordHeaders:
    """The bytes around `data`, for batches whose records differ in them."""

    leads: list[bytes] = field(default_factory=list)
    """Node, tag and the opening of the payload."""
    trails: list[bytes] = field(default_factory=list)
    flags: list[int] = field(default_factory=list)
    node_bytes: list[int] = field(default_factory=list)
    tag_bytes: list[int] = field(default_factory=list)
    accounted: list[int] = field(default_factory=list)


class PreparedBatch(msgspec.Struct, frozen=True, kw_only=True):
    """Records that are within every limit."""

    count: int
    data: Sequence[Text]
    accounted_bytes: int
    """The accounted bytes of all records, for caps and pages."""
    node: bytes | None
    """The origin of the whole batch."""
    headers: RecordHeaders | None
    """None if no record has a tag, meta, its own origin, or escapes."""
    tags: list[tuple[int, bytes]]
    """Pairs of a record's position in the batch and its tag."""

    @property
    def accounted(self) -> list[int]:
        """Return the accounted bytes of each record, for caps and pages."""
        return list(map(len, self.data)) if self.headers is None else self.headers.accounted

    @property
    def lead(self) -> bytes:
        """Return the bytes before `data` for records without headers."""
        return _OPEN if self.node is None else self.node + _OPEN


def prepare(records: Sequence[BareRecord], node: str | None = None, *, parsed: bool = False) -> PreparedBatch:
    """Check a write and compact its texts. Nothing is stored yet.

    `parsed` means that all `data` and `meta` come from a JSON decoder and a body of valid UTF-8. They are not
    checked again, and all records are of one kind. Raises `InvalidRequest`, `BatchTooLarge` or
    `RecordTooLarge`.
    """
    count = len(records)
    if not count:
        raise InvalidRequest("records is empty; a write has at least one record")
    if count > BATCH_RECORDS_MAX:
        raise BatchTooLarge(
            f"{count} records in one write; at most {BATCH_RECORDS_MAX} are allowed",
            {"records": count, "max": BATCH_RECORDS_MAX},
        )
    batch_node = None if node is None else _name(node, "node", NODE_BYTES_MAX)
    if count == 1 and (lone := _lone(records[0], batch_node, parsed)) is not None:
        return lone
    if not parsed:
        records = _as_new(records)
    data, byte_count, saved = _texts([record.data for record in records], parsed)
    headers: RecordHeaders | None = None
    tags: list[tuple[int, bytes]] = []
    if saved is not None or _has_headers(records):
        sizes = list(map(len, data))
        if saved is not None:
            sizes = [size - less for size, less in zip(sizes, saved, strict=True)]
        headers, tags = _headers_of(_as_new(records), batch_node, sizes, saved, parsed)
        byte_count = sum(headers.accounted)
    batch = PreparedBatch(
        count=count,
        data=data,
        accounted_bytes=byte_count,
        node=batch_node,
        headers=headers,
        tags=tags,
    )
    if byte_count > RECORD_BYTES_MAX:
        _check_sizes(batch.accounted)
    return batch


def _lone(record: BareRecord, node: bytes | None, parsed: bool) -> PreparedBatch | None:
    """Prepare a single record that has only data, on the fast path. Return None if it has more."""
    if isinstance(record, NewRecord) and (
        record.tag is not None or record.node is not None or _has_meta(record.meta)
    ):
        return None
    data = compact(record.data) if parsed else checked(record.data, "records[0].data")
    size = len(data)
    if size > RECORD_BYTES_MAX or has_savings(data):
        return None
    return PreparedBatch(count=1, data=(data,), accounted_bytes=size, node=node, headers=None, tags=[])


def _texts(data: Sequence[Text], parsed: bool) -> tuple[Sequence[Text], int, list[int] | None]:
    """Return the compact data of all records, its total length, and the escape savings per record or None."""
    if not parsed:
        data = [checked(text, f"records[{place}].data") for place, text in enumerate(data)]
    if len(data) <= _FEW:
        plain = [compact(text) for text in data]
        escaped = any(map(has_savings, plain))
        saved = [int(escape_savings(text)[1].sum()) for text in plain] if escaped else None
        return plain, sum(map(len, plain)), saved if saved and any(saved) else None
    data, blob = compact_all(data)
    byte_count = len(blob) - len(data) + 1
    if not has_savings(blob):
        return data, byte_count, None
    savings = saved_by_record(blob, np.fromiter(map(len, data), np.int64, len(data)))
    return data, byte_count, None if savings is None else savings.tolist()


def _has_headers(records: Sequence[BareRecord]) -> bool:
    first = records[0]
    if not isinstance(first, NewRecord):
        return False
    # An absent meta is the same object in every record.
    absent = first.meta
    if _has_meta(absent):
        return True
    odd = [
        True
        for record in cast(Sequence[NewRecord], records)
        if record.tag is not None or record.node is not None or record.meta is not absent
    ]
    return bool(odd)


def _as_new(records: Sequence[BareRecord]) -> Sequence[NewRecord]:
    return [record if isinstance(record, NewRecord) else NewRecord(record.data) for record in records]


def _has_meta(meta: object) -> TypeGuard[msgspec.Raw]:
    return isinstance(meta, msgspec.Raw) and len(meta) > 0


def _headers_of(
    records: Sequence[NewRecord],
    batch_node: bytes | None,
    sizes: list[int],
    saved: list[int] | None,
    parsed: bool,
) -> tuple[RecordHeaders, list[tuple[int, bytes]]]:
    headers = RecordHeaders(accounted=sizes)
    tags: list[tuple[int, bytes]] = []
    nodes: dict[str, bytes] = {}
    for place, record in enumerate(records):
        flags, node, tag, trail = 0, batch_node, b"", _CLOSE
        if record.node is not None and (node := nodes.get(record.node)) is None:
            node = nodes[record.node] = _name(record.node, f"records[{place}].node", NODE_BYTES_MAX)
        if record.tag is not None:
            tag = _name(record.tag, f"records[{place}].tag", TAG_BYTES_MAX)
            tags.append((place, tag))
            flags = HAS_TAG
        meta_saved = 0
        if _has_meta(record.meta) and (meta := _meta(record.meta, place, parsed)) != b"null":
            meta_saved = _saved(meta)
            sizes[place] += len(meta) - meta_saved
            trail = b',"m":%b}' % meta
            flags |= HAS_META
        if meta_saved or (saved is not None and saved[place]):
            flags |= ESCAPED
        headers.flags.append(flags if node is None else flags | HAS_NODE)
        node = node or b""
        headers.leads.append(node + tag + _OPEN)
        headers.trails.append(trail)
        headers.node_bytes.append(len(node))
        headers.tag_bytes.append(len(tag))
    return headers, tags


def _name(text: str, what: str, bytes_max: int) -> bytes:
    try:
        name = text.encode()
    except UnicodeEncodeError:
        raise InvalidRequest(
            f"{what} holds half of a surrogate pair; send text that has a UTF-8 form"
        ) from None
    if len(name) > bytes_max:
        raise InvalidRequest(f"{what} has {len(name)} bytes; at most {bytes_max} are allowed")
    return name


def _meta(raw: msgspec.Raw, place: int, parsed: bool) -> bytes:
    meta = compact(raw) if parsed else checked(raw, f"records[{place}].meta")
    if len(meta) > META_BYTES_MAX and (size := len(meta) - _saved(meta)) > META_BYTES_MAX:
        raise InvalidRequest(
            f"records[{place}].meta has {size} bytes of JSON; at most {META_BYTES_MAX} are allowed"
        )
    # Every member has a colon, so most meta can be accepted without parsing.
    if meta.startswith(b"{") and meta.count(b":") > META_KEYS_MAX:
        keys = _key_count(meta)
        if keys > META_KEYS_MAX:
            raise InvalidRequest(
                f"records[{place}].meta has {keys} keys; at most {META_KEYS_MAX} are allowed"
            )
    return meta


def _key_count(meta: bytes) -> int:
    try:
        return len(_KEYS.decode(meta))
    except RecursionError:  # the meta of a job that was stored before there was a limit
        return len(members(meta))


def _saved(text: bytes) -> int:
    return int(escape_savings(text)[1].sum()) if has_savings(text) else 0


def _check_sizes(sizes: list[int]) -> None:
    """Raise `RecordTooLarge` for the first record that exceeds the limit."""
    for place, size in enumerate(sizes):
        if size > RECORD_BYTES_MAX:
            raise RecordTooLarge(
                f"records[{place}] has {size} bytes of JSON in data and meta; "
                f"at most {RECORD_BYTES_MAX} are allowed"
            )
