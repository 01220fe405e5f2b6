"""Segments and offsets for tests of acknowledgements, with a simulated disk and clock."""

from __future__ import annotations

import random
from collections.abc import Iterable

from penstock.metrics import Registry
from penstock.quiver.delivery.leases import Lease
from penstock.quiver.delivery.subscription import Deliveries, DeliverySettings
from penstock.quiver.model import BundleRef, SegmentInfo, Signal
from penstock.quiver.offsets.log import OffsetLogSettings
from penstock.quiver.offsets.records import Outcome
from penstock.quiver.offsets.state import Subscriber
from penstock.quiver.offsets.store import SubscriptionStore
from penstock.testing.clock import ManualClock
from penstock.testing.disk import FakeDisk

CORE = "/data/core_0"
START_NS = 1_700_000_000_000 * 1_000_000


def segment(seq: int, bundles: int = 2, *, size: int = 1000, ingest_ns: int = START_NS) -> SegmentInfo:
    return SegmentInfo(
        seq=seq,
        signal=Signal.LOGS,
        slot=51,
        schema_hash="0" * 64,
        bundle_count=bundles,
        item_count=bundles * 10,
        ingest_ns_min=ingest_ns,
        ingest_ns_max=ingest_ns,
        event_ns_min=None,
        event_ns_max=None,
        wal_start=0,
        wal_end=0,
        wal_seq_min=0,
        wal_seq_max=0,
        core_id=0,
        file_size=size,
        xxh3="0",
        created_by="test",
    )


class Core:
    """Offsets on a simulated disk, and the segments that a store would have."""

    def __init__(
        self,
        disk: FakeDisk | None = None,
        *,
        clock: ManualClock | None = None,
        settings: OffsetLogSettings | None = None,
        delivery: DeliverySettings | None = None,
        infos: Iterable[SegmentInfo] = (),
    ) -> None:
        self.clock = clock if clock is not None else ManualClock()
        self.disk = disk if disk is not None else FakeDisk(clock=self.clock)
        self.settings = settings
        self.delivery_settings = delivery
        self.infos = {info.seq: info for info in infos}
        self.registry = Registry()

    def open(self, *, expired_before_ns: int | None = None) -> Core:
        self.offsets = SubscriptionStore(self.disk, CORE, self.settings, self.clock)
        self.found = self.offsets.reconcile(self.infos.values(), expired_before_ns=expired_before_ns)
        self.deliveries = Deliveries(
            self.offsets,
            self.delivery_settings,
            clock=self.clock,
            rng=random.Random(7),
            registry=self.registry,
        )
        return self

    def add(self, seq: int, bundles: int = 2, *, size: int = 1000, ingest_ns: int = START_NS) -> None:
        info = self.infos[seq] = segment(seq, bundles, size=size, ingest_ns=ingest_ns)
        self.offsets.add_segment(info)

    def subscribe(self, *names: str) -> None:
        for name in names:
            self.offsets.register(name)
            self.offsets.activate(name)

    def remove(self) -> list[int]:
        """Remove unneeded segments as the reaper does."""
        self.offsets.mark_deleted(self.offsets.finished())
        self.offsets.sync()
        gone = self.offsets.removable()
        for seq in gone:
            del self.infos[seq]
            self.offsets.forget_segment(seq)
        return gone

    def unregister(self, name: str) -> Subscriber:
        gone = self.offsets.leave(name)
        self.offsets.confirm_leave(name)
        return gone

    def ack(self, name: str, seq: int, *bundles: int) -> None:
        for bundle in bundles:
            assert self.offsets.resolve(name, BundleRef(seq, bundle), Outcome.ACK)

    def take(self, name: str) -> Lease:
        claim = self.deliveries.next(name)
        assert claim is not None
        return claim

    def refs(self, name: str) -> list[tuple[int, int]]:
        """Return all bundles that can be claimed now, by segment and index."""
        found: list[tuple[int, int]] = []
        while (claim := self.deliveries.next(name)) is not None:
            found.append((claim.ref.segment_seq, claim.ref.bundle))
        return found

    def crashed(self, disk: FakeDisk | None = None) -> Core:
        """Return the core after a power cut, on its own disk or the given one."""
        return Core(
            disk if disk is not None else self.disk.crash(),
            clock=self.clock,
            settings=self.settings,
            delivery=self.delivery_settings,
            infos=self.infos.values(),
        ).open()
