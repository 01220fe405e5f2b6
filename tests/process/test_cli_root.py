"""`penstock` itself and `penstock doctor`, as processes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.process.cli_runner import environment, penstock

from penstock import __version__


def test_the_version_is_the_packages() -> None:
    assert penstock("--version").stdout == f"penstock {__version__}\n".encode()


def test_help_lists_the_commands_and_the_exit_codes() -> None:
    text = penstock("--help").stdout.decode()
    for word in ("demo", "buffer", "doctor", "Exit codes:", "130"):
        assert word in text
    listed = penstock("buffer", "--help").stdout.decode()
    for verb in ("produce", "tail", "stat", "dump", "fsck", "gc"):
        assert f"  {verb}" in listed
        assert b"STORE" in penstock("buffer", verb, "--help").stdout


def test_help_loads_nothing_heavy() -> None:
    program = (
        "import sys\nfrom penstock.cli.main import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit:\n    pass\n"
        "print(*sorted({name.partition('.')[0] for name in sys.modules}), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment()
    )
    loaded = set(done.stderr.split())
    assert "click" in loaded
    assert loaded.isdisjoint({"numpy", "pyarrow", "obstore", "yaml", "rich", "asyncio", "msgspec"})


def test_an_unknown_command_names_the_nearest() -> None:
    assert b"Did you mean 'buffer'?" in penstock("bufer", code=2).stderr
    assert b"Did you mean 'tail'?" in penstock("buffer", "tial", code=2).stderr


def test_doctor_passes_a_good_directory_and_leaves_nothing_in_it(tmp_path: Path) -> None:
    text = penstock("doctor", tmp_path).stdout.decode()
    for name in ("python", "packages", "java", "disk", "fsync", "store", "conditional writes", "clock"):
        assert f"\nok    {name} " in text or f"\nwarn  {name} " in text
    assert not list((tmp_path / "ingest").glob("*"))
    assert json.loads(penstock("doctor", tmp_path, "--json").stdout)["ok"] is True
    assert b"No store was checked" in penstock("doctor").stdout


def test_doctor_fails_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "ingest").mkdir()
    (tmp_path / "ingest" / "manifest").write_bytes(b"damaged, and longer than a footer")
    assert b"fail  manifest" in penstock("doctor", tmp_path, code=1).stdout
    file = tmp_path / "file"
    file.touch()
    told = json.loads(penstock("doctor", file, "--json", code=1).stdout)
    assert [check["advice"] for check in told["checks"] if check["status"] == "fail"] == ["give a directory"]
