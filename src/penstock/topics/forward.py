"""What the log says of copies: which records of the source became which records of the destination.

    lp router | router_id u64 | source_id u64 | lp source | bits u8 | cursor u64 | forwarded_total u64
    | first_seq u64 | n u32 | n times (source_seq u64, count u64, hops u8)

One frame stands for all copies of a pass, in the log of the destination and at their place in it: what was
written there before got lower sequence numbers, what came later higher ones. A run with `source_seq` 0 is of
records that the source lost before they could be copied. `cursor` and `forwarded_total` are those after the
pass. A frame by value is followed by the copies themselves.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, NamedTuple

from penstock.storage import Buffer
from penstock.topics.control import BodyReader, with_length
from penstock.topics.frame import MORE, FrameType, encode_control

__all__ = ["BY_VALUE", "LOST_SOURCE", "CopyRun", "Forward", "runs_of"]

BY_VALUE: Final = 32
"""The copies follow as frames of their own; else they are made again from the source."""
LOST_SOURCE: Final = 0

_NUMBERS = struct.Struct("<BQQQI")
_RUN = struct.Struct("<QQB")


class CopyRun(NamedTuple):
    """So many records from `source_seq` on, each with a copy, which went through `hops` routers."""

    source_seq: int
    records: int
    hops: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Forward:
    """The copies of one pass of one router."""

    router: str
    router_id: int
    source: str
    source_id: int
    bits: int
    """The router's flags, and `BY_VALUE`."""
    cursor: int
    forwarded_total: int
    first_seq: int
    """Of the first copy, in the destination."""
    runs: tuple[CopyRun, ...]

    @property
    def by_value(self) -> bool:
        return bool(self.bits & BY_VALUE)

    def frame(self, dest_id: int, ts_ms: int) -> bytes:
        """The frame. Without the copies that follow it by value it says nothing, and is cut with them."""
        follows = self.by_value and any(run.source_seq for run in self.runs)
        return encode_control(
            FrameType.ROUTER_CURSOR, dest_id, self.encode(), ts_ms=ts_ms, flags=MORE if follows else 0
        )

    def encode(self) -> bytes:
        return b"".join(
            (
                with_length(self.router.encode()),
                struct.pack("<QQ", self.router_id, self.source_id),
                with_length(self.source.encode()),
                _NUMBERS.pack(self.bits, self.cursor, self.forwarded_total, self.first_seq, len(self.runs)),
                *(_RUN.pack(*run) for run in self.runs),
            )
        )

    @classmethod
    def decode(cls, body: Buffer) -> Forward:
        """Raises `Corrupt`."""
        reader = BodyReader(body, "router cursor")
        router, router_id, source_id, source = reader.text(), reader.u64(), reader.u64(), reader.text()
        bits, cursor, total, first_seq, count = _NUMBERS.unpack(reader.take(_NUMBERS.size))
        runs = tuple(CopyRun(*run) for run in _RUN.iter_unpack(reader.take(count * _RUN.size)))
        reader.end()
        return cls(
            router=router,
            router_id=router_id,
            source=source,
            source_id=source_id,
            bits=bits,
            cursor=cursor,
            forwarded_total=total,
            first_seq=first_seq,
            runs=runs,
        )


def runs_of(seqs: Iterable[int], hops: Iterable[int]) -> tuple[CopyRun, ...]:
    """Ascending sequence numbers and the hops of each, as few runs as possible."""
    runs: list[CopyRun] = []
    for seq, hop in zip(seqs, hops, strict=True):
        if runs and runs[-1].source_seq + runs[-1].records == seq and runs[-1].hops == hop:
            runs[-1] = runs[-1]._replace(records=runs[-1].records + 1)
        else:
            runs.append(CopyRun(seq, 1, hop))
    return tuple(runs)
