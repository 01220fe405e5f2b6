"""What the documents say of segments, of their commands and of their Spark source is what there is."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest
from click.testing import CliRunner
from tests.unit.quiver.bundles import batch, sealed_of

from penstock.cli.main import cli
from penstock.metrics import Registry
from penstock.objects import MemoryStore
from penstock.quiver.model import SLOTS
from penstock.quiver.segments.file import describe
from penstock.quiver.segments.metadata import encode_meta, schema_metadata
from penstock.quiver.segments.store import SegmentStore
from penstock.quiver.segments.upload import Uploader
from penstock.spark.sources.quiver_options import _NAMES, QuiverOptions
from penstock.testing.clock import ManualClock
from penstock.testing.disk import FakeDisk

DOCS = Path(__file__).parents[3] / "docs"
CLI = (DOCS / "reference" / "cli.md").read_text(encoding="utf-8")
SPARK = (DOCS / "reference" / "spark.md").read_text(encoding="utf-8")
METRICS = (DOCS / "reference" / "metrics.md").read_text(encoding="utf-8")
FORMAT = (DOCS / "formats" / "quiver-segment.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("verb", ["inspect", "export"])
def test_the_command_reference_names_every_option(verb: str) -> None:
    shown = CliRunner().invoke(cli, ["quiver", verb, "--help"])
    assert shown.exit_code == 0, shown.output
    told = set(re.findall(r"--[a-z-]+", CLI.split(f"\n## `penstock quiver {verb}`\n")[1].split("\n## ")[0]))
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", shown.output)) - {"--help"} <= told


def test_the_spark_reference_names_every_option_with_its_default() -> None:
    text = SPARK.split("\n## Quiver\n")[1].split("\n## ")[0]
    told = {
        row.split("`")[1]: row.split("|")[2].strip() for row in text.splitlines() if row.startswith("| `")
    }
    assert set(_NAMES) <= set(told)
    assert told["maxSegmentsPerTrigger"] == str(_default().segments_per_trigger)
    assert told["onGap"] == f"`{_default().on_gap}`"


def _default() -> QuiverOptions:
    return QuiverOptions(path="/", store=None, slot=50)


def test_the_metrics_reference_names_every_metric_of_copies_and_no_other() -> None:
    registry = Registry()
    segments = SegmentStore.open(FakeDisk(), "/q/segments", "/q/quarantine")
    Uploader(
        segments,
        MemoryStore(),
        prefix="",
        core_id=0,
        clock=ManualClock(),
        rng=random.Random(1),
        registry=registry,
        on_corrupt=lambda info, error: None,
    )
    text = METRICS.split("\n## Quiver: copies in a store\n")[1].split("\n## ")[0]
    assert set(re.findall(r"`(quiver\.[\w.]+)`", text)) == set(registry.snapshot())


def test_the_format_names_every_fact_of_a_segment() -> None:
    info = describe(sealed_of(batch(1)), 1, core_id=0, created_by="")
    for name in schema_metadata(info):
        assert f"`{name.decode()}`" in FORMAT
    for name in re.findall(rb'"(\w+)":', encode_meta(info)):
        assert f"`{name.decode()}`" in FORMAT or f"`quiver.{name.decode()}`" in FORMAT


def test_the_format_names_every_slot() -> None:
    text = FORMAT.split("\n## Slots\n")[1].split("\n## ")[0]
    told: set[int] = set()
    for row in [line.split("|")[1] for line in text.splitlines() if line.startswith("|")]:
        numbers = [int(each) for each in re.findall(r"\d+", row)]
        told.update(range(numbers[0], numbers[-1] + 1) if " to " in row else numbers)
    assert set(SLOTS) <= told
