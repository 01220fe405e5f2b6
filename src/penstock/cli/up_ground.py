"""What a fleet needs before its first part starts: its directory for itself, its files, and free ports."""

from __future__ import annotations

import errno
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

from penstock.cli.starting_file import DEFAULT_PIPELINE, pipeline_text
from penstock.cli.up_file import Prepared, UpFile, data_directory
from penstock.errors import ConfigError, Unavailable
from penstock.storage import DirectoryLock, OsFileSystem, data_modes
from penstock.up import Plan, wanted_ports

__all__ = [
    "check_ports",
    "hold",
    "scratch_of_spark",
    "taken_ports",
    "write_collector_file",
    "write_default_pipeline",
]

LOCK_NAME: Final = "up.lock"
LEAVING_S: Final = 5.0
"""How long the parts of a fleet that was killed may take to notice, and to leave their ports."""
_LOOK_S: Final = 0.1


@contextmanager
def hold(plan: Plan) -> Iterator[None]:
    """The data directory, for this fleet alone. Raises `LockHeld`, which names the process that has it."""
    with ExitStack() as stack:
        stack.enter_context(DirectoryLock(OsFileSystem(), plan.layout.data_dir, name=LOCK_NAME))
        OsFileSystem().make_dirs(plan.layout.inner("run"))
        yield


def scratch_of_spark(plan: Plan) -> str:
    """Where Spark puts what it needs for a moment; what a Spark that was killed has left there is removed."""
    path = plan.layout.run_file("spark")
    shutil.rmtree(path, ignore_errors=True)
    return path


def write_default_pipeline(file: UpFile) -> None:
    """The pipeline that runs without a file, unless it is there: it may have been changed."""
    if file.path is not None:
        return
    path = Path(data_directory(file)) / DEFAULT_PIPELINE
    if not path.exists():
        _write(path, pipeline_text(".."), mode=data_modes().file)


def write_collector_file(plan: Plan) -> None:
    """The collector's file, if it has none of its own. Only this user may read it: it may hold tokens."""
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
    """Raises `Unavailable`, which names every port that is taken and the key that sets it."""
    deadline = time.monotonic() + LEAVING_S
    wanted = wanted_ports(prepared.plan.settings, prepared.running)
    while taken := taken_ports({key: place for key, place in wanted.items() if place[1]}):
        if time.monotonic() >= deadline:
            raise Unavailable(_taken_text(taken, prepared.file))
        sleep(_LOOK_S)


def taken_ports(wanted: Mapping[str, tuple[str, int]]) -> dict[str, tuple[str, int]]:
    """Those that somebody listens on. What else is wrong with an address its part will say."""
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
    said = [f"port {port} of {host} is taken ({key})" for key, (host, port) in taken.items()]
    key, (_, port) = next(iter(taken.items()))
    change = f"change {key} in {file.path}" if file.path is not None else f"use --set {key}={port + 1}"
    return f"{'; '.join(said)}. Stop what listens there, or {change}"
