from __future__ import annotations

import json

from click.testing import CliRunner
from tests.unit.buffer.doubles import GOLDEN

from penstock.cli.main import cli


def test_dump_shows_the_transaction_of_the_entries_that_have_one() -> None:
    shown = CliRunner().invoke(cli, ["buffer", "dump", str(GOLDEN / "tagged.manifest")])
    assert shown.exit_code == 0, shown.output
    entries = json.loads(shown.output)["entries"]
    assert [entry.get("transaction") for entry in entries] == [
        {"app": "query", "version": 7},
        None,
        {"app": "zwölf", "version": 2**63 - 1},
    ]
