"""Appending under a transaction: a writer that restarts does not append anything twice.

A transaction is (application, version), for example a streaming query and the number of its micro-batch. The
entries of an append carry it as a tag in their tail. When an entry leaves the queue, its tag is kept in the
transaction log, a side object. An append under (app, version):

    1. reads the manifest M, and in it the newest tag of app
    2. reads the log, and in it the last version of app
    3. last := the greater of both. Equal to version: it is committed, nothing is done. Greater: refused
    4. conditional write on M, with every entry tagged. Conflict, or no reply: from 1, with a fresh manifest
    5. enters version in the log (not needed for the proof, see below)

and a consumer that dequeues tagged entries:

    a. enters their tags in the log, whose versions only rise
    b. conditional write of the manifest without them

Suppose (app, version) landed at some write W of the manifest, and 4 succeeds again for the same pair. Its M
was the manifest at 4, so W came before M. If the entries of W are in M, then 1 saw their tag. Otherwise a
consumer removed them between W and M, at b. Its a came before that b, b came before the read of M, and 2 came
after that read, so 2 saw the tag. In both cases 3 ended the append: a contradiction. Numbers in the manifest
only rise, so no later manifest has the same bytes as M. The condition of 4 therefore means that M was still
the manifest.

So `last` in 3 is the last version at the moment of 4. The versions of some writers are positions in their
input instead of consecutive numbers. Such a writer can also require that `last` is the version from which it
continues. Of two such writers at the same time one is then refused, even if their steps end at different
positions.

The log also shows whether the manifest was replaced by an older copy. The oldest entries leave the queue
first: while an entry of one version is queued, the entries of every later version are queued too. If the
newest tag of app in M is below its version in the log, and M is still the manifest after the log was read,
nothing is appended.

A consumer of another implementation that does not know the log skips a. With step 5, a transaction is then
lost only if the writer dies between 4 and 5, and that consumer dequeues the entries before the writer
restarts.

    tag   4 bytes magic "PTX1" | u16 body_len | u64 version | app (UTF-8)        body_len = 8 + len(app)
"""

from __future__ import annotations

import logging
import random
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import msgspec

from penstock import errors
from penstock.buffer import manifest
from penstock.buffer.errors import InvalidInputError, SerializationError, StaleTransaction
from penstock.buffer.manifest_file import ManifestFile, Snapshot
from penstock.clock import Clock
from penstock.objects import Version
from penstock.retry import RetryPolicy, retry

_log = logging.getLogger(__name__)

APP_BYTES_MAX: Final = 200
"""Limit of the name, because each entry has a tag, and every append transfers all entries."""
VERSION_MAX: Final = 2**63 - 1
NO_VERSION: Final = -1
"""The value of `follows` for an application that has not committed a version."""

TRANSACTION_LOG_APPS: Final = 10_000
"""The applications that the log keeps: at most 2.5 MB, and more than write to one queue at a time."""

MAGIC: Final = b"PTX1"
_LENGTH = struct.Struct("<H")
_VERSION = struct.Struct("<Q")
_BODY_START = len(MAGIC) + _LENGTH.size
_APP_START = _BODY_START + _VERSION.size


