"""The committed segments of one core: each is written once, verified when it is read, and removed durably."""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Final

import pyarrow as pa

from penstock.errors import Corrupt, NotFound
from penstock.quiver.model import SegmentInfo
from penstock.quiver.segments.directory import ReadMode, SegmentDirectory
from penstock.quiver.segments.file import (
    CREATED_BY,
    BundleMetadata,
    SegmentReader,
    check_bytes,
    describe,
    write_segment,
)
from penstock.quiver.segments.metadata import encode_meta
from penstock.quiver.segments.recovery import (
    DamageAction,
    SegmentDamage,
    SegmentScan,
    Verify,
)
from penstock.storage import Buffer, FileSystem

if TYPE_CHECKING:
    from penstock.quiver.model import SealedSegment

_LOGGER = logging.getLogger(__name__)
_READERS_MAX: Final = 32
_READERS_BYTES_MAX: Final = 64 * 1024**2


class SegmentStore:
    """The segments in one directory. Safe to use from several threads, of which one writes.

    `damage` lists the damage that was found, oldest first. A few files are kept open.
    """

    def __init__(self, directory: SegmentDirectory, scan: SegmentScan, *, core_id: int) -> None:
        self._directory = directory
        self._core_id = core_id
        self._lock = threading.Lock()
        self._infos = dict(sorted(scan.infos.items()))
        self._verified = scan.verified
        self._meta_bytes = {seq: len(encode_meta(info)) for seq, info in self._infos.items()}
        self._byte_count = sum(info.file_size for info in self._infos.values()) + sum(
            self._meta_bytes.values()
        )
        self._readers: OrderedDict[int, SegmentReader] = OrderedDict()
        self._leaving: set[int] = set()
        self._highest_seq = scan.highest_seq
        self.damage = scan.damage
        self._quarantined = scan.quarantined

    @classmethod
    def open(
        cls,
        fs: FileSystem,
        directory: str,
        quarantine: str,
        *,
        core_id: int = 0,
        read_mode: ReadMode = "read",
        verify: Verify = "metadata",
        wal_cursor: int = 0,
        rebuild: bool = False,
    ) -> SegmentStore:
        """Recover the directory and open it.

        `wal_cursor` is the position up to which the log may have been truncated. `rebuild` says that there is
        no log, so that intact uncommitted data is kept. With `verify="full"` every checksum is verified now,
        otherwise before the first read of each segment. Raise `Unsupported` for segments of a later version
        without changing anything.
        """
        files = SegmentDirectory(fs, directory, quarantine, read_mode)
        files.make()
        scan = SegmentScan(files, verify=verify, wal_cursor=wal_cursor, rebuild=rebuild)
        scan.run()
        return cls(files, scan, core_id=core_id)

    @property
    def highest_seq(self) -> int:
        """The highest number in a file name, including damaged and quarantined files."""
        return self._highest_seq

    @property
    def quarantined(self) -> dict[int, SegmentInfo | None]:
        """The committed segments that are only in the quarantine, with None for an unreadable sidecar."""
        return {seq: info for seq, info in sorted(self._quarantined.items()) if seq not in self._infos}

    @property
    def byte_count(self) -> int:
        """The size of all committed segments and their sidecars, in bytes."""
        return self._byte_count

    def usage(self, seqs: Iterable[int]) -> tuple[int, set[int]]:
        """Return the size of all committed segments, and which of `seqs` are among them."""
        with self._lock:
            return self._byte_count, {seq for seq in seqs if seq in self._infos}

    def bytes_of(self, seq: int) -> int:
        """Return the bytes that removing this segment frees. Raise `NotFound`."""
        with self._lock:
            return self.get(seq).file_size + self._meta_bytes[seq]

    def infos(self) -> list[SegmentInfo]:
        """Return every committed segment, oldest first."""
        with self._lock:
            return [info for _, info in sorted(self._infos.items())]

    def get(self, seq: int) -> SegmentInfo:
        """Return one committed segment. Raise `NotFound`."""
        info = self._infos.get(seq)
        if info is None:
            raise NotFound(f"segment {seq} does not exist; it was removed or never committed")
        return info

    def path(self, seq: int) -> str:
        """Return the path of a segment's Arrow file. Raise `NotFound`."""
        self.get(seq)
        return self._directory.arrow_path(seq)

    def write(self, sealed: SealedSegment, seq: int) -> SegmentInfo:
        """Commit a segment under this number. It is durable and readable on return.

        After any error it is not committed, and the call may be repeated with the same arguments, which
        writes the same bytes. After a crash the segment is either complete or absent.
        """
        self._highest_seq = max(self._highest_seq, seq)
        info = describe(sealed, seq, core_id=self._core_id, created_by=CREATED_BY)
        written = (0, "")

        def fill(write: Callable[[Sequence[Buffer]], None]) -> None:
            nonlocal written
            written = write_segment(sealed, info, write)

        self._directory.stage_data(seq, fill)
        info = dataclasses.replace(info, file_size=written[0], xxh3=written[1])
        self._directory.stage_sidecar(seq, encode_meta(info))
        self._directory.name_data(seq)
        self._directory.name_sidecar(seq)
        self._directory.protect(seq)
        self._register(info)
        return info

    def read(self, seq: int, bundle: int) -> pa.RecordBatch:
        """Return one bundle as it was accepted. Raise `NotFound`, `Corrupt` or `IndexError`.

        The first read of a segment after a start verifies its whole checksum. The batch points into the file
        and stays valid when the segment is removed.
        """
        return self._reader(seq).batch(bundle)

    def batches(self, seq: int) -> Iterator[pa.RecordBatch]:
        """Yield every bundle of a segment in order. Raise as `read`."""
        return self._reader(seq).batches()

    def schema(self, seq: int) -> pa.Schema:
        """Return the schema of a segment's batches. Raise as `read`."""
        return self._reader(seq).schema

    def view(self, seq: int) -> Buffer:
        """Return a segment's file after verifying its checksum. Raise as `read`."""
        return self._checked_view(self.get(seq))

    def sidecar(self, seq: int) -> bytes:
        """Return a segment's sidecar. Raise `NotFound`."""
        return encode_meta(self.get(seq))

    def bundle_metadata(self, seq: int) -> list[BundleMetadata]:
        """Return the metadata of every bundle of a segment, in order. Raise as `read`."""
        reader = self._reader(seq)
        return [reader.bundle(bundle) for bundle in range(reader.bundle_count)]

    def verify(self, seq: int) -> None:
        """Verify a segment's checksum now. Raise `NotFound` or `Corrupt`."""
        with self._lock:
            self._verified.discard(seq)
            self._readers.pop(seq, None)
        self._reader(seq)

    def remove(self, *seqs: int) -> None:
        """Remove segments durably. After an error they still count, and the call must be repeated."""
        self._leave(seqs)
        self._directory.remove(seqs)
        for seq in seqs:
            self._forget(seq)

    def quarantine(self, seq: int, reason: str) -> SegmentDamage:
        """Move a damaged segment to the quarantine and keep its bytes. It is no longer committed."""
        info = self._infos.get(seq)
        self._leave([seq])
        self._directory.move_to_quarantine(seq)
        self._forget(seq)
        self._quarantined[seq] = info
        damage = SegmentDamage(seq=seq, action=DamageAction.QUARANTINED, reason=reason, info=info)
        _LOGGER.error("segment %d is %s: %s", seq, damage.action.value, reason)
        self.damage.append(damage)
        return damage

    def put_back(self, sealed: SealedSegment, info: SegmentInfo, reason: str) -> SegmentInfo:
        """Write a quarantined segment again under its number. Raise as `write`."""
        written = self.write(sealed, info.seq)
        _LOGGER.warning("segment %d is %s: %s", info.seq, DamageAction.REBUILT.value, reason)
        self.damage.append(
            SegmentDamage(seq=info.seq, action=DamageAction.REBUILT, reason=reason, info=written)
        )
        return written

    def _reader(self, seq: int) -> SegmentReader:
        info = self.get(seq)
        with self._lock:
            reader = self._readers.get(seq)
            if reader is not None:
                self._readers.move_to_end(seq)
                return reader
        # Outside the lock: the first read of a segment reads all of its bytes.
        reader = self._open(info)
        with self._lock:
            if seq in self._infos:
                self._verified.add(seq)
                self._readers[seq] = reader
                while len(self._readers) > 1 and self._has_too_many_readers():
                    self._readers.popitem(last=False)
        return reader

    def _has_too_many_readers(self) -> bool:
        """Return whether open readers cost too much: descriptors if mapped, otherwise memory."""
        if len(self._readers) > _READERS_MAX or self._directory.read_mode == "mmap":
            return len(self._readers) > _READERS_MAX
        held = sum(info.file_size for seq in self._readers if (info := self._infos.get(seq)) is not None)
        return held > _READERS_BYTES_MAX

    def _open(self, info: SegmentInfo) -> SegmentReader:
        return SegmentReader(self._checked_view(info), self._directory.arrow_path(info.seq))

    def _checked_view(self, info: SegmentInfo) -> Buffer:
        path = self._directory.arrow_path(info.seq)
        try:
            view = self._directory.view(info.seq)
        except NotFound as error:
            if info.seq not in self._infos or info.seq in self._leaving:
                raise
            raise Corrupt(f"{path} is missing, but segment {info.seq} was not removed") from error
        # Verify again in `read` mode, because the bytes may have changed since the last read.
        if info.seq not in self._verified or self._directory.read_mode == "read":
            check_bytes(view, info, path)
        return view

    def _register(self, info: SegmentInfo) -> None:
        meta_bytes = len(encode_meta(info))
        with self._lock:
            self._infos[info.seq] = info
            self._meta_bytes[info.seq] = meta_bytes
            self._byte_count += info.file_size + meta_bytes
            self._verified.add(info.seq)

    def _leave(self, seqs: Sequence[int]) -> None:
        """Expect these files to go missing: a reader may come between the removal and `_forget`."""
        with self._lock:
            self._leaving.update(seqs)

    def _forget(self, seq: int) -> None:
        with self._lock:
            info = self._infos.pop(seq, None)
            if info is not None:
                self._byte_count -= info.file_size + self._meta_bytes.pop(seq)
            self._verified.discard(seq)
            self._readers.pop(seq, None)
            self._leaving.discard(seq)
