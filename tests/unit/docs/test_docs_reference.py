"""The reference pages name everything there is, and what the documents point to exists."""

from __future__ import annotations

import dataclasses
import re
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner
from tests.unit.compatibility.surface import promised_names

import penstock.buffer
from penstock import errors
from penstock.buffer import ConsumerConfig, GarbageCollectorConfig, ProducerConfig
from penstock.buffer.instruments import Instruments
from penstock.cli.main import cli
from penstock.metrics import Registry
from penstock.objects import StoreConfig

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"
DOCUMENTS = sorted([*ROOT.glob("*.md"), *DOCS.glob("**/*.md")])
TEXTS = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in DOCUMENTS}
VERBS = [
    "demo",
    "doctor",
    *(f"buffer {verb}" for verb in ("produce", "tail", "stat", "dump", "fsck", "gc")),
]


def section(text: str, title: str) -> str:
    return text.split(f"\n## {title}\n", 1)[1].split("\n## ", 1)[0]


def words(text: str) -> set[str]:
    return set(re.findall(r"`([\w.]+)`", text))


@pytest.mark.parametrize("config", [ProducerConfig, ConsumerConfig, GarbageCollectorConfig, StoreConfig])
def test_config_reference_names_every_field(config: type) -> None:
    told = words(section(TEXTS["docs/reference/config.md"], config.__name__))
    assert {field.name for field in dataclasses.fields(config)} <= told


@pytest.mark.parametrize("config", [ProducerConfig, ConsumerConfig])
def test_config_reference_states_every_default(config: type) -> None:
    rows = {
        row.split("|")[1].strip().strip("`"): row.split("|")[2].strip()
        for row in section(TEXTS["docs/reference/config.md"], config.__name__).splitlines()
        if row.startswith("| `")
    }
    special = {"max_batch_bytes": "1 GiB"}
    for field in dataclasses.fields(config):
        if field.name in rows and field.default is not dataclasses.MISSING:
            default = getattr(field.default, "name", field.default)
            shown = special.get(field.name, f"`{default}`")
            assert rows[field.name].lower() == str(shown).lower(), field.name


def test_metrics_reference_names_every_metric_and_no_other() -> None:
    registry = Registry()
    Instruments(registry)
    told = {word for word in words(TEXTS["docs/reference/metrics.md"]) if word.startswith("buffer.")}
    assert told == set(registry.snapshot())


def test_errors_reference_names_every_error() -> None:
    buffer_errors = {
        name
        for name in promised_names("penstock.buffer")
        if isinstance(kind := getattr(penstock.buffer, name), type)
        and issubclass(kind, penstock.buffer.BufferError)
    }
    text = TEXTS["docs/reference/errors.md"]
    kinds = {name for name in errors.__all__ if isinstance(getattr(errors, name), type)}
    assert kinds <= words(section(text, "Kinds (`penstock.errors`)"))
    assert buffer_errors <= words(section(text, "Buffer (`penstock.buffer`)"))


def test_recover_says_what_to_do_about_every_buffer_error() -> None:
    told = words(TEXTS["docs/how-to/recover.md"])
    base = penstock.buffer.BufferError
    kinds = {name: kind for name, kind in vars(penstock.buffer.errors).items() if isinstance(kind, type)}
    assert {name for name, kind in kinds.items() if issubclass(kind, base) and kind is not base} <= told


def test_api_reference_names_every_public_name_of_the_buffer_and_the_stores() -> None:
    text = TEXTS["docs/reference/api.md"]
    public = set(promised_names("penstock.buffer")) | set(promised_names("penstock.objects"))
    assert {name for name in public if not re.search(rf"\b{name}\b", text)} == set()


@pytest.mark.parametrize("verb", VERBS)
def test_cli_reference_names_every_option(verb: str) -> None:
    shown = CliRunner().invoke(cli, [*verb.split(), "--help"])
    assert shown.exit_code == 0, shown.output
    text = TEXTS["docs/reference/cli.md"]
    told = set(
        re.findall(r"--[a-z-]+", section(text, f"`penstock {verb}`") + section(text, "Common options"))
    )
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", shown.output)) - {"--help"} <= told


def commands(text: str) -> list[str]:
    """Every `penstock …` and `make …` line of shell blocks, and those in inline code."""
    found: list[str] = []
    for block in re.findall(r"^```sh\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
        for line in block.splitlines():
            found += [part.strip() for part in re.split(r"#\s|\|(?!\|)|&&", line)]
    found += re.findall(r"`((?:penstock|make) [^`]*)`", text)
    return [line for line in found if re.match(r"(penstock|make)\b", line)]


SHOWN = sorted({(name, line) for name, text in TEXTS.items() for line in commands(text)})


@pytest.mark.parametrize(("name", "line"), [pair for pair in SHOWN if pair[1].startswith("penstock")])
def test_every_penstock_command_shown_parses(name: str, line: str) -> None:
    # `a|b` in prose stands for each of the two; an ellipsis for anything.
    spoken = line.replace("…", "").replace("\\", "")
    for verb in (re.search(r"\S+\|\S+", spoken) or [""])[0].split("|"):
        arguments = shlex.split(re.sub(r"\S+\|\S+", verb, spoken))[1:]
        done = CliRunner().invoke(cli, [*arguments, "--help"])
        assert done.exit_code == 0, f"{name}: {line}\n{done.output}"


@pytest.mark.parametrize(("name", "line"), [pair for pair in SHOWN if pair[1].startswith("make")])
def test_every_make_target_shown_exists(name: str, line: str) -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    wanted = {word for word in line.split()[1:] if "=" not in word}
    assert wanted <= targets, f"{name}: {line}"


@pytest.mark.parametrize("name", TEXTS)
def test_every_link_between_documents_leads_somewhere(name: str) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", TEXTS[name]):
        if "://" not in target:
            assert ((ROOT / name).parent / target).exists(), target


@pytest.mark.parametrize("name", [name for name in TEXTS if name.startswith("docs/decisions/0")])
def test_every_decision_has_its_parts_and_is_in_the_index(name: str) -> None:
    titles = re.findall(r"^\*\*([^*]+)\.\*\*", TEXTS[name], re.MULTILINE)
    assert titles == ["Context", "Decision", "What it is not", "Cost", "How it is tested"]
    assert Path(name).name in TEXTS["docs/decisions/README.md"]


@pytest.mark.parametrize(
    "name", [name for name in TEXTS if name.startswith("docs/") and name != "docs/README.md"]
)
def test_every_document_is_in_the_index(name: str) -> None:
    index = TEXTS["docs/README.md"] + TEXTS["docs/decisions/README.md"]
    assert name.removeprefix("docs/") in index or Path(name).name in index
