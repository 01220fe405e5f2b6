"""How far the write-ahead log of a core is durable, noted at every commit: 32 bytes, written in place.

magic `QUIVER\\0L` | version u16 | size u16 | wal_position u64 | wal_seq u64 | xxh3 u32 over what is before it

The last file of a log ends where its entries end. If bytes that were synced are removed from it, nothing
that is left shows that they were there; this does. It is written after the sync and before anybody hears of
it, and not synced itself: the acknowledgements have the same, durably and a little later. So it is never
ahead of the log.
"""

from __future__ import annotations

import contextlib
import os
import struct
from typing import Final

from xxhash import xxh3_64_intdigest

from penstock.errors import MediaError, NotFound, PenstockError
from penstock.storage import FileSystem, LogFile, write_durably

LOGGED: Final = "logged"
_MAGIC = b"QUIVER\0L"
_VERSION = 1
_FIXED = struct.Struct("<8sHHQQ")
_SUM = struct.Struct("<I")
_BYTES = _FIXED.size + _SUM.size


def encode_logged(position: int, seq: int) -> bytes:
    fixed = _FIXED.pack(_MAGIC, _VERSION, _BYTES, position, seq)
    return fixed + _SUM.pack(xxh3_64_intdigest(fixed) & 0xFFFFFFFF)


def decode_logged(data: bytes) -> tuple[int, int]:
    """The position and the last bundle before it; (0, 0) if the bytes are no sound note."""
    if len(data) != _BYTES:
        return 0, 0
    _, _, _, position, seq = _FIXED.unpack_from(data)
    return (position, seq) if encode_logged(position, seq) == data else (0, 0)


def read_logged(fs: FileSystem, directory: str) -> tuple[int, int]:
    """What the file in `directory` says; (0, 0) if there is none or it is damaged."""
    try:
        return decode_logged(fs.read(os.path.join(directory, LOGGED)))
    except (MediaError, NotFound):
        return 0, 0


class LoggedFile:
    """The note of a core that is open. The loss of an update only makes it say less, so nothing raises."""

    def __init__(self, fs: FileSystem, directory: str) -> None:
        self._file: LogFile | None = None
        path = os.path.join(directory, LOGGED)
        with contextlib.suppress(PenstockError):
            fs.make_dirs(directory)
            known = read_logged(fs, directory)
            if not any(known):
                write_durably(fs, path, [encode_logged(0, 0)], staging=directory)
            self._file = fs.open_log(path)

    def reach(self, position: int, seq: int) -> None:
        """The log is durable up to `position`, and `seq` is the last bundle before it."""
        if self._file is None:
            return
        try:
            self._file.write_at(0, [encode_logged(position, seq)])
        except PenstockError:
            self.close()

    def close(self) -> None:
        """Let go of the file."""
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(PenstockError):
                file.close()
