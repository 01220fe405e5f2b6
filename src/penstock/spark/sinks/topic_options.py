"""The options of writing to `penstock-topic`, read and checked once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from penstock.buffer import Transaction
from penstock.errors import ConfigError
from penstock.spark.sinks.options import parse_transaction
from penstock.spark.sources.options import named_options
from penstock.spark.sources.topic_options import TOPIC_FORMAT, TopicAddress
from penstock.topics import Durability, TopicConfig, check_topic_name
from penstock.units import parse_duration

_NAMES: Final = (
    "apiKey",
    "create",
    "durability",
    "idempotencyWindow",
    "path",
    "topic",
    "txnAppId",
    "txnVersion",
    "url",
)
_SPARKS: Final = frozenset({"checkpointlocation"})
"""What Spark keeps for itself and shows to the sink all the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicSinkOptions:
    """What `.option(...)` said. Spark ignores the case of names; `_` in them is optional."""

    address: TopicAddress
    topic: str
    """`topic`, or the path of `save` and `start`."""
    create: bool = False
    """Whether a topic that is not there is made; the key needs the scope admin then."""
    config: TopicConfig | None = None
    """`durability` and `idempotencyWindow`: of a topic that is made here, and of no other."""
    transaction: Transaction | None = None
    """`txnAppId` and `txnVersion`: for batch writes. A stream has its own, from its checkpoint."""

    @classmethod
    def parse(cls, given: Mapping[str, str]) -> TopicSinkOptions:
        """Raises `ConfigError` naming the option, and the nearest one if it is unknown."""
        own = {key: value for key, value in given.items() if key.lower() not in _SPARKS}
        plain = named_options(own, _NAMES, TOPIC_FORMAT)
        if ("topic" in plain) == ("path" in plain):
            raise ConfigError(f"{TOPIC_FORMAT}: give the topic once, as option 'topic' or as the path")
        create = _create(plain)
        return cls(
            address=TopicAddress.of(plain),
            topic=check_topic_name((plain.get("topic") or plain.get("path") or "").strip()),
            create=create,
            config=_config(plain) if create else None,
            transaction=parse_transaction(plain.get("txnAppId"), plain.get("txnVersion")),
        )


def _create(plain: Mapping[str, str]) -> bool:
    text = plain.get("create", "false").strip().lower()
    if text not in ("true", "false"):
        raise ConfigError(f"create: expected true or false, found {plain['create']!r}")
    for name in ("durability", "idempotencyWindow"):
        if text == "false" and name in plain:
            raise ConfigError(
                f"{name}: this is for a topic that is made here; set create=true, or leave it out"
            )
    return text == "true"


def _config(plain: Mapping[str, str]) -> TopicConfig:
    try:
        durability = Durability(plain.get("durability", "fsync").strip().lower())
    except ValueError:
        choices = ", ".join(kind.value for kind in Durability)
        raise ConfigError(f"durability: expected {choices}, found {plain['durability']!r}") from None
    window_s = parse_duration(plain.get("idempotencyWindow", "1h"))
    return TopicConfig(durability=durability, idempotency_window_ms=int(window_s * 1000))
