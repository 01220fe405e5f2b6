"""Checking a data directory: log, segments, acknowledgements, and their consistency.

`check` changes nothing and takes no lock, so it may run while a writer does; concurrent changes may briefly
appear as problems. `repair` needs exclusive access to the directory. It does the same as a start: damaged
files are copied or moved to `quarantine/` before anything is changed, and their contents are given up.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from penstock.clock import SYSTEM_CLOCK, Clock
from penstock.errors import Corrupt, NotFound, Unsupported
from penstock.findings import Finding, Severity, problems_in
from penstock.quiver.errors import Locked
from penstock.quiver.model import SegmentInfo
from penstock.quiver.offsets.log import replay
from penstock.quiver.offsets.store import SubscriptionStore
from penstock.quiver.recovery import rebuild_segments
from penstock.quiver.segments.file import check_bytes
from penstock.quiver.segments.metadata import arrow_name, decode_meta, meta_name, seq_of
from penstock.quiver.segments.store import SegmentStore
from penstock.quiver.wal.log import unreadable_notes
from penstock.quiver.wal.replay import quarantine_damage, read_wal
from penstock.storage import DirectoryLock, FileSystem, LockHeld

_CORE: Final = re.compile(r"core_(0|[1-9][0-9]{0,8})")
_REPAIR: Final = "`penstock quiver fsck --repair` quarantines it, and so does the next start"


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreFinding(Finding):
    """A finding about one core."""

    core: int


@dataclass(slots=True, kw_only=True)
class CheckedCore:
    """The result of checking one core."""

    core: int
    directory: str
    findings: list[CoreFinding]
    log_entries: int = 0
    segments: int = 0
    items: int = 0
    byte_count: int = 0
    ack_records: int = 0
    subscribers: int = 0

    @property
    def problems(self) -> list[CoreFinding]:
        return problems_in(self.findings)

    def problem(self, subject: str, text: str, advice: str = _REPAIR) -> None:
        self._add(Severity.PROBLEM, subject, text, advice)

    def note(self, subject: str, text: str, advice: str = "") -> None:
        self._add(Severity.NOTE, subject, text, advice)

    def _add(self, severity: Severity, subject: str, text: str, advice: str) -> None:
        self.findings.append(
            CoreFinding(severity=severity, core=self.core, subject=subject, text=text, advice=advice)
        )


def core_directories(fs: FileSystem, root: str) -> list[tuple[int, str]]:
    """Return the cores of a data directory, by number. Raise `NotFound` if there is none."""
    names = {name.partition("/")[0] for name, _ in fs.list_files(root)}
    numbers = sorted(int(match[1]) for name in names if (match := _CORE.fullmatch(name)) is not None)
    if not numbers:
        raise NotFound(f"{root} contains no core_<n> directory; give the data directory of a Quiver")
    return [(number, os.path.join(root, f"core_{number}")) for number in numbers]


def is_in_use(fs: FileSystem, core_dir: str) -> bool:
    """Return whether a process has this core open."""
    try:
        with fs.lock(os.path.join(core_dir, "LOCK"), wait=False):
            return False
    except LockHeld:
        return True


def check(
    fs: FileSystem, core: int, core_dir: str, on_progress: Callable[[str], None] = lambda text: None
) -> CheckedCore:
    """Verify every checksum of one core. Raise `Unsupported` for segments of a later version.

    A log of a later version is reported as a problem, because a damaged header may look the same.
    """
    checked = CheckedCore(core=core, directory=core_dir, findings=[])
    on_progress(f"core {core}: write-ahead log")
    _check_wal(fs, checked)
    _check_notes(fs, checked)
    infos = list(_check_segments(fs, checked, on_progress))
    on_progress(f"core {core}: acknowledgements")
    _check_acks(fs, checked, infos)
    _check_quarantine(fs, checked)
    return checked


def _check_notes(fs: FileSystem, checked: CheckedCore) -> None:
    advice = "no data is lost, and the next write replaces the file; check the device"
    for subject, text in unreadable_notes(fs, checked.directory):
        checked.problem(subject, text, advice)


def _check_wal(fs: FileSystem, checked: CheckedCore) -> None:
    # Read this before the log: a concurrent writer can only make the log longer than this.
    logged_end = replay(fs, checked.directory, keep_evidence=False).state.logged_end
    try:
        found = read_wal(fs, os.path.join(checked.directory, "wal"))
    except Unsupported as error:
        advice = "a start fails on it; if no other release wrote it, its header is damaged: restore it"
        checked.problem("wal", str(error), advice)
        return
    found.expect(logged_end)
    checked.log_entries = sum(1 for _ in found.entries())
    for damage in found.damage:
        checked.problem(
            f"wal/{damage.name}",
            f"{damage.reason}, from byte {damage.start} on",
            "the next start copies it to quarantine/ and continues after it; "
            "bundles in it that no segment has are lost",
        )
    if found.unknown_entries:
        checked.note("wal", f"{found.unknown_entries} entries have a type that this release skips")


def _check_segments(
    fs: FileSystem, checked: CheckedCore, on_progress: Callable[[str], None]
) -> Iterator[SegmentInfo]:
    """Yield the intact segments, and record the problems of the others."""
    directory = os.path.join(checked.directory, "segments")
    names = {name for name, _ in fs.list_files(directory)}
    for seq in sorted({seq for seq in map(seq_of, names) if seq is not None}):
        on_progress(f"core {checked.core}: segment {seq}")
        if meta_name(seq) not in names:
            checked.note(f"segments/{arrow_name(seq)}", "was not committed", "the next start writes it again")
            continue
        try:
            info = _check_segment(fs, directory, seq)
        except NotFound:
            continue  # removed in the meantime
        except Corrupt as error:
            checked.problem(f"segments/{arrow_name(seq)}", str(error))
            continue
        checked.segments += 1
        checked.items += info.item_count
        checked.byte_count += info.file_size
        yield info


def _check_segment(fs: FileSystem, directory: str, seq: int) -> SegmentInfo:
    meta, data = os.path.join(directory, meta_name(seq)), os.path.join(directory, arrow_name(seq))
    info = decode_meta(fs.read(meta), meta)
    if info.seq != seq:
        raise Corrupt(f"its sidecar describes segment {info.seq}")
    try:
        check_bytes(fs.read(data), info, data)
    except NotFound:
        fs.stat(meta)  # raises when both are gone, as after a removal
        raise Corrupt("the sidecar exists but the data is missing") from None
    return info


def _check_acks(fs: FileSystem, checked: CheckedCore, infos: list[SegmentInfo]) -> None:
    found = replay(fs, checked.directory, keep_evidence=False)
    checked.ack_records = found.records
    checked.subscribers = len(found.state.subscribers)
    for text in found.damage:
        checked.problem("acknowledgements", text, f"lost acknowledgements cause redelivery; {_REPAIR}")
    for first, last in found.state.take_in(infos):
        span = f"segment {first}" if first == last else f"segments {first} to {last}"
        checked.problem(span, "missing without a record of its removal", "the next start drops it")


def _check_quarantine(fs: FileSystem, checked: CheckedCore) -> None:
    quarantined = [name for name, _ in fs.list_files(os.path.join(checked.directory, "quarantine"))]
    if quarantined:
        checked.note(
            "quarantine",
            f"{len(quarantined)} damaged files are kept",
            "remove them when they are no longer needed",
        )


def repair(fs: FileSystem, core_dir: str, clock: Clock = SYSTEM_CLOCK) -> list[str]:
    """Quarantine damaged files and rebuild them where possible. Return descriptions of the changes.

    Raise `Locked` while a process has the core open, and errors of the disk. It may be repeated after an
    error.
    """
    try:
        with DirectoryLock(fs, core_dir):
            return [*_repair_wal(fs, core_dir), *_repair_rest(fs, core_dir, clock)]
    except LockHeld as error:
        raise Locked(str(error)) from error


def _repair_wal(fs: FileSystem, core_dir: str) -> list[str]:
    """Copy damaged parts of the log. The log itself stays unchanged: the next start skips the damage."""
    found = read_wal(fs, os.path.join(core_dir, "wal"))
    for _ in found.entries():
        pass
    copies = quarantine_damage(fs, found, os.path.join(core_dir, "quarantine"))
    return [f"copied the damaged part of the log to {copy}" for copy in copies]


def _repair_rest(fs: FileSystem, core_dir: str, clock: Clock) -> list[str]:
    found = read_wal(fs, os.path.join(core_dir, "wal"))
    offsets = SubscriptionStore(fs, core_dir, clock=clock)
    store = SegmentStore.open(
        fs,
        os.path.join(core_dir, "segments"),
        os.path.join(core_dir, "quarantine"),
        core_id=int(core_dir.rpartition("_")[2]),
        verify="full",
        wal_cursor=found.cursor,
        rebuild=not found.found.files,
    )
    rebuild_segments(store, offsets, fs, os.path.join(core_dir, "wal"))
    losses = offsets.reconcile(store.infos(), highest_seq=store.highest_seq, quarantined=store.quarantined)
    done = [f"segment {damage.seq} is {damage.action.value}: {damage.reason}" for damage in store.damage]
    done += [f"segments {first} to {last} are recorded as dropped" for first, last in losses.missing]
    if losses.corrupt:
        done.append(f"{len(losses.corrupt)} damaged segments are recorded as dropped")
    if offsets.damage:
        # After two checkpoints none needs the damaged log files, which have been copied.
        for _ in range(2):
            offsets.checkpoint()
        done.append("a new checkpoint of the offsets was written; the damaged files are in quarantine/")
    offsets.close()
    return done
