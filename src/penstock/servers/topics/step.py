"""One read of a topic, and what was made of it for those who follow."""

from __future__ import annotations

import msgspec

from penstock.topics import Page, Tombstone

__all__ = ["Step", "quoted"]

_ENCODE = msgspec.json.Encoder().encode


def quoted(name: str) -> bytes:
    """A name as JSON."""
    return _ENCODE(name)


class Step:
    """From one place in a topic to the next: perhaps a gap, perhaps records, perhaps neither.

    `from_seq` is where the records start, behind the gap if there is one. Frames are made once for all
    followers that take the same step; `frames` keeps them.
    """

    __slots__ = ("_fragments", "_records", "_topic", "frames", "from_seq", "head_seq", "to_seq", "tombstone")

    def __init__(self, page: Page, from_seq: int) -> None:
        self._topic = page.topic
        self._fragments = page.fragments
        self._records = b""
        self.tombstone = page.tombstone
        self.from_seq = from_seq if page.tombstone is None else _behind(page.tombstone)
        self.to_seq = page.next_from_seq
        self.head_seq = page.head_seq
        self.frames: dict[object, bytes] = {}

    @property
    def size(self) -> int:
        """Bytes of the records."""
        return sum(map(len, self._fragments))

    @property
    def has_records(self) -> bool:
        return bool(self._fragments)

    @property
    def is_silent(self) -> bool:
        """Nothing to tell: whatever there was is not for this follower."""
        return not self._fragments and self.tombstone is None

    @property
    def records(self) -> bytes:
        """The members of a `record` message, up to and with its closing brace."""
        if not self._records:
            self._records = b'"topic":%b,"from_seq":%d,"to_seq":%d,"head_seq":%d,"records":[%b]}' % (
                quoted(self._topic),
                self.from_seq,
                self.to_seq,
                self.head_seq,
                b",".join(self._fragments),
            )
        return self._records


def _behind(gap: Tombstone) -> int:
    """Where reading goes on behind a gap.

    A topic that was recreated is read from its beginning: its `gap_to` is the head, and whoever resumed there
    would miss everything in it.
    """
    return gap.earliest_seq - 1 if gap.reason == "recreated" else gap.gap_to
