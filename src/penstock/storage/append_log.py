"""An ordered stream of frames in preallocated files that stays correct after failed writes.

After a crash of the process, `scan` finds every frame for which `append` returned. After a power failure it
finds every frame that was synced. An undelivered frame never reappears after a later frame was delivered.

A failed write or sync breaks the active file: nothing more is appended to it, because it is unknown which
bytes the kernel kept. The next append starts a new file. Its header says that the broken file is valid up to
the offset that was durable. It begins with a copy of the frames that were delivered but not yet durable in
the broken file. The log continues only when that file and its name are durable.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
import uuid
from collections.abc import Callable, Sequence

from penstock.errors import Conflict, MediaError, NotFound, PenstockError, StorageFull
from penstock.storage.fs import Buffer, FileSystem, FileView, LogFile
from penstock.storage.log_extent import ExtentFile
from penstock.storage.log_layout import LogFormat, LogHeader, LogLayout, LogPosition, NumberedLayout
from penstock.storage.log_scan import LogScan, repair_tail, scan

_FILE_BYTES = 64 * 1024**2
# A small first file lets a log open within milliseconds; the next file is allocated immediately.
_FIRST_FILE_BYTES = 4 * 1024**2
_PREPARED = "next-"
_ERASED_BYTES = 64
_SPARE_BYTES = 64 * 1024
"""Reserve in every file for writes that must succeed when the device is full."""
_BULK_BYTES = 512 * 1024
"""The mean append size from which writing zeros in advance is too expensive: a sync mostly writes data, and a
file is full before the next one is ready."""


class AppendLog:
    """The log of one directory, open for appending.

    One thread appends, syncs, marks, rotates and reads the end offsets. Other threads may call `view`,
    `files`, `drop_before` and `prepare_next`.
    """

    def __init__(
        self,
        fs: FileSystem,
        directory: str,
        fmt: LogFormat,
        *,
        file_bytes: int,
        next_frame: int,
        salt: Callable[[], int],
        layout: LogLayout,
        reserve_only: bool,
        extent: ExtentFile | None = None,
    ) -> None:
        self._fs = fs
        self._directory = directory
        self._fmt = fmt
        self._layout = layout
        self._reserve_only = reserve_only
        self._extent = extent
        self._file_bytes = file_bytes
        self._new_file_bytes = min(file_bytes, _FIRST_FILE_BYTES)
        self._next_frame = next_frame
        self._salt_of = salt
        self._mark_bytes = len(fmt.mark(0))
        self._spare_bytes = min(_SPARE_BYTES, file_bytes // 16)
        self._mutex = threading.Condition()
        self._views: dict[int, memoryview | FileView] = {}
        self._keep: set[int] = set()
        self._uncarried: MediaError | None = None
        """Why delivered frames that are not durable cannot be copied into the next file, if so."""
        self._strays: list[int] = []
        self._prepared: str | None = None
        self._preparing = False
        self._file: LogFile | None = None
        self._broken = False
        self._number = self._end = self._durable = self._vouched = self._salt = 0
        self._appends = 0
        """The number of frames in the active file."""
        self._frames_end = 0
        """The end of the last frame in the active file that is not a mark."""
        self.rotations = 0
        self.syncs = 0

    @classmethod
    def open(
        cls,
        fs: FileSystem,
        directory: str,
        fmt: LogFormat,
        *,
        found: LogScan | None = None,
        file_bytes: int = _FILE_BYTES,
        next_frame: int = 1,
        salt: Callable[[], int] = lambda: secrets.randbits(64),
        layout: LogLayout | None = None,
        reserve_only: bool = False,
        extent: ExtentFile | None = None,
    ) -> AppendLog:
        """Continue the log after a scan, always in a new file.

        This cuts a torn tail and removes the remains of unfinished work. Reported damage stays in place: the
        caller decides whether to continue.

        - `found` is the result of the scan. Without it, the scan runs here.
        - `next_frame` is a lower bound for the number of the new file.
        - `layout` must be that of the scan. By default files are numbered.
        - With `reserve_only` new files are not filled with zeros in advance, which suits entries of many
          kilobytes. Otherwise they are, unless the appends to the last file were large.
        - `extent` is kept up to date, for a comparison with the next scan.
        """
        fs.make_dirs(directory)
        layout = layout or NumberedLayout(fmt)
        if found is None:
            found = scan(fs, directory, fmt, layout=layout)
        repair_tail(fs, found)
        first = max(next_frame, found.next_frame)
        if extent is not None:
            first = max(first, extent.last_file + 3)
            extent.settle(found)
        log = cls(
            fs,
            directory,
            fmt,
            file_bytes=file_bytes,
            next_frame=first,
            salt=salt,
            layout=layout,
            reserve_only=reserve_only,
            extent=extent,
        )
        log._clear_leftovers()
        # An older snapshot may need these files. `drop_before` removes them.
        log._views = dict.fromkeys(found.older, memoryview(b""))
        log._views.update({file.number: file.view for file in found.files})
        log._keep = {damage.file for damage in found.damage}
        log._strays = list(found.strays)
        log._number, log._end, log._durable = *found.end, found.end.offset
        log._start_file(b"", 0)
        for file in found.files:
            log._retire(file.number, file.end)
        return log

    @property
    def end(self) -> LogPosition:
        """The offset of the next frame, unless it starts a new file."""
        return LogPosition(self._number, self._end)

    @property
    def durable_end(self) -> LogPosition:
        """The offset up to which everything survives a power failure."""
        return LogPosition(self._number, self._durable)

    @property
    def is_durable(self) -> bool:
        """Whether everything that was appended survives a power failure."""
        return self._durable == self._end

    @property
    def room(self) -> int:
        """Limit of the bytes of an append that does not start a new file; -1 if no file can be written."""
        last_room = self._last_room
        if last_room <= self._spare_bytes:
            return -1 if last_room < 0 else 0
        return last_room - self._spare_bytes

    @property
    def _last_room(self) -> int:
        """The same limit, including the reserve for urgent writes."""
        if self._file is None or self._broken:
            return -1
        return self._file.size - self._end - self._mark_bytes

    @property
    def wants_next(self) -> bool:
        """Whether it is time to call `prepare_next`."""
        if self._file is None or self._prepared is not None or self._preparing:
            return False
        return self._end * 2 > self._file.size or self._file.size < self._file_bytes

    def reserve(self, byte_count: int, *, urgent: bool = False) -> None:
        """Ensure that an append of `byte_count` bytes fits into the active file. Start a new file if needed.

        On a full device, an urgent append such as a deletion uses the reserve at the end of the file instead.
        Raise the error if a new file cannot be started. Delivered frames are unaffected by it.
        """
        if self._broken:
            self._replace_broken(byte_count)
        elif byte_count > self.room:
            try:
                self._rotate(byte_count)
            except StorageFull:
                if not urgent or byte_count > self._last_room:
                    raise

    def append(
        self,
        buffers: Sequence[Buffer],
        byte_count: int,
        frame_count: int,
        *,
        sync: bool,
        urgent: bool = False,
    ) -> LogPosition:
        """Write whole frames and return the position of the first. With `sync` they are durable on return.

        After an error the frames are not delivered. They may reappear after an immediate crash, but never
        after a later append. Raise `StorageFull` or another error of the file system.
        """
        if byte_count > self.room:
            self.reserve(byte_count, urgent=urgent)
        marked = self._durable > self._vouched
        if marked:
            buffers = [self._fmt.mark(self._durable ^ self._salt), *buffers]
        start = self._end + (self._mark_bytes if marked else 0)
        end = start + byte_count
        self._write(buffers, sync=sync)
        if marked:
            self._vouched = self._durable
        self._next_frame += frame_count + marked
        self._appends += 1
        self._end = end
        if frame_count:
            self._frames_end = end
        if sync:
            self._durable = end
            self.syncs += 1
            self._reached()
        return LogPosition(self._number, start)

    def sync(self) -> None:
        """Sync everything appended so far. A failure breaks the file, but keeps its delivered frames."""
        if self._durable == self._end:
            return
        if self._broken:
            self._replace_broken(0)
            return
        try:
            self._active().datasync()
        except BaseException:
            self._break()
            raise
        self._durable = self._end
        self.syncs += 1
        self._reached()

    def _reached(self) -> None:
        """Record the durable offset in the extent. A failure of that is ignored."""
        if self._extent is not None:
            self._extent.reach(self._frames_end)

    @property
    def wants_mark(self) -> bool:
        """Whether a call of `mark` would write a mark."""
        return self._durable > self._vouched and self._durable == self._end and self.room >= 0

    def mark(self) -> None:
        """Write and sync a mark that everything so far is durable.

        The mark distinguishes later damage from a torn write. Each append marks the sync before it, so this
        is for a log without further appends.
        """
        if self.wants_mark:
            self.append([], 0, 0, sync=True)
            self._vouched = self._durable
            if self._extent is not None:
                self._extent.sync()

    def rotate(self) -> None:
        """Make the active file durable and start a new one."""
        if self._broken:
            self._replace_broken(0)
        else:
            self._rotate(0)

    def prepare_next(self) -> None:
        """Allocate the next file ahead of its use. May take as long as writing a whole file."""
        with self._mutex:
            if self._prepared is not None or self._preparing:
                return
            self._preparing = True
        path: str | None = None
        try:
            path = self._allocate(self._file_bytes)
        finally:
            with self._mutex:
                self._prepared = path
                self._preparing = False
                self._mutex.notify_all()

    def discard_prepared(self) -> None:
        """Remove the file that was allocated in advance. Nothing may be appended afterwards."""
        path = self._take_prepared()
        if path is not None:
            self._discard(path)

    def view(self, file: int) -> memoryview | FileView:
        """Return the bytes of a file. Raise `KeyError` if it was dropped.

        Do not keep the result: a failed sync replaces it with a copy in memory.
        """
        return self._views[file]

    def path(self, file: int) -> str | None:
        """Return the path of a file, or None if it was dropped or its bytes are kept in memory."""
        is_read = isinstance(self._views.get(file), FileView)
        return self._path(self._layout.name(file)) if is_read else None

    def files(self) -> list[int]:
        """Return the numbers of the existing files, in order. The last one is active."""
        with self._mutex:
            return sorted(self._views)

    def drop_before(self, file: int) -> None:
        """Durably remove the files before this one, oldest first. The active file always stays.

        A damaged file is renamed instead, to keep it as evidence.
        """
        for number in self.files():
            if number >= min(file, self._number):
                break
            self._remove(number)
            with self._mutex:
                del self._views[number]
        if self._extent is not None:
            self._extent.forget_before(min(file, self._number))

    def close(self) -> None:
        """Release the active file without a sync. Call `sync` and `mark` first."""
        if self._extent is not None:
            is_known = self._durable == self._end and not self._broken
            self._extent.close(self._frames_end if is_known else None)
        if self._file is not None:
            self._file.close()

    def _write(self, buffers: Sequence[Buffer], *, sync: bool) -> None:
        file = self._active()
        try:
            if sync and self._durable == self._end:
                file.write_durably_at(self._end, buffers)
                return
            file.write_at(self._end, buffers)
            if sync:
                file.datasync()
        except BaseException:
            self._break()
            raise

    def _break(self) -> None:
        """Stop using the active file, and keep its delivered frames readable from memory.

        Erase the start of the failed bytes if possible, so that they do not reappear even without a later
        append. If that fails, a later append ensures it.
        """
        self._broken = True
        self._keep_in_memory()
        with contextlib.suppress(PenstockError):
            file = self._fs.open_log(self._path(self._layout.name(self._number)))
            try:
                room = min(_ERASED_BYTES, file.size - self._end)
                file.write_durably_at(self._end, [bytes(room)])
            finally:
                file.close()

    def _keep_in_memory(self) -> None:
        view = self._views[self._number]
        if isinstance(view, FileView):
            kept = view[: self._end]
            try:
                view.read_exactly(self._durable, self._end)
            except MediaError as error:
                self._uncarried = error
            if not view.bad:
                # Bytes in memory are assumed to be intact.
                self._views[self._number] = kept

    def _replace_broken(self, byte_count: int) -> None:
        if self._uncarried is not None:
            raise self._uncarried
        self._start_file(bytes(self._views[self._number][self._durable : self._end]), byte_count)

    def _rotate(self, byte_count: int) -> None:
        self.sync()
        self._start_file(b"", byte_count)

    def _start_file(self, carried: bytes, byte_count: int) -> None:
        """Start an active file that begins with `carried` and has space for `byte_count` more bytes.

        Everything that takes space is written before the new name is visible, so a full device leaves the
        old file as it was, with its reserve. After another failure the new file, if it is visible, says where
        the old one ends, so nothing more is appended to the old file, even if the new one is not used.
        """
        header = LogHeader(previous=LogPosition(self._number, self._durable), salt=self._salt_of())
        number = self._layout.number_after(self._number, self._next_frame)
        head = self._layout.head(number, header, carried)
        staged, file = self._staged([head], len(head) + self._mark_bytes + byte_count + self._spare_bytes)
        self._next_frame = max(number, self._next_frame) + 3
        was_broken, self._broken = self._broken, True
        try:
            if self._extent is not None:
                self._extent.prepare(number, len(head), file.size, header.previous)
            self._layout.prepare(self._fs, self._directory, number)
            # Only now: an exception that is kept also keeps an open view, and the space of a removed file.
            view = self._fs.open_view(staged)
            self._layout.install(self._fs, self._directory, staged, number)
            if self._extent is not None:
                self._extent.start_file()
        except PenstockError as error:
            self._discard(staged)
            file.close()
            if self._extent is not None:
                self._extent.withdraw()
            # After any other error it is unknown which names are durable, as it is for the bytes.
            if isinstance(error, StorageFull) and self._layout.withdraw(self._fs, self._directory, number):
                self._broken = was_broken
            else:
                self._strays += self._layout.left_behind(number)
            raise
        view.path = self._path(self._layout.name(number))
        self._activate(number, file, view, header.salt, len(head))

    def _activate(self, number: int, file: LogFile, view: FileView, salt: int, end: int) -> None:
        old, self._file = self._file, file
        replaced, counted = self._number, self._durable
        with self._mutex:
            self._views[number] = view
            self._number = number
        self._new_file_bytes = self._file_bytes
        self._salt = salt
        self._end = self._durable = self._frames_end = end
        self._vouched = end
        self._appends = 0
        self._broken = False
        self.rotations += old is not None
        if old is not None:
            with contextlib.suppress(PenstockError):
                old.close()
            self._retire(replaced, counted)
        self._clear_strays()

    def _staged(self, buffers: Sequence[Buffer], byte_count: int) -> tuple[str, LogFile]:
        """Create a durable file that starts with `buffers`, under a name that recovery ignores."""
        path = self._take_prepared() if byte_count <= self._file_bytes else None
        if path is None:
            path = self._allocate(max(byte_count, self._new_file_bytes))
        file: LogFile | None = None
        try:
            file = self._fs.open_log(path)
            file.write_durably_at(0, buffers)
        except PenstockError:
            if file is not None:
                file.close()
            self._discard(path)
            raise
        return path, file

    def _take_prepared(self) -> str | None:
        """Return the file that was allocated in advance, or None. Wait while it is being allocated."""
        with self._mutex:
            self._mutex.wait_for(lambda: not self._preparing)
            path, self._prepared = self._prepared, None
            return path

    def _allocate(self, size: int) -> str:
        path = self._path(f"{_PREPARED}{uuid.uuid4().hex}.tmp")
        is_bulk = 0 < self._appends * _BULK_BYTES <= self._end
        self._fs.allocate(path, size, reserve_only=self._reserve_only or is_bulk)
        return path

    def _discard(self, path: str) -> None:
        with contextlib.suppress(PenstockError):
            self._fs.unlink(path)

    def _retire(self, number: int, end: int) -> None:
        with contextlib.suppress(PenstockError):
            self._layout.retire(self._fs, self._directory, number, end)

    def _remove(self, number: int) -> None:
        path = self._path(self._layout.name(number))
        kept = self._layout.evidence(number) if self._is_damaged(number) else None
        with contextlib.suppress(NotFound):
            if kept is not None:
                self._fs.rename(path, self._path(kept))
            else:
                self._fs.unlink(path)
        # Sync each removal separately: a power failure must not leave an older file before a gap.
        self._fs.sync_dir(self._directory)

    def _is_damaged(self, number: int) -> bool:
        view = self._views.get(number)
        return number in self._keep or (isinstance(view, FileView) and bool(view.bad))

    def _clear_strays(self) -> None:
        """Remove files that were started but not used, or are no longer needed. Retry failures with the next
        file.
        """
        with contextlib.suppress(PenstockError):
            while self._strays:
                self._remove(self._strays[0])
                del self._strays[0]

    def _clear_leftovers(self) -> None:
        for name, _ in self._fs.list_files(self._directory):
            unfinished = name.startswith(_PREPARED) or self._layout.is_leftover(name)
            if unfinished and "/" not in name:
                self._fs.unlink(self._path(name))

    def _active(self) -> LogFile:
        if self._file is None:
            raise Conflict(f"the log in {self._directory} is not open")
        return self._file

    def _path(self, name: str) -> str:
        return os.path.join(self._directory, name)
