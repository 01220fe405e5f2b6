"""Checks and preparations before the first part of a fleet starts.

`prepare` checks the whole file, `hold` locks the data directory, `write_collector_file` writes the
collector's file, and `check_ports` checks that ports are free.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import socket
import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from penstock.config import Secret, Setting, merge
from penstock.errors import ConfigError, Unavailable
from penstock.servers import check_reach
from penstock.storage import DirectoryLock, OsFileSystem, data_modes
from penstock.up.parts import PartPlan, Plan, missing_extra
from penstock.up.plan import plan_of, port_faults, wanted_ports
from penstock.up.settings import UpSettings, faults_of, read_settings
from penstock.up.status import PartKind
from penstock.up.topology import (
    collector_faults,
    database_faults,
    pipeline_faults,
    queue_faults,
    with_places,
)

LOCK_NAME: Final = "up.lock"
LEAVING_S: Final = 5.0
"""How long to wait for the parts of a killed fleet to end and release their ports."""
_LOOK_S: Final = 0.1
_PARTS: Final = ("collector", "topics", "timeseries", "vector", "console")
_KEYS: Final = {
    "topics": "TOPICS_API_KEYS",
    "timeseries": "TIMESERIES_API_KEYS",
    "vector": "VECTOR_API_KEYS",
    "console": "PENSTOCK_CONSOLE_KEYS",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class UpFile:
    """The file of a fleet before validation. `path` is None for the defaults."""

    path: Path | None
    base: Path
    mapping: dict[str, Setting] = field(repr=False)

    @property
    def where(self) -> str:
        return str(self.path) if self.path is not None else "the defaults"


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A checked plan, and why some parts do not run."""

    file: UpFile
    plan: Plan
    disabled: Mapping[str, str]
    faults: Mapping[str, str]
    """Errors in the files of parts; these parts fail when they start."""

    @property
    def running(self) -> Sequence[PartPlan]:
        return [part for part in self.plan.parts if part.name not in self.disabled]


def layered(
    path: Path | None, base: Path, layers: Sequence[Mapping[str, Setting]], environ: Mapping[str, str]
) -> UpFile:
    """Merge the layers of a file, later ones winning, and add the servers' keys from `environ`."""
    return UpFile(path=path, base=base, mapping=_with_keys(merge(*_nothing_is_empty(layers)), environ))


def _nothing_is_empty(layers: Sequence[Mapping[str, Setting]]) -> list[Mapping[str, Setting]]:
    """Replace an empty key such as `topics:` by an empty mapping, whose keys other layers can set."""
    return [
        {key: {} if value is None and key in _PARTS else value for key, value in layer.items()}
        for layer in layers
    ]


def _with_keys(mapping: dict[str, Setting], environ: Mapping[str, str]) -> dict[str, Setting]:
    """Add the servers' keys from the environment, because the parts that call them also need them."""
    for part, variable in _KEYS.items():
        own = mapping.get(part, {} if part == "console" else None)
        if environ.get(variable, "").strip() and isinstance(own, Mapping) and own.get("keys") is None:
            mapping[part] = {**own, "keys": environ[variable]}
    return mapping


def prepare(
    file: UpFile, *, only: Sequence[str] = (), without: Sequence[str] = ()
) -> tuple[Prepared | None, list[str]]:
    """Return the checked plan and all faults of the file. With faults, the plan may be None."""
    found = [str(fault) for fault in faults_of(file.mapping, where=file.where)]
    if found:
        return None, found
    settings = read_settings(file.mapping, where=file.where)
    plan = plan_of(settings, base=str(file.base), key=Secret(secrets.token_urlsafe(32)))
    disabled = _disabled(plan, only, without)
    running = [part for part in plan.parts if part.name not in disabled]
    found += [*_exposed(settings, disabled), *_bad_keys(settings, disabled), *plan.faults]
    found = [f"{file.where}: {fault}" for fault in [*found, *port_faults(settings, running)]]
    if len(disabled) == len(plan.parts):
        why = [f"{part.name}: {disabled[part.name]}" for part in plan.parts]
        found.append(f"{file.where}: no part runs{''.join(f'; {reason}' for reason in why)}")
    faults = {
        **collector_faults(plan, disabled),
        **pipeline_faults(plan, disabled),
        **database_faults(plan, disabled),
    }
    plan = with_places(plan, disabled)
    faults |= queue_faults(plan, disabled)
    return Prepared(file=file, plan=plan, disabled=disabled, faults=faults), found


def _exposed(settings: UpSettings, disabled: Container[str]) -> list[str]:
    """Return an error for each part that other machines could reach without a key."""
    found = []
    for name in ("topics", "timeseries", "vector", "collector", "console"):
        part = getattr(settings, name)
        if part is None or not part.enabled or name in disabled:
            continue
        keys = "tokens" if name == "collector" else "keys"
        if name == "collector" and not part.is_default:
            continue  # its own file sets the addresses
        try:
            check_reach(
                part.host or settings.host,
                has_keys=bool(getattr(part, keys)),
                allowed=settings.allow_no_keys and name != "console",
                remedy=f"set {name}.{keys}, or {name}.host to 127.0.0.1",
            )
        except ConfigError as error:
            found.append(f"{name}: {error}")
    return found


