"""The position in the source that feeds a database. It is stored with the rows and never moves back.

    position    u64, the number of the last batch, the name of the source as UTF-8, and, if it is known, a
                zero byte and the name of that batch

The name of the batch detects a source that was reset. A position without a source name was stored before
names existed, or by a caller that gave none.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

from penstock.errors import Corrupt, InvalidInput

_SEQUENCE: Final = struct.Struct("<Q")
SEQUENCE_MAX: Final = 2**64 - 1
_SOURCE_BYTES_MAX: Final = 65_535
"""Limit on the name of a source. It is stored with every flush that takes a batch. Queue addresses are
shorter."""


@dataclass(frozen=True, slots=True)
class Position:
    """The last batch taken from a source. `source` is the name of the source without credentials, or empty.

    Raises `InvalidInput` for a value that cannot be stored: a number that is not a u64, or a name that is not
    text, has a zero byte (which ends the name in the stored form), or has more than 65,535 bytes of UTF-8.
    """

    sequence: int
    source: str = ""
    location: str = field(default="", compare=False)
    """The name of the batch in its source; empty if unknown."""

    def __post_init__(self) -> None:
        if isinstance(self.sequence, bool) or not isinstance(self.sequence, int):
            raise InvalidInput(f"a position is a whole number, not {self.sequence!r}")
        if not 0 <= self.sequence <= SEQUENCE_MAX:
            raise InvalidInput(f"a position is a whole number of at least 0, not {self.sequence}")
        is_name = isinstance(self.source, str) and "\0" not in self.source
        if not is_name or len(_utf8(self.source)) > _SOURCE_BYTES_MAX:
            wanted = f"a text of at most {_SOURCE_BYTES_MAX:,} bytes without a zero byte"
            raise InvalidInput(f"the name of a source is {wanted}, not {self.source!r:.80}")

    def encode(self) -> bytes:
        batch = f"\0{self.location}".encode() if self.location else b""
        return _SEQUENCE.pack(self.sequence) + self.source.encode() + batch

    @classmethod
    def decode(cls, value: bytes) -> Position:
        """Decode a stored position. Raises `Corrupt`."""
        if len(value) < _SEQUENCE.size:
            raise Corrupt(f"a position has at least {_SEQUENCE.size} bytes, not {len(value)}")
        try:
            source, _, location = value[_SEQUENCE.size :].decode().partition("\0")
            return cls(_SEQUENCE.unpack_from(value)[0], source, location)
        except UnicodeDecodeError as error:
            raise Corrupt(f"the name of a source is not UTF-8: {error}") from None
        except InvalidInput as error:
            raise Corrupt(f"a position breaks its format: {error}") from None


def _utf8(source: str) -> bytes:
    try:
        return source.encode()
    except UnicodeEncodeError as error:
        raise InvalidInput(f"the name of a source is not text that UTF-8 can hold: {error}") from None


class FedSource:
    """The progress of a feeding source, shared by the deltas of a database. Only deltas change it."""

    def __init__(self, position: Position | None = None) -> None:
        self.position = position
        """The last position taken."""
        self._refused: int | None = None

    @contextmanager
    def taking(self, position: Position | None) -> Iterator[None]:
        """Advance to `position` when the `with` block, which applies the write, ends without an error.

        Raises `InvalidInput` for a position at or before the last one of the same source. Also raises it for
        a position after a refused batch, because the stored position would skip that batch permanently.
        """
        if position is None:
            yield
            return
        self._check(position)
        try:
            yield
        except Exception:
            self._refused = position.sequence
            raise
        self.position, self._refused = position, None

    def _check(self, position: Position) -> None:
        last = self.position
        if last is not None and position.sequence <= last.sequence and last.source in ("", position.source):
            raise InvalidInput(f"sequence {position.sequence} is not after {last.sequence}, which is stored")
        if self._refused is not None and position.sequence > self._refused:
            raise InvalidInput(
                f"sequence {position.sequence} cannot be stored before {self._refused}, which was refused: "
                "write that one first, without the rows that cannot be stored"
            )
