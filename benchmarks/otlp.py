"""OTLP to Arrow and back, compared with parsing the messages."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial

from penstock.otlp import Signal, decode, encode, view
from penstock.otlp.messages import parse
from penstock.testing.otlp_kit import telemetry
from rounds import interleave
from sections import Section, option_parser, run_sections
from table import Row

_ITEMS = 1000
_REPEATS = 3  # per turn, of which the best counts
_ROUNDS = 20
_NOTE = (
    "one request of 1,000 items, 10 resources, 8 attributes each, three in ten spans with an event, metrics "
    "of all five types; single thread; decode includes protobuf's own verdict on the bytes; thousand items/s"
)


def rows_of(signal: Signal) -> list[Row]:
    """Measure both directions of one signal."""
    data = telemetry(signal, items=_ITEMS)
    batch = decode(data, signal).batch
    contenders: dict[str, Callable[[], object]] = {
        "protobuf parses": lambda: parse(data, signal),
        "decode": lambda: decode(data, signal),
        "encode": lambda: encode(batch, signal),
        "view": lambda: view(batch),
    }
    rates = interleave(
        {name: partial(_timed, call) for name, call in contenders.items()}, work=_ITEMS / 1e3, rounds=_ROUNDS
    )
    bars = {"decode": 0.015, "encode": 0.008}
    return [
        Row(
            section=f"otlp {signal}",
            what=name,
            ours=rates.median(name),
            ceiling=rates.median(against),
            ratio=rates.ratio(name, against),
            against=against,
            unit="k items/s",
            bar=bars.get(name),
            note=_NOTE,
        )
        for name, against in {
            "decode": "protobuf parses",
            "encode": "protobuf parses",
            "view": "decode",
        }.items()
    ]


def _timed(call: Callable[[], object]) -> float:
    best = float("inf")
    for _ in range(_REPEATS):
        began = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - began)
    return best


def main() -> int:
    sections: dict[str, Section] = {str(signal): partial(rows_of, signal) for signal in Signal}
    return run_sections(option_parser(__doc__ or "", sections).parse_args(), sections)


if __name__ == "__main__":
    sys.exit(main())
