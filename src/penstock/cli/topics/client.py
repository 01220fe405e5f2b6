"""Which server a command talks to, and how its errors are reported."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeVar

import click

from penstock import errors
from penstock.cli.failure import ExitCode, exit_code
from penstock.cli.options import injected, json_option
from penstock.topics import RouterCycle, RouterNotFound

try:
    from penstock.topics import DEFAULT_URL, Client
except ModuleNotFoundError as missing:
    raise errors.Unsupported(
        f"this command needs the package {missing.name}: pip install 'penstock[topics]'"
    ) from missing


T = TypeVar("T")

_HINTS: tuple[tuple[type[errors.PenstockError], str], ...] = (
    (errors.PermissionDenied, "give the key with --key or TOPICS_API_KEY; the server decides what it may do"),
    (RouterNotFound, "`penstock topics router ls` lists what is there"),
    (RouterCycle, "--allow-cycle if that is meant: records then go round 8 times at most"),
    (errors.NotFound, "`penstock topics ls` lists what is there"),
    (errors.Unavailable, "is the server running at this --url? `penstock topics stat` asks it"),
    (errors.OutcomeUnknown, "look with `penstock topics diff` before repeating it"),
    (errors.Corrupt, "keep the bytes; `penstock topics verify DATA_DIR` lists what is damaged"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """Where the server is. The key stays out of `repr`."""

    url: str
    key: str | None = field(repr=False)
    timeout: str
    retry_for: str

    def client(self) -> Client:
        """A client of it. Raises `ConfigError` for an address or a key that cannot be one."""
        return Client(self.url, key=self.key, timeout=self.timeout, retry_deadline=self.retry_for)

    def run(self, work: Callable[[Client], Awaitable[T]]) -> T:
        """Open a client, do `work` with it on an event loop of its own, and close it.

        What a server refuses is reported with a hint, and ends the command with the exit code for it.
        """

        async def with_client() -> T:
            async with self.client() as client:
                return await work(client)

        try:
            return asyncio.run(with_client())
        except errors.PenstockError as error:
            raise click.exceptions.Exit(report_error(error)) from error


ADDRESS_OPTIONS = (
    click.option(
        "--url",
        envvar="TOPICS_URL",
        default=DEFAULT_URL,
        show_default=True,
        metavar="URL",
        help="Where the server is; TOPICS_URL unless given.",
    ),
    click.option(
        "--key",
        envvar="TOPICS_API_KEY",
        metavar="KEY",
        help="The API key; TOPICS_API_KEY keeps it out of sight.",
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
        help="How long to go on trying while the server is away or busy.",
    ),
)

address_options = injected("server", Server, *ADDRESS_OPTIONS)
"""Hands a command its `server`, for one that has its `--json` from elsewhere."""

server_options = injected("server", Server, *ADDRESS_OPTIONS, json_option)
"""Hands a command about a running server its `server`, and `as_json`."""


def report_error(error: errors.PenstockError) -> int:
    """Report an error of a server on standard error, with what to do; return the exit code for it.

    A conflict is about what the topic is, not about who came first: the same request fails again.
    """
    click.echo(f"error: {error}", err=True)
    if advice := next((text for kind, text in _HINTS if isinstance(error, kind)), ""):
        click.echo(f"hint: {advice}", err=True)
    return ExitCode.REJECTED if isinstance(error, errors.Conflict) else exit_code(error)
