"""Whether a bundle may come in now: caps are checked before anything is written."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from penstock.errors import LimitExceeded, PenstockError
from penstock.quiver.errors import AtCapacity, Closed
from penstock.quiver.open_segment import Trigger
from penstock.quiver.wal_layout import HEADER_BYTES
from penstock.units import format_size

if TYPE_CHECKING:
    from penstock.quiver.core import Core

__all__ = ["Admission"]

_SEALED_TARGETS_MAX: Final = 4
"""How many times the target size may wait in memory while segments cannot be written."""
_RELIEF_S: Final = 30.0


class Admission:
    """The door of one core. Lets a bundle pass at once as long as every cap has room for it.

    Room that was given is kept until `release`, by when the bundle counts itself: writers that come at the
    same time do not pass on the same room.
    """

    def __init__(self, core: Core, *, cores: int) -> None:
        self._core = core
        config = core.config
        most = config.largest_bundle(cores)
        self._bundle_max = min(most, config.wal_bytes - HEADER_BYTES) if config.has_wal else most
        self._memory_max = _SEALED_TARGETS_MAX * core.config.segment.target_bytes

    def reserve(self, byte_count: int) -> bool:
        """Take the room for a bundle, if there is some, without waiting for anything."""
        return (
            byte_count <= self._bundle_max
            and self._fits(byte_count)
            and self._core.upkeep.reserve(byte_count)
        )

    def release(self, byte_count: int) -> None:
        """Give back what `reserve` or `admit` took."""
        self._core.upkeep.release(byte_count)

    def admit(self, byte_count: int) -> None:
        """Return when the room for a bundle is taken; waits as settings allow. Raises as `make_way`."""
        while not self.reserve(byte_count):
            self.make_way(byte_count, wait_s=self._core.config.ingest.block_s)

    def make_way(self, byte_count: int, *, wait_s: float = 0.0) -> None:
        """Return when there was room for a bundle. May write segments and delete files to make it.

        Raises `AtCapacity` when there is none and none may be made, `LimitExceeded` when there never will be.
        """
        if byte_count > self._bundle_max:
            raise LimitExceeded(
                f"a bundle of {format_size(byte_count)} is larger than the {format_size(self._bundle_max)} "
                "that wal.max_size and retention.size_cap leave room for; split it, or raise them"
            )
        if not self._fits(byte_count):
            if not self._core.upkeep.has_room(byte_count):
                # First of all: on a full disk nothing can be finalized before something goes.
                self._core.upkeep.make_room(byte_count, wait_s)
            self._relieve(byte_count)
        if not self._core.upkeep.has_room(byte_count):
            self._core.upkeep.make_room(byte_count, wait_s)

    def _fits(self, byte_count: int) -> bool:
        return self._core.intake.has_room(byte_count) and self._core.buffer.memory_bytes < self._memory_max

    def _relieve(self, byte_count: int) -> None:
        """Finalize what is open, so that the log can be cut; once."""
        core = self._core
        try:
            with core.upkeep.at_work():
                core.flush(Trigger.WAL_CAP, timeout_s=_RELIEF_S)
                if not core.intake.has_room(byte_count):
                    core.intake.rotate()
                    core.cut()
        except Closed:
            raise
        except PenstockError as error:
            raise self._full(f"segments cannot be written: {error}") from error
        if not core.intake.has_room(byte_count):
            raise self._full("the log is full")

    def _full(self, why: str) -> AtCapacity:
        self._core.deliveries.metrics.throttles.inc()
        cap = format_size(self._core.config.wal.max_bytes)
        return AtCapacity(f"{why}; wal.max_size is {cap}; retry in a moment", retry_after_s=1.0)
