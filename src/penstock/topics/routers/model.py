"""Configuration and state of a router.

A router copies records appended to one topic into another. Its cursor is the last record of the source that
it has processed. It starts at the head of the source, so older records are not copied.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

import msgspec

from penstock.storage import Buffer
from penstock.topics.log.control import BodyReader, encode_match, read_match, with_length
from penstock.topics.model import Predicate

Guarantee: TypeAlias = Literal["at_least_once", "exactly_once"]

PRESERVE_NODE: Final = 1
PRESERVE_TAG: Final = 2
CREATE_DEST: Final = 4
ALLOW_CYCLE: Final = 8
EXACTLY_ONCE: Final = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """The source and destination of a router, its filter, and what its copies keep."""

    source: str
    dest: str
    preserve_node: bool = True
    preserve_tag: bool = True
    create_dest: bool = True
    filter: Predicate | None = None
    """The tag filter. A record without a tag never matches."""
    allow_cycle: bool = False
    guarantee: Guarantee = "at_least_once"

    @property
    def bits(self) -> int:
        """Return the flags as they are stored."""
        flags = (
            (self.preserve_node, PRESERVE_NODE),
            (self.preserve_tag, PRESERVE_TAG),
            (self.create_dest, CREATE_DEST),
            (self.allow_cycle, ALLOW_CYCLE),
            (self.guarantee == "exactly_once", EXACTLY_ONCE),
        )
        return sum(bit for is_set, bit in flags if is_set)


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterState:
    """The current state of a router. `forwarded_total` counts copies, and records lost before their copy."""

    router: str
    config: RouterConfig
    forwarded_total: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterPut:
    """The result of creating or changing a router."""

    router: str
    created: bool
    config: RouterConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterRemoved:
    """The result of deleting a router."""

    router: str
    deleted: bool


class RouterEntry(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """A router in a snapshot. `id` is never reused, not even for a router of the same name."""

    id: int
    name: str
    source: str
    source_id: int
    dest: str
    dest_id: int
    bits: int
    match: tuple[str, bool] | None
    """The filter: a tag, and whether it is only a prefix."""
    cursor: int
    forwarded_total: int
    dest_base: int
    """The head of the destination when the router was created."""

    @property
    def config(self) -> RouterConfig:
        match, bits = self.match, self.bits
        return RouterConfig(
            source=self.source,
            dest=self.dest,
            preserve_node=bool(bits & PRESERVE_NODE),
            preserve_tag=bool(bits & PRESERVE_TAG),
            create_dest=bool(bits & CREATE_DEST),
            filter=None if match is None else Predicate(value=match[0], is_prefix=match[1]),
            allow_cycle=bool(bits & ALLOW_CYCLE),
            guarantee="exactly_once" if bits & EXACTLY_ONCE else "at_least_once",
        )


def encode_created(entry: RouterEntry) -> bytes:
    """Encode the body of the frame for a created or changed router. Its id is in the frame's head."""
    names = (entry.name, entry.source, entry.dest)
    numbers = (entry.cursor, entry.dest_base, entry.source_id, entry.dest_id, entry.forwarded_total)
    return b"".join(
        (
            *(with_length(name.encode()) for name in names),
            bytes([entry.bits]),
            encode_match(entry.config.filter),
            *(number.to_bytes(8, "little") for number in numbers),
        )
    )


def decode_created(router_id: int, body: Buffer) -> RouterEntry:
    """Decode the router in a frame. Raise `Corrupt` if it is damaged."""
    reader = BodyReader(body, "router")
    name, source, dest, bits = reader.text(), reader.text(), reader.text(), reader.u8()
    match = reader.opt(lambda: read_match(reader))
    cursor, dest_base, source_id, dest_id, total = (reader.u64() for _ in range(5))
    reader.end()
    return RouterEntry(
        id=router_id,
        name=name,
        source=source,
        source_id=source_id,
        dest=dest,
        dest_id=dest_id,
        bits=bits,
        match=None if match is None else (match.value, match.is_prefix),
        cursor=cursor,
        forwarded_total=total,
        dest_base=dest_base,
    )
