"""Recovery of the segment directory at startup.

The scan removes staged files, and data without a sidecar that is still in the log. It rebuilds a sidecar from
the data if the sidecar is damaged, or if no other file has the data. Unreadable files are moved to the
quarantine. Quarantined files of earlier starts are reported again, because a crash may have come before they
were recorded. Repeating the scan, even after a crash in it, gives the same result.

The log is truncated by whole files, so it often still has committed entries. A segment holds entries of one
stream in the order of the log. The same entries produce the same bundles in the same places, so a segment can
be rebuilt from the log under its old number, and existing acknowledgements stay valid.
"""

from __future__ import annotations

import enum
import logging
import os
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from xxhash import xxh3_64_hexdigest

from penstock.errors import Corrupt
from penstock.quiver.model import SegmentInfo
from penstock.quiver.segments.directory import TMP, SegmentDirectory
from penstock.quiver.segments.file import CREATED_BY, SegmentReader, check_bytes
from penstock.quiver.segments.metadata import arrow_name, decode_meta, encode_meta, info_of, meta_name, seq_of

Verify: TypeAlias = Literal["metadata", "full"]

_LOGGER = logging.getLogger(__name__)


class DamageAction(enum.StrEnum):
    """How damage was handled."""

    QUARANTINED = "quarantined"
    REBUILT = "rebuilt"
    MISSING = "missing"


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentDamage:
    """One damaged segment. `info` is the content of its sidecar, if known.

    After `REBUILT` the segment is committed as before. Otherwise its bundles can no longer be delivered.
    """

    seq: int
    action: DamageAction
    reason: str
    info: SegmentInfo | None