def _bad_keys(settings: UpSettings, disabled: Container[str]) -> list[str]:
    """Return an error for each invalid set of keys."""
    if missing_extra(PartKind.CONSOLE):
        return []  # no server runs
    from penstock.http import Keyring

    found = []
    for name in _KEYS:
        part = getattr(settings, name)
        if part is None or not part.enabled or not part.keys or name in disabled:
            continue
        try:
            keyring = Keyring.parse(part.keys.reveal(), f"{name}.keys")
            if name == "console" and keyring.has_prefixes:
                raise ConfigError(
                    "console.keys: prefixes are not supported, because the console shows the whole machine"
                )
        except ConfigError as error:
            found.append(str(error))
    return found


def _disabled(plan: Plan, only: Sequence[str], without: Sequence[str]) -> dict[str, str]:
    """Return the parts that do not run, with the reasons. Raise `ConfigError` for an unknown name."""
    names = [part.name for part in plan.parts]
    kinds = [part.kind.value for part in plan.parts]
    if "console" in only:
        raise ConfigError("--only console: the console always runs, in addition to the parts named by --only")
    for name in [*only, *without]:
        if name not in names and name not in kinds:
            raise ConfigError(f"{name!r} is not a part: there are {', '.join(names)}")
    disabled: dict[str, str] = {}
    for part in plan.parts:
        if only and part.name not in only and part.kind.value not in only:
            disabled[part.name] = "left out by --only"
        elif part.name in without or part.kind.value in without:
            disabled[part.name] = "left out by --without"
        elif missing := missing_extra(part.kind):
            disabled[part.name] = missing
    off = [part for part in plan.parts if part.kind is PartKind.TOPICS and part.name in disabled]
    for part in plan.parts:
        if off and part.needs_topics and part.name not in disabled:
            disabled[part.name] = f"needs {off[0].name}, which does not run"
    return disabled


def data_directory(file: UpFile) -> str:
    """Return the data directory in a file, even if the file is invalid."""
    return os.path.normpath(file.base / str(file.mapping.get("data_dir", "penstock-data")))


@contextmanager
def hold(plan: Plan) -> Iterator[None]:
    """Lock the data directory for this fleet. Raise `LockHeld`, naming the holder, if it is in use."""
    with ExitStack() as stack:
        stack.enter_context(DirectoryLock(OsFileSystem(), plan.layout.data_dir, name=LOCK_NAME))
        OsFileSystem().make_dirs(plan.layout.inner("run"))
        yield


def scratch_of_spark(plan: Plan) -> str:
    """Return Spark's scratch directory, after removing the files of a killed Spark."""
    path = plan.layout.run_file("spark")
    shutil.rmtree(path, ignore_errors=True)
    return path


def write_if_missing(path: Path, text: str) -> None:
    """Write a file for the user, unless it exists and may have been edited."""
    if not path.exists():
        _write(path, text, mode=data_modes().file)


def write_collector_file(plan: Plan) -> None:
    """Write the collector's file unless it is the user's own. It may hold tokens, so its mode is 0600."""
    import yaml

    if plan.collector_text is None or plan.collector_file is None:
        return
    text = yaml.safe_dump(_plain(plan.collector_text), sort_keys=False)
    _write(Path(plan.collector_file), f"# Written by `penstock up` at every start.\n{text}", mode=0o600)


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def _write(path: Path, text: str, *, mode: int) -> None:
    try:
        OsFileSystem().make_dirs(os.path.abspath(path.parent))
        staged = path.with_name(f"{path.name}.{os.getpid()}.tmp")
        staged.touch(mode=mode)
        staged.write_text(text, encoding="utf-8")
        staged.replace(path)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from error


def check_ports(prepared: Prepared, *, sleep: Callable[[float], None] = time.sleep) -> None:
    """Raise `Unavailable`, naming every port in use and its setting, if a port is not free."""
    deadline = time.monotonic() + LEAVING_S
    wanted = wanted_ports(prepared.plan.settings, prepared.running)
    while taken := taken_ports({key: place for key, place in wanted.items() if place[1]}):
        if time.monotonic() >= deadline:
            raise Unavailable(_taken_text(taken, prepared.file))
        sleep(_LOOK_S)


def taken_ports(wanted: Mapping[str, tuple[str, int]]) -> dict[str, tuple[str, int]]:
    """Return the ports that are in use. Other address errors are reported by the part itself."""
    return {key: place for key, place in wanted.items() if not _is_free(*place)}


def _is_free(host: str, port: int) -> bool:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError:
        return True
    return all(_can_bind(family, address) for family, _, _, _, address in found)


def _can_bind(family: int, address: Sequence[object]) -> bool:
    with socket.socket(family, socket.SOCK_STREAM) as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind(tuple(address))
        except OSError as error:
            return error.errno != errno.EADDRINUSE
    return True


def _taken_text(taken: Mapping[str, tuple[str, int]], file: UpFile) -> str:
    taken_ports = [f"port {port} of {host} is in use ({key})" for key, (host, port) in taken.items()]
    key, (_, port) = next(iter(taken.items()))
    change = f"change {key} in {file.path}" if file.path is not None else f"use --set {key}={port + 1}"
    return f"{'; '.join(taken_ports)}. Stop the process that listens there, or {change}"
