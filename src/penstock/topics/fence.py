"""How much of a topic is synced, for those who want to be told of nothing that a power cut could take back.

Records of `disk` topics are published when they are written, and synced a moment later. A fence asks for that
sync: it is an empty entry in the log, behind the records, and when it is durable so are they.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from penstock.errors import PenstockError
from penstock.storage import Entry, LogPosition
from penstock.topics.config import Durability
from penstock.topics.errors import ShuttingDown, Throttled
from penstock.topics.log.wal import Shard
from penstock.topics.topic.topic import Topic

__all__ = ["Fence"]


class Fence:
    """One topic's. Ask after every publish: one sync at a time is under way, for all was there before it.

    `tell` is called with True when more is synced than before, and with False when that failed: ask again
    later. It may ask at once.
    """

    __slots__ = (
        "_asked_seq",
        "_failed",
        "_is_closed",
        "_pending",
        "_shards",
        "_synced_seq",
        "_tell",
        "_topic",
    )

    def __init__(self, topic: Topic, shards: Sequence[Shard], tell: Callable[[bool], None]) -> None:
        self._topic = topic
        self._shards = shards
        self._tell = tell
        self._synced_seq = 0
        self._asked_seq = 0
        self._pending = 0
        self._failed = False
        self._is_closed = False

    @property
    def end_seq(self) -> int:
        """Up to here records may be handed out: where there is nothing to wait for, up to the head."""
        topic = self._topic
        return self._synced_seq if topic.config.durability is Durability.DISK else topic.index.head_seq

    def ask(self) -> None:
        """See to it that everything that is published now gets synced."""
        topic = self._topic
        if self._pending or self._is_closed or topic.gone or self.end_seq == topic.index.head_seq:
            return
        # A copy is durable when what it is a copy of is, and that may be in any log.
        shards = self._shards if topic.has_chunks else (topic.shard,)
        try:
            for shard in shards:
                shard.check_room()
        except (Throttled, ShuttingDown):
            self._tell(False)
            return
        self._asked_seq = topic.index.head_seq
        self._pending, self._failed = len(shards), False
        for shard in shards:
            shard.submit([], frames=0, sync=True, waiting=self)

    def close(self) -> None:
        """Nobody is to be told any more."""
        self._is_closed = True

    def committed(self, entry: Entry, position: LogPosition) -> None:
        self._decided()

    def failed(self, error: PenstockError) -> None:
        self._failed = True
        self._decided()

    def _decided(self) -> None:
        self._pending -= 1
        if self._pending or self._is_closed:
            return
        if not self._failed:
            self._synced_seq = self._asked_seq
        self._tell(not self._failed)
