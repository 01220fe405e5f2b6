"""The metadata of a segment: its file names, its sidecar, and the metadata inside the Arrow file.

The sidecar is JSON for people and tools. Its last member, `meta_xxh3`, is the checksum of all bytes before
it, so that a changed digit is detected. The Arrow file has the same metadata except size and checksum, which
are not known while it is written. A lost sidecar can be rebuilt from it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

import msgspec
from xxhash import xxh3_64_hexdigest

from penstock.errors import Corrupt, InvalidInput, Unsupported
from penstock.quiver.model import SegmentInfo, Signal, signal_of

FORMAT: Final = "quiver-segment/1"
_PREFIX: Final = b"quiver."
_SEAL: Final = b',"meta_xxh3":"'
_NAME: Final = re.compile(r"seg-([0-9]{16,20})(?:\.[0-9]+)?\.(?:arrow|meta\.json)(?:\.tmp)?")
_HEX: Final = re.compile(r"[0-9a-f]{16}")
_COUNT_MAX: Final = 2**63 - 1


class _Meta(msgspec.Struct, kw_only=True):
    """The members of the sidecar."""

    format: str
    segment_seq: int
    signal: Signal
    slot: int
    schema_hash: str
    bundle_count: int
    item_count: int
    ingest_time_min: int
    ingest_time_max: int
    event_time_min: int | None
    event_time_max: int | None
    wal_start: int
    wal_end: int
    wal_seq_min: int
    wal_seq_max: int
    core_id: int
    file_size: int
    xxh3: str
    created_by: str


_ENCODER: Final = msgspec.json.Encoder()
_DECODER: Final = msgspec.json.Decoder(_Meta)
_FORMAT_DECODER: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])


def arrow_name(seq: int) -> str:
    """Return the name of the file that holds a segment's batches."""
    return f"seg-{seq:016d}.arrow"


def meta_name(seq: int) -> str:
    """Return the name of the sidecar. A segment without a sidecar is not committed."""
    return f"seg-{seq:016d}.meta.json"


def seq_of(name: str) -> int | None:
    """Return the number in the name of a segment file, even a staged or quarantined one, or None."""
    found = _NAME.fullmatch(name)
    return int(found[1]) if found is not None else None


def encode_meta(info: SegmentInfo) -> bytes:
    """Encode the sidecar of a segment."""
    body = _ENCODER.encode(_meta_of(info))[:-1]
    return body + _SEAL + xxh3_64_hexdigest(body).encode() + b'"}\n'


def decode_meta(data: bytes, path: str) -> SegmentInfo:
    """Decode a sidecar. Raise `Corrupt` for damage, or `Unsupported` for the format of a later version."""
    body, seal, end = data.rpartition(_SEAL)
    if not seal or end.rstrip() != f'{xxh3_64_hexdigest(body)}"}}'.encode():
        raise Corrupt(f"{path}: the checksum of this sidecar does not match its text")
    try:
        meta = _DECODER.decode(body + b"}")
    except msgspec.MsgspecError as error:
        raise _unreadable(body, path, error) from error
    _check_format(meta.format, path)
    return _info_of(meta, path)


def _unreadable(body: bytes, path: str, error: msgspec.MsgspecError) -> Corrupt | Unsupported:
    """Return the error for an unreadable sidecar: `Unsupported` if its format is of a later version."""
    try:
        stated = msgspec.json.decode(_FORMAT_DECODER.decode(body + b"}").get("format", msgspec.Raw(b'""')))
        _check_format(str(stated), path)
    except Unsupported as unsupported:
        return unsupported
    except msgspec.MsgspecError:
        pass
    return Corrupt(f"{path}: {error}")


def _check_format(stated: str, path: str) -> None:
    if stated != FORMAT:
        raise Unsupported(f"{path} has the format {stated!r}; this version reads {FORMAT!r}")


def schema_metadata(info: SegmentInfo) -> dict[bytes, bytes]:
    """Return the metadata for the schema of the Arrow file, without the values known only after writing."""
    facts = msgspec.structs.asdict(_meta_of(info))
    for later in ("file_size", "xxh3", "created_by"):
        del facts[later]
    return {
        _PREFIX + name.encode(): str(value).encode() for name, value in facts.items() if value is not None
    }


