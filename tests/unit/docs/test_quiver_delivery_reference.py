"""The reference names every metric of delivery and every option of its commands."""

from __future__ import annotations

import re

import pytest
from click.testing import CliRunner
from tests.unit.docs.test_docs_reference import TEXTS, section, words

from penstock.cli.main import cli
from penstock.metrics import Registry
from penstock.quiver.metrics import DeliveryMetrics, RetentionMetrics
from penstock.quiver.offsets.records import Outcome, RecordKind


def test_metrics_reference_names_every_metric_of_delivery_and_no_other() -> None:
    registry = Registry()
    DeliveryMetrics(registry)
    RetentionMetrics(registry)
    told = words(section(TEXTS["docs/reference/metrics.md"], "Quiver: delivery and retention"))
    assert {word for word in told if word.startswith("quiver.") and not word.endswith(".")} == set(
        registry.snapshot()
    )


@pytest.mark.parametrize("verb", ["acks", "subscribers", "fsck"])
def test_cli_reference_names_every_option(verb: str) -> None:
    shown = CliRunner().invoke(cli, ["quiver", verb, "--help"])
    assert shown.exit_code == 0, shown.output
    told = set(re.findall(r"--[a-z-]+", section(TEXTS["docs/reference/cli.md"], f"`penstock quiver {verb}`")))
    usage = shown.output.split("Options:", 1)[1]
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", usage)) - {"--help"} <= told


def test_the_format_names_every_kind_and_outcome() -> None:
    text = TEXTS["docs/formats/quiver-acks.md"]
    for outcome in Outcome:
        assert f"{outcome.value} {outcome.name.lower()}" in text
    for kind in RecordKind:
        assert re.search(rf"^\| {kind.value} ", text, re.MULTILINE), kind
