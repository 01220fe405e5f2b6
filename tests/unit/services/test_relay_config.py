from __future__ import annotations

import pytest

from penstock.buffer import ProducerConfig
from penstock.errors import PenstockError
from penstock.services import RelayConfig

QUEUE = ProducerConfig(store="memory://")


def test_a_relay_is_named_after_its_topic() -> None:
    assert RelayConfig(topic="clicks", queue=QUEUE).name == "relay:clicks"
    assert RelayConfig(topic="clicks", queue=QUEUE, app="eu").name == "eu"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"topic": "no spaces"}, "no spaces"),
        ({"on_gap": "ignore"}, "on_gap: expected fail, skip, record"),
        ({"value": "all"}, "value: expected record or data"),
        ({"start": -1}, "start: expected earliest, latest or a sequence"),
        ({"start": True}, "start: expected"),
        ({"start": "first"}, "start: expected"),
        ({"retry_for": "soon"}, "soon"),
        ({"topic": "t" * 255}, "app: .* 1 to 200 bytes"),
    ],
)
def test_invalid_settings_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(PenstockError, match=message):
        RelayConfig(**({"topic": "t", "queue": QUEUE} | settings))  # type: ignore[arg-type]
