"""The pipeline of a command: its file, and changes from the command line."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import click

from penstock.cli.base import injected
from penstock.config import Setting, load_mapping, merge
from penstock.errors import ConfigError

if TYPE_CHECKING:
    from penstock.spark import PipelineSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineFile:
    """A pipeline's file, and changes from the command line."""

    file: Path
    changes: tuple[str, ...]

    def read(self) -> PipelineSpec:
        """Read the pipeline. Raise `ConfigError` if it is invalid."""
        return read_pipeline(self.file, self.changes)


@dataclass(frozen=True, slots=True, kw_only=True)
class SparkOptions:
    """The Spark used by a command. Its settings stay out of `repr`."""

    master: str | None
    remote: str | None
    conf: tuple[str, ...] = field(repr=False)

    def check(self) -> None:
        """Raise `ConfigError` for options that exclude each other."""
        if self.master is not None and self.remote is not None:
            raise ConfigError("give --master or --remote, not both")

    def settings_over(self, spec: PipelineSpec) -> dict[str, str]:
        """Return Spark's settings from the file, overridden by those from the command line."""
        return {**spec.spark, **settings(self.conf, "--conf")}


pipeline_argument = injected(
    "pipeline",
    PipelineFile,
    click.argument("file", metavar="PIPELINE.yaml", type=click.Path(dir_okay=False, path_type=Path)),
    click.option(
        "--set",
        "changes",
        multiple=True,
        metavar="KEY.PATH=VALUE",
        help="Set a key of the file, such as trigger.interval=10s; may be repeated.",
    ),
)

session_options = injected(
    "spark",
    SparkOptions,
    click.option("--master", metavar="MASTER", help="A Spark master [default: local[*]]."),
    click.option("--remote", metavar="sc://HOST", help="A Spark Connect server."),
    click.option(
        "--conf",
        "conf",
        multiple=True,
        metavar="KEY=VALUE",
        help="A setting of Spark, which overrides the file; may be repeated.",
    ),
)


def read_pipeline(file: Path, changes: Iterable[str] = ()) -> PipelineSpec:
    """Read a pipeline file, with changes. Paths are relative to the file. Raise `ConfigError` if invalid."""
    from penstock.spark import read_spec

    mapping = merge(load_mapping(file), overrides(changes))
    return read_spec(mapping, where=str(file), base=file.absolute().parent)


def overrides(changes: Iterable[str]) -> dict[str, Setting]:
    """Parse changes such as `trigger.interval=10s`. Values are YAML. Raise `ConfigError` if invalid."""
    import yaml

    layer: dict[str, Setting] = {}
    for change in changes:
        path, separator, text = change.partition("=")
        keys = path.split(".")
        if not separator or not all(keys):
            # Do not quote the text: it may be a secret whose name is missing.
            raise ConfigError("--set: expected KEY.PATH=VALUE, such as trigger.interval=10s")
        try:
            value: Setting = yaml.safe_load(text)
        except (yaml.YAMLError, RecursionError, ValueError) as error:
            raise ConfigError(f"--set {path}: the value is not valid YAML; put it in quotes") from error
        for key in reversed(keys):
            value = {key: value}
        assert isinstance(value, dict)
        layer = merge(layer, value)
    return layer


def settings(options: Iterable[str], name: str) -> dict[str, str]:
    """Parse `KEY=VALUE` options. Raise `ConfigError`, which does not quote the value."""
    pairs: dict[str, str] = {}
    for option in options:
        key, separator, value = option.partition("=")
        if not separator or not key:
            raise ConfigError(f"{name}: expected KEY=VALUE, such as spark.driver.memory=2g")
        pairs[key] = value
    return pairs
