"""The options for reading `penstock-quiver`, parsed and checked once."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from penstock.config import unknown_key
from penstock.errors import ConfigError, InvalidInput
from penstock.objects import StoreConfig, open_store
from penstock.quiver import (
    SLOTS,
    LocalSegments,
    SegmentSource,
    Signal,
    StoredSegments,
    check_name,
    flat_slot,
    is_store_url,
)
from penstock.spark.sources.offsets import Position
from penstock.spark.sources.options import (
    backend_options,
    choice_option,
    cores,
    count_option,
    flag_option,
    named_options,
)
from penstock.spark.sources.quiver_offsets import parse_position

OnSegmentGap = Literal["fail", "skip"]

QUIVER_FORMAT: Final = "penstock-quiver"
SEGMENTS_PER_TRIGGER: Final = 100
"""A bound on the tasks' memory for a micro-batch over a long backlog, and on the cost of a retry."""

_NAMES: Final = (
    "endingOffsets",
    "maxSegmentsPerTrigger",
    "onGap",
    "partitions",
    "path",
    "signal",
    "slot",
    "startingOffsets",
    "subscriber",
    "view",
)
_SLOT_NUMBERS: Final = {name: slot for slot, name in SLOTS.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class QuiverOptions:
    """The values of `.option(...)`. Spark ignores the case of names; `_` in them is optional."""

    path: str
    """`path` (or `load(path)`): the data directory, or the address of a store with uploaded segments."""
    store: StoreConfig | None
    """The store with the backend options `store.*`, or None for a directory."""
    slot: int
    """The table: `signal` selects its wide table, `slot` any table by name or number."""
    starting: Position = "earliest"
    ending: Position = "latest"
    """Batch queries only: the first segment of each core that is not read."""
    segments_per_trigger: int = SEGMENTS_PER_TRIGGER
    on_gap: OnSegmentGap = "fail"
    """The handling of a segment that was removed before it was read: an error, or a warning in the log."""
    partitions: int | None = None
    """The most tasks of a read. None: two per core of the driver."""
    subscriber: str | None = None
    """Streams only: the subscriber under which unread segments are kept and read ones acknowledged."""
    view: bool = False
    """Whether to convert values to readable forms: attributes to text, ids to hexadecimal, and so on."""

    @classmethod
    def parse(cls, given: Mapping[str, str]) -> QuiverOptions:
        """Parse the options.

        Raise a `ConfigError` that names the option, and suggests one if it is unknown.
        """
        backend = backend_options(given)
        plain = named_options(given, _NAMES, QUIVER_FORMAT, with_store=True)
        path, store = _place(plain.get("path", ""), backend)
        options = cls(
            path=path,
            store=store,
            slot=_slot(plain),
            starting=parse_position(plain.get("startingOffsets", "earliest"), "startingOffsets"),
            ending=parse_position(plain.get("endingOffsets", "latest"), "endingOffsets"),
            segments_per_trigger=count_option(plain, "maxSegmentsPerTrigger") or SEGMENTS_PER_TRIGGER,
            on_gap=choice_option(plain, "onGap", ("fail", "skip"), "fail"),
            partitions=count_option(plain, "partitions"),
            subscriber=_subscriber(plain.get("subscriber")),
            view=flag_option(plain, "view") or False,
        )
        if options.subscriber is not None and store is not None:
            raise ConfigError(
                "subscriber: only a directory has subscribers; uploaded segments are kept without one"
            )
        return options

    @property
    def tasks(self) -> int:
        """The most tasks of a read."""
        return self.partitions or 2 * cores()

    def open(self) -> SegmentSource:
        """Open the source of the segments without reading them."""
        return StoredSegments(open_store(self.store)) if self.store is not None else LocalSegments(self.path)


def _place(path: str, backend: Mapping[str, str]) -> tuple[str, StoreConfig | None]:
    if not path:
        raise ConfigError(f"{QUIVER_FORMAT}: give the data directory, as option 'path' or in load()")
    if is_store_url(path) and not path.startswith("file://"):
        if path.startswith("memory://"):
            raise ConfigError("path: memory:// lives in one process and Spark runs in several")
        return path, StoreConfig(url=path, options=dict(backend))
    if backend:
        raise ConfigError("store.*: these options are for a store, but the path is a directory")
    # Executors have other working directories.
    return os.path.abspath(os.path.expanduser(path.removeprefix("file://"))), None


def _slot(plain: Mapping[str, str]) -> int:
    if ("signal" in plain) == ("slot" in plain):
        raise ConfigError(
            f"{QUIVER_FORMAT}: give either option 'signal' (traces, metrics, logs or other), or "
            "'slot' for one kind of table"
        )
    if "signal" in plain:
        try:
            return flat_slot(Signal(plain["signal"].strip().lower()))
        except ValueError as error:
            raise ConfigError(
                f"signal: expected traces, metrics, logs or other, found {plain['signal']!r}"
            ) from error
    text = plain["slot"].strip().lower()
    slot = int(text) if text.isdigit() else _SLOT_NUMBERS.get(text, -1)
    if slot not in SLOTS:
        raise unknown_key(f"slot: {text!r}", text, list(_SLOT_NUMBERS))
    return slot


def _subscriber(name: str | None) -> str | None:
    if name is None:
        return None
    try:
        return check_name(name)
    except InvalidInput as error:
        raise ConfigError(f"subscriber: {error}") from error
