"""The reference of the topics client and commands names everything there is."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from penstock.cli.main import cli
from penstock.topics import client, errors
from penstock.topics.client import Client

DOCS = Path(__file__).parents[3] / "docs"
CLI = (DOCS / "reference" / "cli.md").read_text(encoding="utf-8")
CLIENT = (DOCS / "reference" / "topics-client.md").read_text(encoding="utf-8")
VERBS = [
    "put",
    "write",
    "diff",
    "watch",
    "delete",
    "claim",
    "ack",
    "nack",
    "extend",
    "work",
    "relay",
    "router",
    "ls",
    "stat",
    "verify",
    "backup",
    "restore",
]


def section(text: str, title: str) -> str:
    return text.split(f"\n## {title}\n", 1)[1].split("\n## ", 1)[0]


@pytest.mark.parametrize("verb", VERBS)
def test_the_reference_names_every_option_of_a_topics_verb(verb: str) -> None:
    shown = CliRunner().invoke(cli, ["topics", verb, "--help"])
    assert shown.exit_code == 0, shown.output
    told = set(re.findall(r"--[a-z-]+", section(CLI, f"`penstock topics {verb}`") + section(CLI, "Topics")))
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", shown.output)) - {"--help"} <= told


def test_the_reference_names_every_call_and_argument_of_the_client() -> None:
    told = set(re.findall(r"\w+", section(CLIENT, "`Client`")))
    calls = {name for name, _ in inspect.getmembers(Client, inspect.isfunction) if name[0] != "_"}
    assert calls | set(inspect.signature(Client).parameters) <= told
    for call in calls - {"follow"}:
        assert set(inspect.signature(getattr(Client, call)).parameters) - {"self"} <= told, call


def test_the_reference_names_every_error_of_the_client() -> None:
    told = set(re.findall(r"`(\w+)`", section(CLIENT, "Errors")))
    public = {name: getattr(client, name) for name in client.__all__}
    raised = {name for name, kind in public.items() if isinstance(kind, type) and issubclass(kind, Exception)}
    assert raised <= told
    assert set(errors.__all__) - {"TopicError"} <= told