def user_metadata(metadata: Mapping[bytes, bytes] | None) -> dict[bytes, bytes] | None:
    """Return schema metadata without the entries that Quiver added, or None if none are left."""
    kept = {name: value for name, value in (metadata or {}).items() if not name.startswith(_PREFIX)}
    return kept or None


def info_of(
    metadata: Mapping[bytes, bytes] | None, path: str, *, file_size: int, xxh3: str, created_by: str
) -> SegmentInfo:
    """Return a segment's metadata from the schema of its Arrow file. Raise `Corrupt` if any is missing."""
    facts: dict[str, object] = {"event_time_min": None, "event_time_max": None}
    for name, value in (metadata or {}).items():
        if name.startswith(_PREFIX):
            facts[name.removeprefix(_PREFIX).decode("utf-8", "replace")] = value.decode("utf-8", "replace")
    _check_format(str(facts.get("format", "none")), path)
    facts |= {"file_size": file_size, "xxh3": xxh3, "created_by": created_by}
    try:
        return _info_of(msgspec.convert(facts, _Meta, strict=False), path)
    except msgspec.ValidationError as error:
        raise Corrupt(f"{path}: {error}") from error


def _meta_of(info: SegmentInfo) -> _Meta:
    return _Meta(
        format=FORMAT,
        segment_seq=info.seq,
        signal=info.signal,
        slot=info.slot,
        schema_hash=info.schema_hash,
        bundle_count=info.bundle_count,
        item_count=info.item_count,
        ingest_time_min=info.ingest_ns_min,
        ingest_time_max=info.ingest_ns_max,
        event_time_min=info.event_ns_min,
        event_time_max=info.event_ns_max,
        wal_start=info.wal_start,
        wal_end=info.wal_end,
        wal_seq_min=info.wal_seq_min,
        wal_seq_max=info.wal_seq_max,
        core_id=info.core_id,
        file_size=info.file_size,
        xxh3=info.xxh3,
        created_by=info.created_by,
    )


def _info_of(meta: _Meta, path: str) -> SegmentInfo:
    _check(meta, path)
    return SegmentInfo(
        seq=meta.segment_seq,
        signal=meta.signal,
        slot=meta.slot,
        schema_hash=meta.schema_hash,
        bundle_count=meta.bundle_count,
        item_count=meta.item_count,
        ingest_ns_min=meta.ingest_time_min,
        ingest_ns_max=meta.ingest_time_max,
        event_ns_min=meta.event_time_min,
        event_ns_max=meta.event_time_max,
        wal_start=meta.wal_start,
        wal_end=meta.wal_end,
        wal_seq_min=meta.wal_seq_min,
        wal_seq_max=meta.wal_seq_max,
        core_id=meta.core_id,
        file_size=meta.file_size,
        xxh3=meta.xxh3,
        created_by=meta.created_by,
    )


def _check(meta: _Meta, path: str) -> None:
    counts = (meta.segment_seq, meta.bundle_count, meta.item_count, meta.core_id, meta.file_size)
    spans = ((meta.wal_start, meta.wal_end), (meta.wal_seq_min, meta.wal_seq_max))
    if not all(0 <= count <= _COUNT_MAX for count in counts) or meta.bundle_count == 0:
        raise Corrupt(f"{path}: a count is out of range")
    if not all(0 <= low <= high for low, high in spans) or meta.ingest_time_min > meta.ingest_time_max:
        raise Corrupt(f"{path}: a range ends before it begins")
    if not _HEX.fullmatch(meta.xxh3):
        raise Corrupt(f"{path}: {meta.xxh3!r} is not a checksum")
    try:
        signal = signal_of(meta.slot)
    except InvalidInput as error:
        raise Unsupported(f"{path}: {error}") from error
    if signal is not meta.signal:
        raise Corrupt(f"{path}: slot {meta.slot} does not carry {meta.signal.value}")
