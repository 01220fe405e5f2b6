"""The reference of the up file names every key with its default, every state and every probe."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
import yaml

from penstock.config import Secret
from penstock.up import PartState, PartStatus, plan_of, read_settings, settings
from penstock.up.health import metrics_of
from penstock.up.status import PartKind

ROOT = Path(__file__).parents[3]
TEXT = (ROOT / "docs" / "reference" / "up-file.md").read_text(encoding="utf-8")
SECTIONS = {
    "The whole": settings.UpSettings,
    "Queues": settings.QueueSettings,
    "Collector": settings.CollectorPart,
    "Topics": settings.TopicsPart,
    "Relays": settings.RelayPart,
    "Pipelines": settings.PipelinePart,
    "Timeseries": settings.TimeSeriesPart,
    "Vector": settings.VectorPart,
    "Console": settings.ConsolePart,
}


def section(title: str) -> str:
    return re.split(rf"^## {title}\n", TEXT, maxsplit=1, flags=re.MULTILINE)[1].split("\n## ", 1)[0]


def rows(title: str) -> dict[str, list[str]]:
    cells = [line.strip("| ").split(" | ") for line in section(title).splitlines() if line.startswith("| `")]
    return {row[0].strip("`"): [cell.strip(" |") for cell in row] for row in cells}


@pytest.mark.parametrize(("title", "kind"), SECTIONS.items(), ids=list(SECTIONS))
def test_every_key_has_its_row_and_no_other(title: str, kind: type) -> None:
    assert list(rows(title)) == [field.name for field in dataclasses.fields(kind)]


@pytest.mark.parametrize(("title", "kind"), SECTIONS.items(), ids=list(SECTIONS))
def test_every_plain_default_is_stated(title: str, kind: type) -> None:
    told = rows(title)
    for field in dataclasses.fields(kind):
        if isinstance(field.default, str | int | bool) and field.default != "":
            assert told[field.name][2] == f"`{field.default}`", field.name
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        assert (told[field.name][2] == "required") == required, field.name


def test_every_state_is_explained() -> None:
    assert list(rows("States")) == [state.value for state in PartState]


def test_the_metrics_are_those_that_are_there() -> None:
    status = PartStatus(name="a", kind=PartKind.TOPICS, state=PartState.READY, since_ms=0)
    names = set(re.findall(r"^# TYPE (\w+) ", metrics_of([status]), re.MULTILINE))
    assert names == set(re.findall(r"`(fleet_\w+)", section("Probes")))


def test_the_example_can_run_and_its_parts_have_the_names_that_are_documented() -> None:
    (example,) = re.findall(r"^```yaml\n(.*?)^```$", TEXT, re.DOTALL | re.MULTILINE)
    plan = plan_of(read_settings(yaml.safe_load(example), where="example"), base="/srv", key=Secret("k"))
    names = [part.name for part in plan.parts]
    assert names == ["collector", "topics", "relay-clicks", "pipeline-clicks", "timeseries"]
    for name in names:
        assert f"`{re.sub('-.*', '-NAME', name)}`" in section("Names of parts")
