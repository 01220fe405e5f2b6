"""Settings of a time-series server, including when it acknowledges a write."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import ClassVar

from penstock.coordinator import Durability
from penstock.servers.settings import DatabaseSettings
from penstock.timeseries import BODY_BYTES_MAX
from penstock.units import SizeLike


class Acknowledge(enum.StrEnum):
    """The state of a write when its client receives the response."""

    DURABLE = "durable"
    APPLIED = "applied"
    """In memory only: a crash loses writes that were not flushed."""

    @property
    def level(self) -> Durability:
        return Durability.DURABLE if self is Acknowledge.DURABLE else Durability.APPLIED


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeSeriesSettings(DatabaseSettings):
    """Settings of a time-series server.

    Decoding a write takes several times its size in memory, and up to 40 times if each point belongs to a
    different series.
    """

    KEYS_VARIABLE: ClassVar = "TIMESERIES_API_KEYS"

    port: int = 9090
    max_body_bytes: SizeLike = BODY_BYTES_MAX
    max_decoded_bytes: SizeLike = "128MiB"
    acknowledge: Acknowledge = Acknowledge.DURABLE
