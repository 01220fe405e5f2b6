"""One cap for several cores: each says what it uses, and the one with the oldest data gives way.

`budget.shm` has one slot of 64 bytes per core. A core writes its own slot and reads the others, so there is
nothing to wait for. A core may use more than its share as long as all together leave room for one segment per
core, as many can be under way concurrently, and every other core can still use half of its share. When the
cap is reached, the core that holds the oldest unprocessed data drops some of it; no core ever touches
the files of another.

    u64 used | u64 reclaimable | i64 oldest ns | i64 heartbeat ns | u64 process | u64 turn | u64 wanted
             | u64 xxh3

A core that says nothing new for ten seconds is counted with what it last said, and its turn is skipped. The
reader measures these seconds with its monotonic clock.
"""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from xxhash import xxh3_64_intdigest

from penstock.clock import SYSTEM_CLOCK, Clock
from penstock.errors import Conflict, InvalidInput
from penstock.quiver.quota import min_core_quota
from penstock.storage import FileSystem, FileView, LockHeld

NOTHING_OLD: Final = (1 << 63) - 1
"""In the place of the oldest data: there is none."""

_SLOT: Final = struct.Struct("<QQqqQQQ")
_SLOT_BYTES: Final = 64
_CHECKSUM: Final = struct.Struct("<Q")
_STALE_S: Final = 10.0
_READS_MAX: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreSlot:
    """The figures that one core publishes."""

    used: int = 0
    reclaimable: int = 0
    """Of that, bytes that every subscriber has processed: they are deleted first, and without a turn."""
    oldest_ns: int = NOTHING_OLD
    """When its oldest segment came in that it could drop."""
    heartbeat_ns: int = 0
    process: int = 0
    turn: int = 0
    wanted: int = 0
    """Bytes that it needs beyond those in use: the core with the oldest data frees them too."""


def encode_slot(slot: CoreSlot) -> bytes:
    body = _SLOT.pack(
        slot.used,
        slot.reclaimable,
        slot.oldest_ns,
        slot.heartbeat_ns,
        slot.process,
        slot.turn,
        slot.wanted,
    )
    return body + _CHECKSUM.pack(xxh3_64_intdigest(body))


def decode_slot(data: bytes) -> CoreSlot | None:
    """Decode the slot in 64 bytes; None when it was never written, or is being written."""
    body = data[: _SLOT.size]
    if len(data) < _SLOT_BYTES or _CHECKSUM.unpack_from(data, _SLOT.size)[0] != xxh3_64_intdigest(body):
        return None
    used, reclaimable, oldest_ns, heartbeat_ns, process, turn, wanted = _SLOT.unpack(body)
    return CoreSlot(
        used=used,
        reclaimable=reclaimable,
        oldest_ns=oldest_ns,
        heartbeat_ns=heartbeat_ns,
        process=process,
        turn=turn,
        wanted=wanted,
    )


class SharedQuota:
    """One core's view of the quota of all cores. For one thread at a time."""

    def __init__(
        self,
        fs: FileSystem,
        root: str,
        *,
        core_id: int,
        cores: int,
        cap_bytes: int,
        target_bytes: int,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        if not 0 <= core_id < cores:
            raise InvalidInput(f"core {core_id} is none of {cores}")
        self._fs = fs
        self._core_id = core_id
        self._cores = cores
        self._cap_bytes = cap_bytes
        self._target_bytes = target_bytes
        self._clock = clock
        path = os.path.join(root, "budget.shm")
        self._lock_path = os.path.join(root, "budget.lock")
        with contextlib.suppress(Conflict):
            fs.allocate(path, _SLOT_BYTES * cores)
        if fs.stat(path).size < _SLOT_BYTES * cores:
            raise InvalidInput(f"{path} is for fewer than {cores} cores; remove it while nothing runs")
        self._file = fs.open_log(path)
        self._view: FileView | bytes = fs.open_view(path)
        self._last: dict[int, CoreSlot] = {}
        self._heard_s: dict[int, float] = {}
        """When another core was last seen to say something new, by the monotonic clock."""
        self._turn = 0

    def publish(self, *, used: int, reclaimable: int, oldest_ns: int | None, wanted: int = 0) -> None:
        """Publish what this core uses. Raises what the disk raises."""
        self._turn += 1
        slot = CoreSlot(
            used=used,
            reclaimable=reclaimable,
            oldest_ns=NOTHING_OLD if oldest_ns is None else oldest_ns,
            heartbeat_ns=self._now_ns(),
            process=os.getpid(),
            turn=self._turn,
            wanted=wanted,
        )
        self._file.write_at(self._core_id * _SLOT_BYTES, [encode_slot(slot)])

    def slots(self) -> list[CoreSlot]:
        """Return what every core published last.

        A slot that is being written is read again, then taken as before.
        """
        return [self._read(core) for core in range(self._cores)]

    def _read(self, core: int) -> CoreSlot:
        start = core * _SLOT_BYTES
        for _ in range(_READS_MAX):
            slot = decode_slot(bytes(self._view[start : start + _SLOT_BYTES]))
            if slot is not None:
                self._hear(core, slot)
                break
        return self._last.get(core, CoreSlot())

    def _hear(self, core: int, slot: CoreSlot) -> None:
        known = self._last.get(core)
        if known is None:
            # Only for what was said before this process looked, wall time has to do.
            age_ns = abs(self._now_ns() - slot.heartbeat_ns)
            self._heard_s[core] = self._clock.monotonic() - age_ns / 1e9
        elif known != slot:
            self._heard_s[core] = self._clock.monotonic()
        self._last[core] = slot

    def limit(self) -> int:
        """Return how much this core may use: what the others leave, at least half a share."""
        least = min_core_quota(self._cap_bytes, self._cores)
        slots = [slot for core, slot in enumerate(self.slots()) if core != self._core_id]
        others = sum(max(slot.used, least) for slot in slots)
        return max(least, self._cap_bytes - self._target_bytes * self._cores - others)

    def excess(self) -> int:
        """Return by how much all cores together are over the cap; 0 when they are not."""
        used = sum(slot.used + slot.wanted for slot in self.slots())
        return max(0, used + self._target_bytes * self._cores - self._cap_bytes)

    def is_our_turn(self) -> bool:
        """Whether this core has the oldest data of all live cores; the lower number breaks a tie."""
        slots, alive_s = self.slots(), self._clock.monotonic() - _STALE_S
        candidates = [
            (slot.oldest_ns, core)
            for core, slot in enumerate(slots)
            if slot.oldest_ns != NOTHING_OLD
            and (core == self._core_id or self._heard_s.get(core, alive_s) >= alive_s)
        ]
        return bool(candidates) and min(candidates)[1] == self._core_id

    @contextlib.contextmanager
    def turn(self) -> Iterator[bool]:
        """Take the turn to drop something, while the block lasts; yield False when it is not ours.

        The lock keeps two cores that both believe to have the oldest data from dropping for one excess.
        """
        try:
            with self._fs.lock(self._lock_path, wait=False):
                yield self.excess() > 0 and self.is_our_turn()
        except LockHeld:
            yield False

    def _now_ns(self) -> int:
        return self._clock.now_ms() * 1_000_000

    def close(self) -> None:
        """Close the file; what was published last stays. Slots of others are not updated any more."""
        self._view = bytes(self._view[:])
        self._file.close()