@dataclass(slots=True, eq=False)
class SegmentScan:
    """A scan and its result: `infos` by number, and the numbers whose checksums were `verified`.

    `rebuild` says that no log has the uncommitted data. Log positions below `wal_cursor` belong to committed
    segments only, so data from there has lost its sidecar and is kept.
    """

    directory: SegmentDirectory
    verify: Verify = "metadata"
    wal_cursor: int = 0
    rebuild: bool = False
    infos: dict[int, SegmentInfo] = field(default_factory=dict)
    verified: set[int] = field(default_factory=set)
    damage: list[SegmentDamage] = field(default_factory=list)
    highest_seq: int = 0
    quarantined: dict[int, SegmentInfo | None] = field(default_factory=dict)
    _names: set[str] = field(default_factory=set)

    def run(self) -> None:
        """Recover the directory. Raise `Unsupported` for files of a later version without any change."""
        self._names = set(self.directory.names())
        # Ignore staged files: their numbers are uncertain, and a skipped number looks like a loss.
        every = [name for name in (*self._names, *self.directory.quarantined()) if not name.endswith(TMP)]
        self.highest_seq = max((seq_of(name) or 0 for name in every), default=0)
        sidecars = self._read_sidecars()
        self._remove_staged()
        for seq in sorted({seq for seq in map(seq_of, self._names) if seq is not None}):
            if seq in sidecars:
                self._committed(seq, sidecars[seq])
            elif arrow_name(seq) in self._names:
                self._uncommitted(seq)
        self._list_quarantine()

    def _list_quarantine(self) -> None:
        """List the committed segments in the quarantine, with their sidecars if these can be read."""
        for name in self.directory.quarantined():
            seq = seq_of(name)
            if seq is None or seq in self.infos or not name.endswith(".meta.json"):
                continue
            info = self._read_sidecar(seq, os.path.join(self.directory.quarantine, name))
            if self.quarantined.get(seq) is None:
                self.quarantined[seq] = None if isinstance(info, Corrupt) else info

    def _read_sidecars(self) -> dict[int, SegmentInfo | Corrupt]:
        """Read all sidecars before changing anything, so that files of a later version are left alone."""
        sidecars: dict[int, SegmentInfo | Corrupt] = {}
        for name in self._names:
            seq = seq_of(name)
            if seq is not None and name == meta_name(seq):
                sidecars[seq] = self._read_sidecar(seq, self.directory.meta_path(seq))
        return sidecars

    def _read_sidecar(self, seq: int, path: str) -> SegmentInfo | Corrupt:
        try:
            info = decode_meta(self.directory.fs.read(path), path)
        except Corrupt as error:
            return error
        return info if info.seq == seq else Corrupt(f"{path} describes segment {info.seq}")

    def _remove_staged(self) -> None:
        staged = [name for name in self._names if name.endswith(TMP) and seq_of(name) is not None]
        for name in staged:
            self.directory.fs.unlink(os.path.join(self.directory.directory, name))
        if staged:
            self.directory.fs.sync_dir(self.directory.directory)

    def _committed(self, seq: int, sidecar: SegmentInfo | Corrupt) -> None:
        info = None if isinstance(sidecar, Corrupt) else sidecar
        if arrow_name(seq) not in self._names:
            self.directory.move_to_quarantine(seq)
            self._report(
                seq, DamageAction.MISSING, f"{arrow_name(seq)} is missing, but its sidecar exists", info
            )
        elif isinstance(sidecar, Corrupt):
            self._repair_sidecar(seq, str(sidecar))
        else:
            self._accept(sidecar)

    def _accept(self, info: SegmentInfo) -> None:
        path = self.directory.arrow_path(info.seq)
        try:
            size = self.directory.fs.stat(path).size
            if size != info.file_size:
                raise Corrupt(f"{path} has {size} bytes where {info.file_size} were written")
            if self.verify == "full":
                check_bytes(self.directory.view(info.seq), info, path)
                self.verified.add(info.seq)
        except Corrupt as error:
            self._quarantine(info.seq, str(error), info)
        else:
            self.infos[info.seq] = info

    def _repair_sidecar(self, seq: int, reason: str) -> None:
        """Rebuild a damaged sidecar from the data, if the data is intact."""
        info = self._info_from_data(seq)
        if info is None:
            self._quarantine(seq, reason, None)
            return
        self._write_sidecar(info)
        self._report(seq, DamageAction.REBUILT, reason, info)

    def _uncommitted(self, seq: int) -> None:
        info = self._info_from_data(seq)
        if info is None:
            # It was complete before it was renamed, so this is damage, and the file is the only trace of it.
            self._quarantine(seq, f"{arrow_name(seq)} has no sidecar and cannot be read", None)
        elif self.rebuild or info.wal_start < self.wal_cursor:
            self._write_sidecar(info)
        else:
            self.directory.remove([seq])

    def _info_from_data(self, seq: int) -> SegmentInfo | None:
        path = self.directory.arrow_path(seq)
        try:
            view = self.directory.fs.read(path)
            reader = SegmentReader(view, path)
            info = info_of(
                reader.metadata,
                path,
                file_size=len(view),
                xxh3=xxh3_64_hexdigest(view),
                created_by=f"{CREATED_BY}, rebuilt",
            )
            reader.validate(info)
        except Corrupt:
            return None
        return info if info.seq == seq else None

    def _write_sidecar(self, info: SegmentInfo) -> None:
        self.directory.stage_sidecar(info.seq, encode_meta(info))
        self.directory.name_sidecar(info.seq)
        self.directory.protect(info.seq)
        self.infos[info.seq] = info
        self.verified.add(info.seq)

    def _quarantine(self, seq: int, reason: str, info: SegmentInfo | None) -> None:
        self.directory.move_to_quarantine(seq)
        self._report(seq, DamageAction.QUARANTINED, reason, info)

    def _report(self, seq: int, action: DamageAction, reason: str, info: SegmentInfo | None) -> None:
        _LOGGER.error("segment %d is %s: %s", seq, action.value, reason)
        self.damage.append(SegmentDamage(seq=seq, action=action, reason=reason, info=info))
