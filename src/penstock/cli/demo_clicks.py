"""The demo's click stream: every event follows from its number, and its bytes from a table's row."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

__all__ = ["BAD_AT", "BAD_EVERY", "COLUMNS", "DAYS", "event", "is_bad", "rebuild"]

BAD_EVERY: Final = 1000
BAD_AT: Final = 500
"""Of every `BAD_EVERY` events, the one with this remainder does not decode."""
DAYS: Final = 3
COLUMNS: Final = ("producer", "number", "user", "url", "at")

_PAGES: Final = (
    b"/", b"/search", b"/cart", b"/login", b"/help", b"/product/1", b"/product/2", b"/product/3",
    b"/product/4", b"/product/5", b"/product/6", b"/product/7",
)  # fmt: skip
_USERS: Final = 5000
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_DAY_MS: Final = 86_400_000


def is_bad(number: int) -> bool:
    """Whether the event of this number is one that does not decode."""
    return number % BAD_EVERY == BAD_AT


def event(producer: int, number: int, end: int, since_ms: int) -> bytes:
    """Event `number` of the `end` that a producer has; they are spread over `DAYS` days from `since_ms`."""
    draw = (number * 2_654_435_761 + producer * 40_503) & 0xFFFF_FFFF
    # The smaller of two draws: some pages are far more popular than others.
    page = _PAGES[min((draw >> 8) % len(_PAGES), (draw >> 16) % len(_PAGES))]
    at = _EPOCH + timedelta(milliseconds=since_ms + DAYS * _DAY_MS * number // end)
    moment = at.isoformat(timespec="milliseconds").removesuffix("+00:00").encode()
    if is_bad(number):
        return _bad_event(producer, number, draw % _USERS, page, moment)
    return b'{"producer":%d,"number":%d,"user":"user-%04d","url":"%b","at":"%bZ"}' % (
        producer, number, draw % _USERS, page, moment,
    )  # fmt: skip


def _bad_event(producer: int, number: int, user: int, page: bytes, moment: bytes) -> bytes:
    """Cut short, of a wrong type, or without a field. Who made it can be told from each of them."""
    head = b'{"producer":%d,"number":%d,' % (producer, number)
    kind = number // BAD_EVERY % 3
    if kind == 0:
        return head + b'"user":"user-%04d","ur' % user
    if kind == 1:
        return head + b'"user":"user-%04d","url":"%b","at":"half past nine"}' % (user, page)
    return head + b'"url":"%b","at":"%bZ"}' % (page, moment)


def rebuild(rows: pa.Table) -> pa.ChunkedArray:
    """The bytes of every event, from the columns `COLUMNS` of a table."""
    moment = rows.column("at").cast(pa.timestamp("ms", "UTC"))
    return pc.binary_join_element_wise(
        '{"producer":',
        rows.column("producer").cast(pa.string()),
        ',"number":',
        rows.column("number").cast(pa.string()),
        ',"user":"',
        rows.column("user").cast(pa.string()),
        '","url":"',
        rows.column("url").cast(pa.string()),
        '","at":"',
        pc.strftime(moment, format="%Y-%m-%dT%H:%M:%S"),
        'Z"}',
        "",
        null_handling="emit_null",
    ).cast(pa.binary())