@dataclass(frozen=True, slots=True, kw_only=True)
class Transaction:
    """An application, and the version of one of its steps. Versions of an application only rise.

    Raise `InvalidInputError` unless `app` has 1 to 200 bytes of UTF-8 and `version` is 0 to 2**63 - 1.
    """

    app: str
    version: int

    def __post_init__(self) -> None:
        try:
            size = len(self.app.encode())
        except (AttributeError, UnicodeEncodeError):
            raise InvalidInputError(
                f"the application of a transaction is text that UTF-8 can encode, not {self.app!r}"
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
    """Encode the tag, which becomes the tail of an entry."""
    return _head(transaction.app) + _VERSION.pack(transaction.version) + transaction.app.encode()


def _head(app: str) -> bytes:
    return MAGIC + _LENGTH.pack(_VERSION.size + len(app.encode()))


def find_tag(tail: bytes) -> Transaction | None:
    """Return the tag in a tail, or None. The tail may have other bytes before and after the tag."""
    start = tail.find(MAGIC)
    while start >= 0:
        tag = _read_tag(tail, start)
        if tag is not None:
            return tag
        start = tail.find(MAGIC, start + 1)
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
    """Return the version in the newest tag of `app` in the manifest `raw`, or None."""
    for _, tail in manifest.tails(raw, _head(app)):
        tag = find_tag(tail)
        if tag is not None and tag.app == app:
            return tag.version
    return None


def tags(raw: bytes, through: int) -> dict[str, int]:
    """Return the highest version of each application in the entries up to `through`, oldest first."""
    found: dict[str, int] = {}
    for _, tail in manifest.tails(raw, MAGIC, through):
        tag = find_tag(tail)
        if tag is not None:
            found[tag.app] = max(tag.version, found.get(tag.app, 0))
    return dict(reversed(found.items()))


class _StoredLog(msgspec.Struct, forbid_unknown_fields=True):
    version: int
    last: list[tuple[str, int]]


def write_transaction_log(versions: Mapping[str, int]) -> bytes:
    return msgspec.json.encode(_StoredLog(version=1, last=list(versions.items())))


def read_transaction_log(raw: bytes) -> dict[str, int]:
    """Decode the log as application to version, newest last. Raise `SerializationError` if it is damaged.

    While the log is unreadable, nothing may be appended under a transaction, and no tagged entry may be
    dequeued. A new log in its place would allow committed transactions to be appended again.
    """
    try:
        stored = msgspec.json.decode(raw, type=_StoredLog)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise SerializationError(f"the transaction log is damaged: {error}") from error
    if stored.version != 1:
        raise SerializationError(f"transaction log version {stored.version} is unknown")
    try:
        known = [Transaction(app=app, version=version) for app, version in stored.last]
    except InvalidInputError as error:
        raise SerializationError(f"the transaction log is damaged: {error}") from error
    versions = {transaction.app: transaction.version for transaction in known}
    if len(versions) < len(known):
        raise SerializationError("the transaction log is damaged: it names an application twice")
    return versions


def merge_versions(known: Mapping[str, int], versions: Mapping[str, int]) -> dict[str, int] | None:
    """Return `known` with `versions` added, or None if that changes nothing. No version is ever lowered."""
    newer = {app: version for app, version in versions.items() if version > known.get(app, -1)}
    if not newer:
        return None
    merged = {app: version for app, version in known.items() if app not in newer} | newer
    return dict(list(merged.items())[-TRANSACTION_LOG_APPS:])


class TransactionLog:
    """The transaction log: the last version of each application, even after its entries left the queue.

    It is a side object of the manifest (`.txn`). The consumer replaces it conditionally before it dequeues
    tagged entries, and a writer does so after it has appended some. Its content stays true, because versions
    only rise. If there are too many applications, the one with the oldest change is dropped.
    """

    __slots__ = ("_file", "path")

    def __init__(self, file: ManifestFile) -> None:
        self._file = file
        self.path = file.transactions_path

    async def read(self) -> dict[str, int]:
        """Return the log as application to version; empty if there is none.

        Raise `SerializationError`, whose message says what to do.
        """
        versions, _ = await self._read()
        return versions

    async def _read(self) -> tuple[dict[str, int], Version | None]:
        """Read the log. Read it again if it does not decode: the response may have been truncated."""
        raw, version = await self._file.read_side(self.path)
        try:
            return ({} if raw is None else read_transaction_log(raw)), version
        except SerializationError:
            raw, version = await self._file.read_side(self.path)
        try:
            return ({} if raw is None else read_transaction_log(raw)), version
        except SerializationError as error:
            raise SerializationError(
                f"{self.path}: {error}; restore an older version of it. Without it a transaction that is "
                "run again could be appended twice"
            ) from error

    async def enter(self, versions: Mapping[str, int]) -> None:
        """Add `versions` in one conditional write, or write nothing if they are present.

        Raise the errors of the store. The call is safe to repeat after any outcome.
        """
        known, version = await self._read()
        merged = merge_versions(known, versions)
        if merged is not None:
            await self._file.write_side(self.path, write_transaction_log(merged), version)

    async def last_version(self, snapshot: Snapshot, app: str) -> int | None:
        """Return the last version of `app`: steps 1 to 3 above. `snapshot` is the manifest of step 1.

        Raises `SerializationError` if the log proves that the manifest is an older copy.
        """
        queued = newest_version(snapshot.raw, app)
        logged = (await self.read()).get(app)
        if queued is not None and logged is not None and queued < logged:
            await self._check_age(snapshot, app, queued, logged)
        return max((version for version in (queued, logged) if version is not None), default=None)

    async def _check_age(self, snapshot: Snapshot, app: str, queued: int, logged: int) -> None:
        """Raise `SerializationError` if the manifest is still the one that was read before the log.

        A version enters the log after its entries entered the manifest, and the oldest entries leave first.
        So while an older version is queued, a logged one is too.
        """
        if (await self._file.read()).version == snapshot.version:
            raise SerializationError(
                f"{self._file.path} is older than its transaction log {self.path}: {app!r} has committed "
                f"version {logged}, but the queue ends with its version {queued}. Restore the newest one; if "
                "there is none, keep a copy, and let a consumer take what is queued. The batches in "
                "between are in no queue"
            )


class TransactionGuard:
    """Prevents a second commit of a transaction. Without a transaction it allows everything."""

    def __init__(self, file: ManifestFile, transaction: Transaction | None, follows: int | None) -> None:
        self._path = file.path
        self._transactions = TransactionLog(file)
        self._transaction = transaction
        self._follows = follows

    async def is_committed(self, snapshot: Snapshot) -> bool:
        if self._transaction is None:
            return False
        app, version = self._transaction.app, self._transaction.version
        last = await self._transactions.last_version(snapshot, app)
        if last is not None and last > version:
            raise StaleTransaction(
                f"{app!r} has committed version {last} to {self._path} and now appends {version}: its "
                "checkpoint was set back, copied, or is used twice. Continue with the checkpoint that wrote "
                f"version {last}, or start again with an empty one"
            )
        if last != version and self._follows is not None:
            self._check_order(NO_VERSION if last is None else last)
        return last == version

    def _check_order(self, last: int) -> None:
        if last != self._follows:
            assert self._transaction is not None
            app = self._transaction.app
            raise StaleTransaction(
                f"{app!r} is at version {_format_version(last)} in {self._path}, and this step continues "
                f"from {_format_version(self._follows)}: another process uses the same name. Stop one of the "
                "two, or look up the version and continue from there"
            )

    async def enter(self, policy: RetryPolicy, clock: Clock, rng: random.Random) -> None:
        """Do step 5. The append is complete without it, so a failure is only logged."""
        if self._transaction is None:
            return
        versions = {self._transaction.app: self._transaction.version}
        passing = (errors.Unavailable, errors.Conflict, errors.OutcomeUnknown)
        try:
            await retry(lambda: self._transactions.enter(versions), policy, clock=clock, rng=rng, on=passing)
        except errors.PenstockError as error:
            _log.warning(
                "%s was not written (%s); a Penstock consumer will write it, others may dequeue too early",
                self._transactions.path,
                error,
            )


def _format_version(version: int | None) -> str:
    return "none" if version == NO_VERSION else str(version)
