"""Errors on the command line: one line, a hint, and an exit code that says what to do."""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Iterator, Mapping

import click

from penstock import errors

EXIT_CODES_HELP = """\b
Exit codes:
  0    success
  1    a problem was found, or not every record is durable
  2    wrong usage, configuration or request: do not repeat it
  3    the store or another dependency is unavailable: repeat later
  4    fenced: a newer consumer holds the queue
  5    stored bytes are damaged: keep them
  6    a write may have been applied: verify before repeating
  130  stopped by Ctrl-C    143  stopped by SIGTERM
"""
EXIT_CODES_HINT = "`penstock --help` lists the exit codes."


class ExitCode(enum.IntEnum):
    """The exit codes of `penstock`."""

    OK = 0
    PROBLEM = 1
    REJECTED = 2
    UNAVAILABLE = 3
    FENCED = 4
    CORRUPT = 5
    OUTCOME_UNKNOWN = 6
    INTERRUPTED = 130
    TERMINATED = 143


_BY_KIND: tuple[tuple[type[errors.PenstockError], ExitCode, str], ...] = (
    (errors.PermissionDenied, ExitCode.REJECTED, "check the credentials and their permissions"),
    (errors.ConfigError, ExitCode.REJECTED, ""),
    (errors.NotFound, ExitCode.REJECTED, "check the address with `penstock doctor STORE`"),
    (errors.LimitExceeded, ExitCode.REJECTED, ""),
    (errors.Rejected, ExitCode.REJECTED, ""),
    (errors.StorageFull, ExitCode.UNAVAILABLE, "free some space, then run it again"),
    (errors.Unavailable, ExitCode.UNAVAILABLE, "try again later; `penstock doctor STORE` has details"),
    (errors.Conflict, ExitCode.UNAVAILABLE, "another process wrote first; run it again"),
    (errors.Fenced, ExitCode.FENCED, "a newer consumer took over; stop this one"),
    (errors.Corrupt, ExitCode.CORRUPT, "keep the bytes; `penstock buffer fsck STORE` lists what is damaged"),
    (
        errors.OutcomeUnknown,
        ExitCode.OUTCOME_UNKNOWN,
        "it may have been applied: check with `penstock buffer tail STORE` before repeating it",
    ),
)

_BY_GROUP: Mapping[str, tuple[tuple[type[errors.PenstockError], str], ...]] = {
    "timeseries": (
        (errors.Fenced, "a newer process has taken over the database or its queue; this one has stopped"),
        (errors.Corrupt, "keep the bytes"),
        (errors.OutcomeUnknown, "restart it: it reads what is stored and continues after it"),
    ),
    "topics": (
        (errors.PermissionDenied, "check the permissions of the directory"),
        (errors.StorageFull, "free some space, then run it again"),
        (errors.Corrupt, "keep the bytes; `penstock topics verify` lists what is damaged"),
    ),
    "quiver": (
        (errors.PermissionDenied, "check the permissions of the directory"),
        (errors.StorageFull, "free some space, then run it again"),
        (errors.Corrupt, "keep the bytes; `penstock quiver fsck` lists what is damaged"),
    ),
    "up": ((errors.PermissionDenied, "check the permissions of the directory"),),
    "vector": (
        (errors.PermissionDenied, "check the credentials and their permissions"),
        (errors.Unavailable, "try again later"),
        (errors.Fenced, "the newer process serves the collection now; only one can"),
        (errors.Corrupt, "keep the bytes"),
        (errors.OutcomeUnknown, "restart it: it reads what is stored and continues after it"),
    ),
}
"""Hints of the command groups that do not work on a STORE. Other errors of these groups have no hint."""


def exit_code(error: errors.PenstockError) -> ExitCode:
    """Return the exit code for an error."""
    return next((code for kind, code, _ in _BY_KIND if isinstance(error, kind)), ExitCode.PROBLEM)


def hint(error: errors.PenstockError, group: str = "") -> str:
    """Return the next step after an error in a group of commands; empty if the message states it."""
    hints = _BY_GROUP.get(group) or [(kind, text) for kind, _, text in _BY_KIND]
    return next((text for kind, text in hints if isinstance(error, kind)), "")


def report(error: errors.PenstockError, group: str = "") -> None:
    """Print `error: …` on standard error, followed by a hint."""
    click.echo(f"error: {error}", err=True)
    if advice := hint(error, group):
        click.echo(f"hint: {advice}", err=True)


@contextlib.contextmanager
def needs(what: str, *, extras: str) -> Iterator[None]:
    """Raise `Unsupported`, naming the package to install, if an import in the block fails."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        raise errors.Unsupported(
            f"{what} needs the package {package}: pip install 'penstock[{extras}]'"
        ) from error
