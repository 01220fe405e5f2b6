"""Appending under a transaction: a writer that starts again appends nothing twice.

A transaction is (application, version), for example a streaming query and the number of its micro-batch. The
entries of an append carry it as a tag in their tail. What leaves the queue leaves its tag in the book
(`penstock.buffer.book`). An append under (app, version):

    1. reads the manifest M, and in it the newest tag of app
    2. reads the book, and in it the last version of app
    3. last := the greater of both. Equal to version: it is committed, nothing is done. Greater: refused
    4. conditional write on M, with every entry tagged. Conflict, or no answer: from 1, with a fresh manifest
    5. enters version in the book (not needed for the argument, see below)

and a consumer that dequeues tagged entries:

    a. enters their tags in the book, which only ever rises
    b. conditional write of the manifest without them

Suppose (app, version) landed at some write W of the manifest, and 4 succeeds once more for the same pair. Its
M was the manifest at 4, so W came before M. Either the entries of W are in M, and 1 saw their tag; or a
consumer removed them between W and M, at b. Its a came before that b, b before M was there to be read, and 2
after that: so 2 saw the tag. Either way 3 ended it: a contradiction. Numbers in the manifest only rise, so
no later manifest has the same bytes as M, and "M was the manifest at 4" is what the condition of 4 says.

So `last` in 3 is the last version at the moment of 4. A writer whose versions are not counted one by one,
but are places in something that it reads, may therefore also demand that `last` is the version it goes on
from: of two such writers at the same time one is refused, also when their steps end at different places.

A consumer of the format that knows no book skips a. Step 5 leaves it only the moment between 4 and 5: if the
writer dies there, and that consumer dequeues the entries before the writer is started again, the
transaction is forgotten.

    tag   4 bytes magic "PTX1" | u16 body_len | u64 version | app (UTF-8)        body_len = 8 + len(app)
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

from penstock.buffer import manifest
from penstock.buffer.errors import InvalidInputError

__all__ = [
    "APP_BYTES_MAX",
    "NO_VERSION",
    "VERSION_MAX",
    "Transaction",
    "encode_tag",
    "find_tag",
    "newest_version",
    "tags",
]

APP_BYTES_MAX: Final = 200
"""A tag stands in every entry of the manifest, which every append transfers whole."""
VERSION_MAX: Final = 2**63 - 1
NO_VERSION: Final = -1
"""In place of a version: the application has committed none yet."""

MAGIC: Final = b"PTX1"
_LENGTH = struct.Struct("<H")
_VERSION = struct.Struct("<Q")
_BODY_START = len(MAGIC) + _LENGTH.size
_APP_START = _BODY_START + _VERSION.size


@dataclass(frozen=True, slots=True, kw_only=True)
class Transaction:
    """Who appends, and which of its steps this is. Versions of an application only rise.

    Raises `InvalidInputError` unless `app` has 1 to 200 bytes of UTF-8 and `version` is 0 to 2**63 - 1.
    """

    app: str
    version: int

    def __post_init__(self) -> None:
        try:
            size = len(self.app.encode())
        except (AttributeError, UnicodeEncodeError):
            raise InvalidInputError(
                f"the application of a transaction is text that UTF-8 can hold, not {self.app!r}"
            ) from None
        if not 1 <= size <= APP_BYTES_MAX:
            raise InvalidInputError(
                f"the application of a transaction has 1 to {APP_BYTES_MAX} bytes, not {size}"
            )
        if isinstance(self.version, bool) or not isinstance(self.version, int):
            raise InvalidInputError(f"the version of a transaction is a whole number, not {self.version!r}")
        if not 0 <= self.version <= VERSION_MAX:
            raise InvalidInputError(f"the version of a transaction is 0 to {VERSION_MAX}, not {self.version}")


def encode_tag(transaction: Transaction) -> bytes:
    """The tag, to be the tail of an entry."""
    return _head(transaction.app) + _VERSION.pack(transaction.version) + transaction.app.encode()


def _head(app: str) -> bytes:
    return MAGIC + _LENGTH.pack(_VERSION.size + len(app.encode()))


def find_tag(tail: bytes) -> Transaction | None:
    """The tag in a tail, in which other things may stand before and behind it; None if there is none."""
    place = tail.find(MAGIC)
    while place >= 0:
        tag = _read_tag(tail, place)
        if tag is not None:
            return tag
        place = tail.find(MAGIC, place + 1)
    return None


def _read_tag(tail: bytes, start: int) -> Transaction | None:
    if start + _APP_START > len(tail):
        return None
    (length,) = _LENGTH.unpack_from(tail, start + len(MAGIC))
    (version,) = _VERSION.unpack_from(tail, start + _BODY_START)
    end = start + _BODY_START + length
    if end > len(tail):
        return None
    try:
        return Transaction(app=tail[start + _APP_START : end].decode(), version=version)
    except (UnicodeDecodeError, InvalidInputError):
        return None


def newest_version(raw: bytes, app: str) -> int | None:
    """The version in the newest tag of `app` among the entries of the manifest `raw`; None without one."""
    for _, tail in manifest.tails(raw, _head(app)):
        tag = find_tag(tail)
        if tag is not None and tag.app == app:
            return tag.version
    return None


def tags(raw: bytes, through: int) -> dict[str, int]:
    """The highest version of every application among the entries up to `through`, oldest first."""
    found: dict[str, int] = {}
    for _, tail in manifest.tails(raw, MAGIC, through):
        tag = find_tag(tail)
        if tag is not None:
            found[tag.app] = max(tag.version, found.get(tag.app, 0))
    return dict(reversed(found.items()))
