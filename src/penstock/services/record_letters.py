"""Records of a queue that a database could not take, kept beside the queue: one object for each batch.

{manifest_path}.dead/records/{sequence, 20 digits}.json
"""

from __future__ import annotations

import msgspec

from penstock.errors import Corrupt
from penstock.objects import ObjectStore

__all__ = ["LetterRecord", "RecordLetters", "letters_key", "read_letters", "store_letters"]


class LetterRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One record by its place in the batch, why it is here, and its bytes (base64 in the object)."""

    index: int
    reason: str
    stored_in_part: bool = False
    """The database has the rest of it: only what the reason names is missing there."""
    data: bytes


class RecordLetters(msgspec.Struct, frozen=True, kw_only=True):
    """Everything of one batch that was set aside."""

    sequence: int
    location: str
    recorded_at_ms: int
    records: list[LetterRecord]


def letters_key(manifest_key: str, sequence: int) -> str:
    """Where the letters of a batch are."""
    return f"{manifest_key}.dead/records/{sequence:020d}.json"


async def store_letters(store: ObjectStore, manifest_key: str, letters: RecordLetters) -> str:
    """Write them in one piece, in place of those that an earlier attempt wrote. Returns the key."""
    key = letters_key(manifest_key, letters.sequence)
    await store.put(key, msgspec.json.encode(letters))
    return key


def read_letters(data: bytes) -> RecordLetters:
    """The letters in an object. Raises `Corrupt`."""
    try:
        return msgspec.json.decode(data, type=RecordLetters)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise Corrupt(f"not the letters of a batch: {error}") from None
