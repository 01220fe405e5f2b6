"""Settings of a vector server, including when it acknowledges a write."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from penstock.coordinator import Durability
from penstock.errors import ConfigError
from penstock.servers.settings import DatabaseSettings
from penstock.units import SizeLike


@dataclass(frozen=True, slots=True, kw_only=True)
class VectorSettings(DatabaseSettings):
    """Settings of a vector server. A decoded number takes 32 bytes, even if it is a few characters long."""

    KEYS_VARIABLE: ClassVar = "VECTOR_API_KEYS"

    port: int = 8080
    max_body_bytes: SizeLike = "64MiB"
    max_decoded_bytes: SizeLike = "512MiB"
    acknowledge: str = "durable"
    """The state of a write when its client receives the response: applied, flushed (visible) or durable."""

    def __post_init__(self) -> None:
        DatabaseSettings.__post_init__(self)
        _ = self.level

    @property
    def level(self) -> Durability:
        try:
            return Durability[self.acknowledge.upper()]
        except KeyError:
            raise ConfigError(
                f"acknowledge is one of 'applied', 'flushed', 'durable', not {self.acknowledge!r}"
            ) from None
