"""The file of `penstock up`: found, layered with the environment and flags, and checked as a whole."""

from __future__ import annotations

import os
import secrets
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from penstock.cli.pipeline_file import overrides
from penstock.cli.starting_file import default_mapping
from penstock.cli.up_extras import missing_extra
from penstock.cli.up_map import (
    collector_faults,
    database_faults,
    pipeline_faults,
    queue_faults,
    with_places,
)
from penstock.config import Secret, Setting, from_env, load_mapping, merge
from penstock.errors import ConfigError
from penstock.servers import check_reach
from penstock.up import PartKind, PartPlan, Plan, UpSettings, faults_of, plan_of, port_faults, read_settings

__all__ = ["Prepared", "UpFile", "find_file", "prepare"]

FILE_NAME: Final = "penstock.yaml"
ENVIRONMENT: Final = "PENSTOCK_UP__"
_KEYS: Final = {
    "topics": "TOPICS_API_KEYS",
    "timeseries": "TIMESERIES_API_KEYS",
    "vector": "VECTOR_API_KEYS",
    "console": "PENSTOCK_CONSOLE_KEYS",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class UpFile:
    """What is to run, before it is checked. `path` is None when there is no file."""

    path: Path | None
    base: Path
    mapping: dict[str, Setting] = field(repr=False)

    @property
    def where(self) -> str:
        return str(self.path) if self.path is not None else "the defaults"


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """What runs: the plan, and why some of its parts do not."""

    file: UpFile
    plan: Plan
    disabled: Mapping[str, str]
    faults: Mapping[str, str]
    """What is wrong with the files of parts, which then fail by themselves."""

    @property
    def running(self) -> Sequence[PartPlan]:
        return [part for part in self.plan.parts if part.name not in self.disabled]


def find_file(
    path: Path | None,
    changes: Iterable[str],
    data_dir: str | None,
    environ: Mapping[str, str],
    directory: Path | None = None,
) -> UpFile:
    """The file that was named, else penstock.yaml here, else everything with its defaults.

    Later layers win: the file, `PENSTOCK_UP__*` of the environment, flags. Raises `ConfigError`.
    """
    here = (directory or Path()).absolute()
    if path is None and (here / FILE_NAME).exists():
        path = Path(FILE_NAME)
    flags = {} if data_dir is None else {"data_dir": str(here / data_dir)}
    over = merge(from_env(ENVIRONMENT, environ), overrides(changes), flags)
    layers: list[Mapping[str, Setting]] = [
        default_mapping(str(over.get("data_dir", "penstock-data")))
        if path is None
        else load_mapping(here / path),
        over,
    ]
    base = here if path is None else (here / path).parent
    return UpFile(path=path, base=base, mapping=_with_keys(merge(*_nothing_is_empty(layers)), environ))


def _nothing_is_empty(layers: Sequence[Mapping[str, Setting]]) -> list[Mapping[str, Setting]]:
    """`topics:` with nothing behind it is the part as it comes, also under a layer that sets a key of it."""
    return [
        {key: {} if value is None and key in _PARTS else value for key, value in layer.items()}
        for layer in layers
    ]


_PARTS: Final = ("collector", "topics", "timeseries", "vector", "console")


def _with_keys(mapping: dict[str, Setting], environ: Mapping[str, str]) -> dict[str, Setting]:
    """With the keys that servers would find in the environment: their callers need to know of them, too."""
    for part, variable in _KEYS.items():
        own = mapping.get(part, {} if part == "console" else None)
        if environ.get(variable, "").strip() and isinstance(own, Mapping) and own.get("keys") is None:
            mapping[part] = {**own, "keys": environ[variable]}
    return mapping


def prepare(
    file: UpFile, *, only: Sequence[str] = (), without: Sequence[str] = ()
) -> tuple[Prepared | None, list[str]]:
    """What runs, and every fault of the file. With faults there may be nothing that runs."""
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
    """Every part that runs and that other machines could reach without a key."""
    found = []
    for name in ("topics", "timeseries", "vector", "collector", "console"):
        part = getattr(settings, name)
        if part is None or not part.enabled or name in disabled:
            continue
        keys = "tokens" if name == "collector" else "keys"
        if name == "collector" and not part.is_default:
            continue  # its own file says where it listens
        try:
            check_reach(
                part.host or settings.host,
                has_keys=bool(getattr(part, keys)),
                allowed=settings.allow_no_keys and name != "console",
                way_out=f"set {name}.{keys}, or {name}.host to 127.0.0.1",
            )
        except ConfigError as error:
            found.append(f"{name}: {error}")
    return found


def _bad_keys(settings: UpSettings, disabled: Container[str]) -> list[str]:
    """Keys that no server would take."""
    if missing_extra(PartKind.CONSOLE):
        return []  # no server runs
    from penstock.servers import Keyring

    found = []
    for name in _KEYS:
        part = getattr(settings, name)
        if part is None or not part.enabled or not part.keys or name in disabled:
            continue
        try:
            keyring = Keyring.parse(part.keys.reveal(), f"{name}.keys")
            if name == "console" and keyring.has_prefixes:
                raise ConfigError("console.keys: they take no prefixes, because it shows the whole machine")
        except ConfigError as error:
            found.append(str(error))
    return found


def _disabled(plan: Plan, only: Sequence[str], without: Sequence[str]) -> dict[str, str]:
    """Parts that are not run, and why. Raises `ConfigError` for a name that is no part."""
    names = [part.name for part in plan.parts]
    kinds = [part.kind.value for part in plan.parts]
    if "console" in only:
        raise ConfigError("--only console: it runs anyway, beside the parts that are named by --only")
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
            disabled[part.name] = f"needs {off[0].name}, which is not run"
    return disabled


def data_directory(file: UpFile) -> str:
    """Where the data of a file is, also of one that cannot run."""
    return os.path.normpath(file.base / str(file.mapping.get("data_dir", "penstock-data")))
