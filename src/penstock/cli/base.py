"""Declaration of commands: shared options become objects, coroutines run, results are printed.

    @topics_command()
    @click.argument("queue")
    async def ack(client: Client, out: Output, queue: str) -> int: ...

`command` and the decorators built on it (`topics_command`, `queue_command`) add the options that several
commands share. A command receives one object for each group of options: `out`, and for example `client` or
`target`. A command that is a coroutine function runs on its own event loop.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import inspect
from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Any, Final, Literal, TypeAlias, cast

import click
import msgspec

from penstock.cli.output import print_json
from penstock.errors import ConfigError
from penstock.units import parse_duration, parse_size

Command: TypeAlias = Callable[..., object]
Decorator: TypeAlias = Callable[[Command], Command]

EVENTS_HELP: Final = "Print events as JSON on standard output, one per line."


@dataclasses.dataclass(frozen=True, slots=True)
class Output:
    """Prints the result of a command: as JSON if --json was given, else as text."""

    is_json: bool

    def show(self, document: object, text: str | Callable[[], object]) -> None:
        """Print a result: `document` for programs, `text` (or what it prints) for people."""
        if self.is_json:
            print_json(document)
        elif isinstance(text, str):
            click.echo(text)
        else:
            text()

    def event(self, event: str, **fields: object) -> None:
        """Print an event as one line of JSON; do nothing without --json."""
        if self.is_json:
            print_event(event, **fields)

    def line_form(self, raw: bool) -> Literal["raw", "json", "text"]:
        """Return the output format of records. Raise `click.UsageError` for --raw with --json."""
        if raw and self.is_json:
            raise click.UsageError("Give --raw or --json, not both.")
        return "raw" if raw else "json" if self.is_json else "text"


def print_event(event: str, **fields: object) -> None:
    """Print an event as one line of JSON on standard output."""
    click.echo(msgspec.json.encode({"event": event, **fields}).decode())


def command(
    name: str | None = None, *, json_help: str = "Machine-readable output.", **attributes: Any
) -> Callable[[Command], click.Command]:
    """Turn a function into a command with `--json`, passed to it as `out`. `attributes` are click's."""

    def decorate(function: Command) -> click.Command:
        @functools.wraps(function)
        def with_output(*, as_json: bool, **given: object) -> object:
            result = function(out=Output(as_json), **given)
            return asyncio.run(cast("Coroutine[Any, Any, object]", result)) if is_coroutine else result

        is_coroutine = inspect.iscoroutinefunction(function)
        json_option = click.option("--json", "as_json", is_flag=True, help=json_help)
        with_options = shared_options([json_option])(with_output)
        return click.command(name, cls=click.Command, **attributes)(with_options)

    return decorate


def shared_options(options: Iterable[Decorator]) -> Decorator:
    """Add options to a command. `--help` lists them in this order, after the command's own."""

    def decorate(function: Command) -> Command:
        # click collects parameters in this attribute, the last one first.
        parameters: list[click.Parameter] = function.__dict__.setdefault("__click_params__", [])
        own = parameters.copy()
        parameters.clear()
        for option in reversed(list(options)):
            function = option(function)
        parameters += own
        return function

    return decorate


def injected(name: str, kind: type[Any], *options: Decorator) -> Decorator:
    """Add options to a command; it receives their values as one object in the argument `name`.

    `kind` is a dataclass. Each of its fields has the name of an option. An option without a field is passed
    to the command unchanged.
    """
    fields = [field.name for field in dataclasses.fields(kind)]

    def decorate(function: Command) -> Command:
        @functools.wraps(function)
        def with_object(**given: object) -> object:
            values = {field: given.pop(field) for field in fields}
            return function(**given, **{name: kind(**values)})

        return shared_options(options)(with_object)

    return decorate


def milliseconds(ctx: click.Context, option: click.Parameter, text: str | None) -> int | None:
    """Convert the duration given for an option (a `callback`). Raise `click.BadParameter` if invalid."""
    try:
        return None if text is None else round(parse_duration(text) * 1000)
    except ConfigError as error:
        raise click.BadParameter(str(error)) from error


def size_bytes(ctx: click.Context, option: click.Parameter, text: str | None) -> int | None:
    """Convert the size given for an option (a `callback`). Raise `click.BadParameter` if it is invalid."""
    try:
        return None if text is None else parse_size(text)
    except ConfigError as error:
        raise click.BadParameter(str(error)) from error


def given_values(values: Mapping[str, object]) -> dict[str, object]:
    """Return only the options that have a value."""
    return {name: value for name, value in values.items() if value is not None}
