"""The reference names every key of a collector's file, every metric and every option; its files can run."""

from __future__ import annotations

import dataclasses
import re
import typing

import pytest
import yaml
from click.testing import CliRunner
from tests.unit.docs.test_docs_reference import TEXTS, section, words

from penstock.cli.main import cli
from penstock.collector import settings
from penstock.collector.config import TelemetrySettings, parse_plan
from penstock.collector.consumers import DirectConsumer
from penstock.collector.export_worker import ExportCounts
from penstock.collector.exporters import NoopExporter
from penstock.collector.limiter import ReceiverLimiter
from penstock.metrics import Registry
from penstock.quiver.config import QuiverConfig

REFERENCE = TEXTS["docs/reference/collector.md"]
SECTIONS = {
    "Receiver `otlp`": settings.OtlpReceiverSettings,
    "Receiver `otap`": settings.OtapReceiverSettings,
    "Processor `persistence`": QuiverConfig,
    "Exporter `otlp`": settings.OtlpExporterSettings,
    "Exporter `otap`": settings.OtapExporterSettings,
    "Exporter `buffer`": settings.BufferSettings,
    "Exporters `file` and `parquet`": settings.FileSettings,
    "Exporters for trials": settings.FlakySettings,
}
ONE_SIDED = {"tls.ca_file", "tls.cert_file", "tls.key_file"}
"""Of the receiver or of the exporter, not of both."""


def keys(cls: type) -> set[str]:
    """Every key of a dataclass, nested ones with dots."""
    found: set[str] = set()
    for field in dataclasses.fields(cls):
        hint = typing.get_type_hints(cls)[field.name]
        inner = next(
            (part for part in (hint, *typing.get_args(hint)) if dataclasses.is_dataclass(part)), None
        )
        if inner is None:
            found.add(field.name)
        else:
            assert isinstance(inner, type)
            found |= {f"{field.name}.{key}" for key in keys(inner)}
    return found


@pytest.mark.parametrize("name", SECTIONS)
def test_every_key_of_a_node_is_documented(name: str) -> None:
    told = words(section(REFERENCE, name))
    assert keys(SECTIONS[name]) - ONE_SIDED <= told


def test_the_keys_of_the_file_are_documented() -> None:
    told = words(section(REFERENCE, "The file"))
    assert {"nodes", "dead_letters", "drain_timeout", "cores"} <= told
    assert {f"telemetry.{field.name}" for field in dataclasses.fields(TelemetrySettings)} <= told


def test_metrics_reference_names_every_metric_of_the_collector_and_no_other() -> None:
    registry = Registry()
    ExportCounts(registry, "out")
    ReceiverLimiter("in", DirectConsumer(NoopExporter()), registry=registry)
    told = words(section(TEXTS["docs/reference/metrics.md"], "Collector"))
    assert {word for word in told if word.startswith("collector.")} == set(registry.snapshot())


@pytest.mark.parametrize("verb", ["run", "dead-letters"])
def test_cli_reference_names_every_option(verb: str) -> None:
    shown = CliRunner().invoke(cli, ["collector", verb, "--help"])
    assert shown.exit_code == 0, shown.output
    told = set(
        re.findall(r"--[a-z-]+", section(TEXTS["docs/reference/cli.md"], f"`penstock collector {verb}`"))
    )
    usage = shown.output.split("Options:", 1)[1]
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", usage)) - {"--help"} <= told


def test_the_file_of_the_how_to_can_run() -> None:
    text = TEXTS["docs/how-to/collect-telemetry.md"]
    [whole] = [
        block for block in re.findall(r"```yaml\n(.*?)```", text, re.DOTALL) if block.startswith("nodes:")
    ]
    plan = parse_plan(yaml.safe_load(whole), {"backend_hostname": "b", "TOKEN": "t"}, where="how-to")
    assert plan.warnings() == []
