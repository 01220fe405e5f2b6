"""The records of one write, checked against every limit and measured, before they have a place in a topic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, TypeGuard, cast

import msgspec
import numpy as np

from penstock.jsontext import members
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
from penstock.topics.payload import (
    Text,
    checked,
    compact,
    compact_all,
    escape_savings,
    has_savings,
    saved_by_record,
)
from penstock.topics.segments.format import HAS_META, HAS_NODE, HAS_TAG

__all__ = ["ESCAPED", "DressedRecords", "PreparedBatch", "prepare"]

ESCAPED: Final = 32
"""The payload has escapes that are accounted shorter than they are stored."""

_FEW: Final = 3
"""Up to this many records a plain loop is faster than arrays."""
_OPEN: Final = b'{"d":'
_CLOSE: Final = b"}"
_KEYS = msgspec.json.Decoder(dict[str, msgspec.Raw])


@dataclass(slots=True)
class DressedRecords:
    """What stands around `data`, for batches whose records differ in it."""

    leads: list[bytes] = field(default_factory=list)
    """Node, tag and the opening of the payload."""
    trails: list[bytes] = field(default_factory=list)
    flags: list[int] = field(default_factory=list)
    node_bytes: list[int] = field(default_factory=list)
    tag_bytes: list[int] = field(default_factory=list)
    accounted: list[int] = field(default_factory=list)


class PreparedBatch(msgspec.Struct, frozen=True, kw_only=True):
    """Records that break no limit."""

    count: int
    data: Sequence[Text]
    accounted_bytes: int
    """What all of them count for caps and pages."""
    node: bytes | None
    """The origin of the whole batch."""
    dressed: DressedRecords | None
    """None when no record has a tag, meta, an origin of its own, or escapes."""
    tags: list[tuple[int, bytes]]
    """Which record of the batch has which tag."""

    @property
    def accounted(self) -> list[int]:
        """What each record counts for caps and pages."""
        return list(map(len, self.data)) if self.dressed is None else self.dressed.accounted

    @property
    def lead(self) -> bytes:
        """What stands before `data` when nothing is dressed."""
        return _OPEN if self.node is None else self.node + _OPEN


def prepare(records: Sequence[BareRecord], node: str | None = None, *, parsed: bool = False) -> PreparedBatch:
    """Checks a write and makes its texts compact; nothing of it is stored yet.

    `parsed` says that all `data` and `meta` come out of a JSON decoder, from a body that is valid UTF-8; they
    are not checked again, and all records are of one kind. Raises `InvalidRequest`, `BatchTooLarge` or
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
    dressed: DressedRecords | None = None
    tags: list[tuple[int, bytes]] = []
    if saved is not None or _is_dressed(records):
        sizes = list(map(len, data))
        if saved is not None:
            sizes = [size - less for size, less in zip(sizes, saved, strict=True)]
        dressed, tags = _dress(_as_new(records), batch_node, sizes, saved, parsed)
        byte_count = sum(dressed.accounted)
    batch = PreparedBatch(
        count=count,
        data=data,
        accounted_bytes=byte_count,
        node=batch_node,
        dressed=dressed,
        tags=tags,
    )
    if byte_count > RECORD_BYTES_MAX:
        _check_sizes(batch.accounted)
    return batch


def _lone(record: BareRecord, node: bytes | None, parsed: bool) -> PreparedBatch | None:
    """A write of one record that has nothing but data, by the shortest way; None if it is not such a one."""
    if isinstance(record, NewRecord) and (
        record.tag is not None or record.node is not None or _has_meta(record.meta)
    ):
        return None
    data = compact(record.data) if parsed else checked(record.data, "records[0].data")
    size = len(data)
    if size > RECORD_BYTES_MAX or has_savings(data):
        return None
    return PreparedBatch(count=1, data=(data,), accounted_bytes=size, node=node, dressed=None, tags=[])


def _texts(data: Sequence[Text], parsed: bool) -> tuple[Sequence[Text], int, list[int] | None]:
    """The data of all records, compact; how long all are; what each saves by its escapes, if any does."""
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


def _is_dressed(records: Sequence[BareRecord]) -> bool:
    first = records[0]
    if not isinstance(first, NewRecord):
        return False
    # An absent meta is one and the same object in every record.
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


def _dress(
    records: Sequence[NewRecord],
    batch_node: bytes | None,
    sizes: list[int],
    saved: list[int] | None,
    parsed: bool,
) -> tuple[DressedRecords, list[tuple[int, bytes]]]:
    dressed = DressedRecords(accounted=sizes)
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
        dressed.flags.append(flags if node is None else flags | HAS_NODE)
        node = node or b""
        dressed.leads.append(node + tag + _OPEN)
        dressed.trails.append(trail)
        dressed.node_bytes.append(len(node))
        dressed.tag_bytes.append(len(tag))
    return dressed, tags


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
    # Every member has a colon, so most meta needs no parsing to be known to have few.
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
    """Raises `RecordTooLarge` for the first record that is."""
    for place, size in enumerate(sizes):
        if size > RECORD_BYTES_MAX:
            raise RecordTooLarge(
                f"records[{place}] has {size} bytes of JSON in data and meta; "
                f"at most {RECORD_BYTES_MAX} are allowed"
            )
