"""Options that several commands take: declared once, and given to a command as one object."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import click

from penstock.errors import ConfigError
from penstock.units import parse_duration, parse_size

Command: TypeAlias = Callable[..., object]
Decorator: TypeAlias = Callable[[Command], Command]

json_option = click.option("--json", "as_json", is_flag=True, help="Machine-readable output.")


def together(options: Iterable[Decorator]) -> Decorator:
    """Add options to a command, in the order in which `--help` lists them."""

    def decorate(command: Command) -> Command:
        for option in reversed(list(options)):
            command = option(command)
        return command

    return decorate


def injected(name: str, kind: type[Any], *options: Decorator) -> Decorator:
    """Add options to a command, and hand it the values of `kind`'s fields as one argument, `name`.

    `kind` is a dataclass whose fields are called as the options are. Options without such a field reach the
    command by themselves.
    """
    fields = [field.name for field in dataclasses.fields(kind)]

    def decorate(command: Command) -> Command:
        @functools.wraps(command)
        def with_object(**given: object) -> object:
            values = {field: given.pop(field) for field in fields}
            return command(**given, **{name: kind(**values)})

        return together(options)(with_object)

    return decorate


def milliseconds(option: str, text: str) -> int:
    """Read the duration that was given for an option. Raises `click.BadParameter`."""
    try:
        return round(parse_duration(text) * 1000)
    except ConfigError as error:
        raise click.BadParameter(str(error), param_hint=f"'{option}'") from error


def size_bytes(option: str, text: str) -> int:
    """Read the size that was given for an option. Raises `click.BadParameter`."""
    try:
        return parse_size(text)
    except ConfigError as error:
        raise click.BadParameter(str(error), param_hint=f"'{option}'") from error
