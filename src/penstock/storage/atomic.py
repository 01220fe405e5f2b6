"""Whole files that are either old or new, never half-written."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Sequence

from penstock.errors import OutcomeUnknown, PenstockError
from penstock.storage.fs import Buffer, FileSystem, publish, stage

__all__ = ["write_durably"]


def write_durably(fs: FileSystem, path: str, buffers: Sequence[Buffer], *, staging: str) -> None:
    """Replace the file at `path`; on return the new bytes survive a power cut.

    `staging` is an existing directory on the same device. Raises `OutcomeUnknown` if the new file is in
    place but may not be durable; after any other error the old file is untouched.
    """
    staged = os.path.join(staging, f"{os.path.basename(path)}.{uuid.uuid4().hex}")
    stage(fs, staged, buffers)
    try:
        publish(fs, staged, path)
    except OutcomeUnknown:
        raise
    except PenstockError:
        with contextlib.suppress(PenstockError):
            fs.unlink(staged)
        raise
