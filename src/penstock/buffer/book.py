"""The book: the last version that each application has committed, once its entries may have left the queue.

A side object beside the manifest, replaced conditionally: by the consumer before it dequeues tagged entries,
and by a writer after it has appended some. What it says stays true for ever, as versions only rise. When
there are too many applications it forgets the one that was entered longest ago.
`penstock.buffer.transaction` has the argument that rests on it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from penstock.buffer.errors import InvalidInputError, SerializationError
from penstock.buffer.manifest_file import ManifestFile
from penstock.buffer.transaction import Transaction
from penstock.objects import Version

__all__ = ["BOOK_APPS", "enter", "fetch_book", "merge", "read_book", "write_book"]

BOOK_APPS: Final = 10_000
"""How many applications are remembered: at most 2.5 MB, and more than ever write to one queue at a time."""


class _Stored(msgspec.Struct, forbid_unknown_fields=True):
    version: int
    last: list[tuple[str, int]]


def write_book(book: Mapping[str, int]) -> bytes:
    return msgspec.json.encode(_Stored(version=1, last=list(book.items())))


def read_book(raw: bytes) -> dict[str, int]:
    """Application to version, newest entered last. Raises `SerializationError`.

    With an unreadable book nothing may be appended under a transaction, and nothing dequeued that has a
    tag: starting a new one in its place would forget what must not be appended again.
    """
    try:
        stored = msgspec.json.decode(raw, type=_Stored)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise SerializationError(f"the transaction book is damaged: {error}") from error
    if stored.version != 1:
        raise SerializationError(f"transaction book version {stored.version} is unknown")
    try:
        known = [Transaction(app=app, version=version) for app, version in stored.last]
    except InvalidInputError as error:
        raise SerializationError(f"the transaction book is damaged: {error}") from error
    book = {transaction.app: transaction.version for transaction in known}
    if len(book) < len(known):
        raise SerializationError("the transaction book is damaged: it names an application twice")
    return book


def merge(book: Mapping[str, int], versions: Mapping[str, int]) -> dict[str, int] | None:
    """The book with `versions` entered, or None if it says as much already. No version is ever lowered."""
    risen = {app: version for app, version in versions.items() if version > book.get(app, -1)}
    if not risen:
        return None
    merged = {app: version for app, version in book.items() if app not in risen} | risen
    return dict(list(merged.items())[-BOOK_APPS:])


async def fetch_book(file: ManifestFile) -> tuple[dict[str, int], Version | None]:
    """The book now, empty while there is none. Raises `SerializationError`, saying what to do.

    One that does not decode is read once more: it may have been cut short on the way.
    """
    raw, version = await file.read_side(file.book_path)
    try:
        return ({} if raw is None else read_book(raw)), version
    except SerializationError:
        raw, version = await file.read_side(file.book_path)
    try:
        return ({} if raw is None else read_book(raw)), version
    except SerializationError as error:
        raise SerializationError(
            f"{file.book_path}: {error}; restore an older version of it. Without it a transaction that is "
            "run again could be appended twice"
        ) from error


async def enter(file: ManifestFile, versions: Mapping[str, int]) -> None:
    """Enter `versions`, in one conditional write, or none if they are there. Raises as the store does.

    Doing it again is harmless, whatever the outcome was.
    """
    book, version = await fetch_book(file)
    merged = merge(book, versions)
    if merged is not None:
        await file.write_side(file.book_path, write_book(merged), version)
