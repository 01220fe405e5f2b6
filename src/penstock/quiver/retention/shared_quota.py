"""One quota for several cores: each core publishes its usage, and the core with the oldest data frees space.

`budget.shm` has one slot of 64 bytes per core. A core writes its own slot and reads the others, so no core
waits for another. A core may exceed its share if the total leaves room for one segment per core and every
other core can still use half of its share. One segment per core is reserved because each core may be writing
one. When the cap is reached, the core with the oldest unprocessed data drops some of it. No core touches the
files of another core.

    u64 used | u64 reclaimable | i64 oldest ns | i64 heartbeat ns | u64 process | u64 turn | u64 wanted
      | u64 xxh3

If a core publishes no change for ten seconds, its last figures still count but its turn is skipped. The
reader measures these seconds with its own monotonic clock.
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
"""The value of `oldest_ns` for a core that has no data to drop."""

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
    """The part of `used` that every subscriber has processed. It is deleted first, without a turn."""
    oldest_ns: int = NOTHING_OLD
    """When the oldest segment that the core could drop was ingested."""
    heartbeat_ns: int = 0
    process: int = 0
    turn: int = 0
    wanted: int = 0
    """The bytes that the core needs beyond `used`. The core with the oldest data frees them too."""


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
    """Decode a slot of 64 bytes. Return None if it was never written or is being written."""
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
            raise InvalidInput(f"core {core_id} is not between 0 and {cores - 1}")
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
        self._changed_s: dict[int, float] = {}
        """When another core was last seen to publish a change, by the monotonic clock."""
        self._turn = 0

    def publish(self, *, used: int, reclaimable: int, oldest_ns: int | None, wanted: int = 0) -> None:
        """Publish the usage of this core. Raise errors of the disk."""
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
        """Return the last figures that each core published.

        A slot that is being written is read again a few times. After that its previous figures are used.
        """
        return [self._read(core) for core in range(self._cores)]

    def _read(self, core: int) -> CoreSlot:
        start = core * _SLOT_BYTES
        for _ in range(_READS_MAX):
            slot = decode_slot(bytes(self._view[start : start + _SLOT_BYTES]))
            if slot is not None:
                self._observe(core, slot)
                break
        return self._last.get(core, CoreSlot())

    def _observe(self, core: int, slot: CoreSlot) -> None:
        known = self._last.get(core)
        if known is None:
            # Wall time is used only for figures published before this process first read the slot.
            age_ns = abs(self._now_ns() - slot.heartbeat_ns)
            self._changed_s[core] = self._clock.monotonic() - age_ns / 1e9
        elif known != slot:
            self._changed_s[core] = self._clock.monotonic()
        self._last[core] = slot

    def limit(self) -> int:
        """Return the bytes that this core may use: the unused quota of the others, at least half a share."""
        minimum = min_core_quota(self._cap_bytes, self._cores)
        slots = [slot for core, slot in enumerate(self.slots()) if core != self._core_id]
        others = sum(max(slot.used, minimum) for slot in slots)
        return max(minimum, self._cap_bytes - self._target_bytes * self._cores - others)

    def excess(self) -> int:
        """Return by how many bytes all cores together exceed the cap, or 0 if they do not."""
        used = sum(slot.used + slot.wanted for slot in self.slots())
        return max(0, used + self._target_bytes * self._cores - self._cap_bytes)

    def is_our_turn(self) -> bool:
        """Return whether this core has the oldest data of all live cores. The lower number wins a tie."""
        slots, alive_s = self.slots(), self._clock.monotonic() - _STALE_S
        candidates = [
            (slot.oldest_ns, core)
            for core, slot in enumerate(slots)
            if slot.oldest_ns != NOTHING_OLD
            and (core == self._core_id or self._changed_s.get(core, alive_s) >= alive_s)
        ]
        return bool(candidates) and min(candidates)[1] == self._core_id

    @contextlib.contextmanager
    def turn(self) -> Iterator[bool]:
        """Hold the turn to drop data for the duration of the block. Yield False when it is not ours.

        The lock prevents two cores that both see themselves as the oldest from dropping for the same excess.
        """
        try:
            with self._fs.lock(self._lock_path, wait=False):
                yield self.excess() > 0 and self.is_our_turn()
        except LockHeld:
            yield False

    def _now_ns(self) -> int:
        return self._clock.now_ms() * 1_000_000

    def close(self) -> None:
        """Close the file. The last published figures stay. The view of the other slots is frozen."""
        self._view = bytes(self._view[:])
        self._file.close()
