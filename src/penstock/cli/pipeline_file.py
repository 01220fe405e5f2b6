"""The pipeline that a command is about: its file, and what the command line changes in it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import click

from penstock.config import Setting, load_mapping, merge
from penstock.errors import ConfigError

if TYPE_CHECKING:
    from penstock.spark import PipelineSpec

__all__ = ["overrides", "pipeline_argument", "read_pipeline", "session_options", "settings"]

F = TypeVar("F", bound=Callable[..., object])


def pipeline_argument(command: F) -> F:
    """What every verb about a pipeline takes."""
    for decorate in (
        click.option(
            "--set",
            "changes",
            multiple=True,
            metavar="KEY.PATH=VALUE",
            help="Set a key of the file, such as trigger.interval=10s; may be repeated.",
        ),
        click.argument("file", metavar="PIPELINE.yaml", type=click.Path(dir_okay=False, path_type=Path)),
    ):
        command = decorate(command)
    return command


def session_options(command: F) -> F:
    """Which Spark a verb runs on."""
    for decorate in (
        click.option(
            "--conf",
            "conf",
            multiple=True,
            metavar="KEY=VALUE",
            help="A setting of Spark, over `spark` in the file; may be repeated.",
        ),
        click.option("--remote", metavar="sc://HOST", help="A Spark Connect server."),
        click.option("--master", metavar="MASTER", help="A Spark master [default: local[*]]."),
    ):
        command = decorate(command)
    return command


def read_pipeline(file: Path, changes: Iterable[str] = ()) -> PipelineSpec:
    """The pipeline in a file, with changes; relative paths are relative to the file. Raises `ConfigError`."""
    from penstock.spark import read_spec

    mapping = merge(load_mapping(file), overrides(changes))
    return read_spec(mapping, where=str(file), base=file.absolute().parent)


def overrides(changes: Iterable[str]) -> dict[str, Setting]:
    """`trigger.interval=10s` as a layer over the file. Values are YAML. Raises `ConfigError`."""
    import yaml

    layer: dict[str, Setting] = {}
    for change in changes:
        path, separator, text = change.partition("=")
        keys = path.split(".")
        if not separator or not all(keys):
            # Not the text itself: it may be a secret whose name was forgotten.
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
    """`KEY=VALUE` options as a mapping. Raises `ConfigError` without repeating the value."""
    pairs: dict[str, str] = {}
    for option in options:
        key, separator, value = option.partition("=")
        if not separator or not key:
            raise ConfigError(f"{name}: expected KEY=VALUE, such as spark.driver.memory=2g")
        pairs[key] = value
    return pairs
