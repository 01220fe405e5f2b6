"""A name for one directory of a store, made once: segment numbers mean something only within it."""

from __future__ import annotations

import logging
import os
import re
from typing import Final

from penstock.clock import SYSTEM_CLOCK, Clock
from penstock.errors import Corrupt, NotFound
from penstock.files import write_durably
from penstock.fs import FileSystem
from penstock.ids import SYSTEM_RNG, mint_ulid

__all__ = ["directory_identity"]

_LOG = logging.getLogger(__name__)
_NAME: Final = "collector.id"
_IDENTITY: Final = re.compile(r"[0-9A-Z]{26}")


def directory_identity(fs: FileSystem, directory: str, *, clock: Clock = SYSTEM_CLOCK) -> str:
    """The identity in the directory; made, durably, if there is none.

    A directory that was removed and made anew has another one, so that its first segments are not taken for
    those that were delivered long ago. Raises `Corrupt` for a file that holds something else.
    """
    path = os.path.join(directory, _NAME)
    try:
        found = fs.read(path).decode("ascii", "replace").strip()
    except NotFound:
        if any("/segments/" in name for name, _ in fs.list_files(directory)):
            _LOG.warning(
                "%s is missing, but there are segments beside it: the directory gets a new identity, and "
                "what was delivered into queues but not acknowledged here may be delivered again",
                path,
            )
        made = mint_ulid(clock.now_ms(), SYSTEM_RNG)
        write_durably(fs, path, [made.encode()], staging=directory)
        return made
    if not _IDENTITY.fullmatch(found):
        raise Corrupt(f"{path} holds no identity; restore it, or remove it if duplicates in queues are fine")
    return found
