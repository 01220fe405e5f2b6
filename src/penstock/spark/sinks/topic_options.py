"""The options for writing to `penstock-topic`, parsed and checked once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from penstock.buffer import Transaction
from penstock.errors import ConfigError
from penstock.spark.sinks.options import parse_transaction
from penstock.spark.sources.options import flag_option, named_options
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


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicSinkOptions:
    """The values of `.option(...)`. Spark ignores the case of names; `_` in them is optional."""

    address: TopicAddress
    topic: str
    """The option `topic`, or the path given to `save` or `start`."""
    create: bool = False
    """Whether to create a missing topic. This requires the scope `admin`."""
    config: TopicConfig | None = None
    """`durability` and `idempotencyWindow` for a topic that the sink creates."""
    transaction: Transaction | None = None
    """`txnAppId` and `txnVersion`, for batch writes. A stream derives them from its checkpoint."""

    @classmethod
    def parse(cls, given: Mapping[str, str]) -> TopicSinkOptions:
        """Parse the options.

        Raise a `ConfigError` that names the option, and suggests one if it is unknown.
        """
        plain = named_options(given, _NAMES, TOPIC_FORMAT)
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
    create = flag_option(plain, "create") or False
    for name in ("durability", "idempotencyWindow"):
        if not create and name in plain:
            raise ConfigError(
                f"{name}: only for a topic that this sink creates; set create=true, or leave it out"
            )
    return create


def _config(plain: Mapping[str, str]) -> TopicConfig:
    try:
        durability = Durability(plain.get("durability", "fsync").strip().lower())
    except ValueError:
        choices = ", ".join(kind.value for kind in Durability)
        raise ConfigError(f"durability: expected {choices}, found {plain['durability']!r}") from None
    window_s = parse_duration(plain.get("idempotencyWindow", "1h"))
    return TopicConfig(durability=durability, idempotency_window_ms=int(window_s * 1000))
