"""`penstock demo` as a process: what it shows, what it refuses, and what it leaves behind."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.process.cli_runner import command, environment, penstock


def running() -> list[str]:
    """The command line of every process on this machine."""
    lines: list[str] = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            lines.append(path.read_text(encoding="utf-8", errors="replace"))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return lines


@pytest.mark.long
@pytest.mark.timeout(400)
def test_the_demo_balances_after_its_kills(tmp_path: Path) -> None:
    folder, store = tmp_path / "d", tmp_path / "s"
    size = ("--records", "4000", "--producers", "2", "--seconds", "6")
    done = subprocess.run(
        command("demo", *size, "--json", "--data", folder, "--store", store),
        capture_output=True,
        check=False,
        env=environment(),
    )
    assert done.returncode == 0, done.stderr.decode()
    result = json.loads(done.stdout)
    assert result["balanced"] is result["audit"]["balanced"] is result["audit"]["deep"] is True
    assert result["acknowledged"] == result["stored"]
    assert result["clicks"] == result["rows"] > 0
    assert result["letters"] > 0
    assert (result["duplicates"], result["foreign"], result["misplaced"]) == (0, 0, 0)
    assert (result["producer_kills"], result["driver_kills"]) == (1, 1)
    told = done.stderr.decode()
    for part in ("killed producer 0", "killed the Spark driver", "everything is delivered"):
        assert part in told
    assert not folder.exists()
    assert list(store.glob("*")) == []
    assert [line for line in running() if str(folder) in line] == []


def test_the_demo_refuses_a_directory_in_use(tmp_path: Path) -> None:
    (tmp_path / "something").touch()
    assert b"empty or does not exist" in penstock("demo", "--data", tmp_path, code=2).stderr
    assert b"several" in penstock("demo", "--data", tmp_path / "d", "--store", "memory://x", code=2).stderr


def test_without_pyspark_the_demo_says_what_to_install() -> None:
    program = "import sys\nsys.modules['pyspark'] = None\nfrom penstock.cli.main import main\nmain(['demo'])"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, check=False, text=True, env=environment()
    )
    assert done.returncode != 0
    assert "pip install 'penstock[spark]'" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)], ids=["term", "int"]
)
def test_the_demos_processes_end_with_it(tmp_path: Path, number: signal.Signals, code: int) -> None:
    folder = tmp_path / "d"
    demo = subprocess.Popen(
        command("demo", "--seconds", "60", "--data", folder),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=environment(),
    )
    while not list(folder.glob("*.journal")):
        assert demo.poll() is None
        time.sleep(0.05)
    demo.send_signal(number)
    demo.send_signal(number)  # the impatient must not leave anything behind either
    assert demo.wait(30) == code
    assert not folder.exists()
    assert [line for line in running() if str(folder) in line] == []
