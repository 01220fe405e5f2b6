"""What the documents say of Quiver's log, its names and its metrics is what there is."""

from __future__ import annotations

import re

from tests.unit.compatibility.surface import promised_names
from tests.unit.docs.test_docs_reference import TEXTS, section, words
from tests.unit.quiver.engine_doubles import StepClock, open_quiver

from penstock.metrics import Registry
from penstock.quiver import errors
from penstock.quiver.metrics import DeliveryMetrics, RetentionMetrics
from penstock.quiver.wal.entry import ENTRY_BYTES_MAX, EntryType
from penstock.quiver.wal.layout import HEADER_BYTES
from penstock.testing.disk import FakeDisk

FORMAT = TEXTS["docs/formats/quiver-wal.md"]


def test_metrics_reference_names_every_metric_of_the_engine_and_no_other() -> None:
    registry, delivery = Registry(), Registry()
    open_quiver(FakeDisk(), StepClock(), registry=registry).close()
    DeliveryMetrics(delivery)
    RetentionMetrics(delivery)
    told = words(section(TEXTS["docs/reference/metrics.md"], "Quiver: log, segments and recovery"))
    expected = set(registry.snapshot()) - set(delivery.snapshot())
    assert {word for word in told if word.startswith("quiver.")} == expected


def test_api_reference_names_every_public_name_of_quiver() -> None:
    text = section(TEXTS["docs/reference/api.md"], "`penstock.quiver`")
    assert {
        name for name in promised_names("penstock.quiver") if not re.search(rf"\b{name}\b", text)
    } == set()


def test_errors_reference_names_every_error_of_quiver() -> None:
    named = {
        name for name, value in vars(errors).items() if getattr(value, "__module__", "") == errors.__name__
    }
    assert named
    assert named <= words(section(TEXTS["docs/reference/errors.md"], "Quiver (`penstock.quiver`)"))


def test_the_format_names_every_type_and_size() -> None:
    for kind in EntryType:
        assert re.search(rf"^\| {kind.value} \|", FORMAT, re.MULTILINE), kind
    assert f"## Header, {HEADER_BYTES} bytes" in FORMAT
    assert f"{ENTRY_BYTES_MAX // 1024**2} MiB" in FORMAT
