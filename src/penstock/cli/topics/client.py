"""The server used by a command of `penstock topics`, and hints for the errors that it reports."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import click

from penstock import errors
from penstock.cli.base import Command, command, injected
from penstock.cli.failure import ExitCode, exit_code
from penstock.topics import RouterCycle, RouterNotFound

try:
    from penstock.topics import DEFAULT_URL, Client
except ModuleNotFoundError as missing:
    raise errors.Unsupported(
        f"this command needs the package {missing.name}: pip install 'penstock[topics]'"
    ) from missing


T = TypeVar("T")

_HINTS: tuple[tuple[type[errors.PenstockError], str], ...] = (
    (
        errors.PermissionDenied,
        "give a key that permits this with --key or TOPICS_API_KEY",
    ),
    (RouterNotFound, "`penstock topics router ls` lists the routers"),
    (RouterCycle, "use --allow-cycle if this is intended: each record then makes at most 8 hops"),
    (errors.NotFound, "`penstock topics ls` lists the topics"),
    (errors.Unavailable, "check that the server runs at this --url: `penstock topics stat`"),
    (errors.OutcomeUnknown, "check with `penstock topics diff` before you repeat it"),
    (errors.Corrupt, "keep the bytes; `penstock topics verify DATA_DIR` lists what is damaged"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """The address of a server, its key and the timeouts. The key stays out of `repr`."""

    url: str
    key: str | None = field(repr=False)
    timeout: str
    retry_for: str

    def run(self, work: Callable[[Client], Awaitable[T]]) -> T:
        """Open a client, run `work` with it on an event loop, and close it.

        An error of the server is reported with a hint and ends the command with its exit code. Raise
        `ConfigError` for a malformed address or key.
        """

        async def with_client() -> T:
            async with Client(
                self.url, key=self.key, timeout=self.timeout, retry_deadline=self.retry_for
            ) as client:
                return await work(client)

        try:
            return asyncio.run(with_client())
        except errors.PenstockError as error:
            raise click.exceptions.Exit(report_error(error)) from error


server_options = injected(
    "server",
    Server,
    click.option(
        "--url",
        envvar="TOPICS_URL",
        default=DEFAULT_URL,
        show_default=True,
        metavar="URL",
        help="The server's address; by default TOPICS_URL.",
    ),
    click.option(
        "--key",
        envvar="TOPICS_API_KEY",
        metavar="KEY",
        help="The API key; use TOPICS_API_KEY to keep it out of the process list.",
    ),
    click.option(
        "--timeout",
        default="30s",
        show_default=True,
        metavar="DURATION",
        help="How long one attempt may take.",
    ),
    click.option(
        "--retry-for",
        default="10s",
        show_default=True,
        metavar="DURATION",
        help="How long to retry while the server is unavailable or busy.",
    ),
)
"""Passes the `server` to a command."""


def topics_command(name: str | None = None, **attributes: Any) -> Callable[[Command], click.Command]:
    """Turn a coroutine function into a command with an open `client` of the server and its `out`."""

    def decorate(function: Command) -> click.Command:
        @functools.wraps(function)
        def with_client(server: Server, **given: object) -> object:
            return server.run(lambda client: cast("Awaitable[object]", function(client=client, **given)))

        return command(name, **attributes)(server_options(with_client))

    return decorate


def report_error(error: errors.PenstockError) -> int:
    """Print a server's error and a hint on standard error. Return its exit code.

    A conflict means that the topic's state does not allow the request: repeating the request does not help.
    """
    click.echo(f"error: {error}", err=True)
    if advice := next((text for kind, text in _HINTS if isinstance(error, kind)), ""):
        click.echo(f"hint: {advice}", err=True)
    return ExitCode.REJECTED if isinstance(error, errors.Conflict) else exit_code(error)
