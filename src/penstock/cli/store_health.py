"""Health checks of a store: access, conditional writes, free space and clock."""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
import time
import uuid
from pathlib import Path

from penstock.buffer import ConsumerConfig, ManifestFile
from penstock.cli.output import Check, Status, fail, ok, warn
from penstock.clock import SYSTEM_CLOCK
from penstock.errors import NotFound, PenstockError, PermissionDenied, Unavailable
from penstock.objects import ObjectStore, check_conditional_writes, join_key, open_store
from penstock.storage import DATA_MODE, VOLATILE, data_modes, device_kind
from penstock.units import format_duration, format_size

SKEW_MS_MAX = 60_000
ROOM_FAIL_BYTES = 64 * 1024**2
ROOM_WARN_BYTES = 1024**3
FSYNC_SLOW_S = 0.1
NETWORK = frozenset({"nfs", "nfs4", "cifs", "smb3", "fuse.sshfs", "9p"})


async def check_store(config: ConsumerConfig) -> list[Check]:
    """Check a store. A failure is a line of the report, not an error."""
    store = open_store(config.store)
    try:
        checks: list[Check] = []
        if store.url.startswith("file://"):
            path = store.url.removeprefix("file://")
            checks = check_directory(path)
            if checks[0].name == "directory" and checks[0].status is not Status.OK:
                return checks
        return checks + await _check_calls(store, config)
    finally:
        await store.close()


def check_directory(path: str) -> list[Check]:
    """Check a directory as a store: existence, write access, free space and fsync."""
    if not os.path.isdir(path):
        if os.path.exists(path):
            return [fail("directory", f"{path} is a file", "give a directory")]
        parent = next(str(folder) for folder in Path(path).parents if folder.is_dir())
        if os.access(parent, os.W_OK | os.X_OK):
            return [
                warn("directory", f"{path} does not exist", "the first producer creates it; or mkdir it now")
            ]
        return [
            fail("directory", f"{path} does not exist, and {parent} is not writable", "mkdir it, or use sudo")
        ]
    usage = shutil.disk_usage(path)
    checks = [room_check(usage.free, usage.total), _kind_check(path), _mode_check(path)]
    if not os.access(path, os.W_OK | os.X_OK):
        return [fail("directory", f"{path} is not writable", "run as its owner, or chown it"), *checks]
    return [ok("directory", f"{path} is writable"), *checks, _fsync_check(path)]


def room_check(free: int, total: int) -> Check:
    """Check the free space."""
    text = f"{format_size(free)} free of {format_size(total)}"
    if free < ROOM_FAIL_BYTES:
        return fail("disk", text, "make room: producers will fail")
    if free < ROOM_WARN_BYTES:
        return warn("disk", text, "make room soon")
    return ok("disk", text)


def _mode_check(path: str) -> Check:
    """Check whether other users can access the directory. Do not change its mode."""
    mode = stat.S_IMODE(os.stat(path).st_mode)
    if mode & ~data_modes().directory & 0o077:
        return warn(
            "access",
            f"{path} has mode {mode:04o}: other users can enter it",
            f"chmod {data_modes().directory:04o} {path}, or set {DATA_MODE} to what you want",
        )
    return ok("access", f"mode {mode:04o}")


def _kind_check(path: str) -> Check:
    kind = device_kind(path)
    if kind in VOLATILE:
        return warn("file system", kind, "it is in memory: a restart loses all data; use a disk")
    if kind in NETWORK:
        return warn("file system", kind, "use one machine only, or an object store: locks may not hold here")
    return ok("file system", kind or "unknown")


def _fsync_check(path: str) -> Check:
    started = time.monotonic()
    try:
        with tempfile.TemporaryFile(dir=path) as file:
            file.write(b"penstock")
            file.flush()
            os.fsync(file.fileno())
        folder = os.open(path, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        return fail("fsync", f"failed: {error.strerror}", "check the disk and its mount options")
    took_s = time.monotonic() - started
    if took_s > FSYNC_SLOW_S:
        return warn(
            "fsync", f"works, in {format_duration(took_s)}", "slow: every acknowledgement waits for it"
        )
    return ok("fsync", f"works, in {format_duration(took_s)}")


async def _check_calls(store: ObjectStore, config: ConsumerConfig) -> list[Check]:
    prefix = config.prefix
    key = join_key(prefix, f"probe-{uuid.uuid4().hex}")
    started = time.monotonic()
    doing = "list"
    try:
        await store.list(prefix)
        doing = "put"
        before_ms = SYSTEM_CLOCK.now_ms()
        await store.put(key, b"penstock")
        after_ms = SYSTEM_CLOCK.now_ms()
        doing = "get"
        if bytes((await store.get(key)).data) != b"penstock":
            return [fail("store", f"{store.url} returned other bytes than were put", "do not use this store")]
        modified_ms = (await store.head(key)).modified_ms
        doing = "delete"
        failures = await store.delete_many([key])
        if failures:
            raise failures[key]
    except PenstockError as error:
        return [fail("store", f"{store.url}: {doing} failed: {error}", _advice(error))]
    took = format_duration(time.monotonic() - started)
    return [
        ok("store", f"{store.url}: list, put, get, delete work ({took})"),
        await _conditions_check(store, prefix),
        clock_check(modified_ms, before_ms, after_ms),
        await _manifest_check(store, config),
    ]


def _advice(error: PenstockError) -> str:
    if isinstance(error, PermissionDenied):
        return "check the credentials, and that they may list, read, write and delete"
    if isinstance(error, NotFound):
        return "create it, or correct the address"
    if isinstance(error, Unavailable):
        return "check the address and the network, then try again"
    return "follow the message; nothing can be stored there until this is resolved"


async def _conditions_check(store: ObjectStore, prefix: str) -> Check:
    try:
        await check_conditional_writes(store, prefix)
    except PenstockError as error:
        return fail("conditional writes", str(error), "without them, writers overwrite each other silently")
    return ok("conditional writes", "create-if-absent and replace-if-unchanged hold")


def clock_check(modified_ms: int, before_ms: int, after_ms: int) -> Check:
    """Compare this machine's clock with the time that the store assigns to a new object."""
    # Stores report whole seconds, so a difference below one second is not skew.
    skew_ms = max(0, before_ms - modified_ms - 1000) or min(0, after_ms - modified_ms)
    if abs(skew_ms) > SKEW_MS_MAX:
        direction = "ahead of" if skew_ms > 0 else "behind"
        text = f"{format_duration(abs(skew_ms) / 1000)} {direction} the store's"
        return warn("clock", text, "run NTP: grace periods and lag are measured with it")
    return ok("clock", "agrees with the store's to within a minute")


async def _manifest_check(store: ObjectStore, config: ConsumerConfig) -> Check:
    name = config.manifest_key
    try:
        snapshot = await ManifestFile(store, name).read()
        if snapshot.version is None:
            return ok("manifest", f"{name} does not exist yet: nothing was produced")
        footer = snapshot.footer
    except PenstockError as error:
        return fail("manifest", f"{name}: {error}", "keep the bytes; see `penstock buffer fsck STORE`")
    return ok("manifest", f"{name}: {footer.entry_count:,} entries, next {footer.next_sequence}")
