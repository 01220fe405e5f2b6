"""Errors as the shell sees them: one line, a hint, and an exit code that says what to do."""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Iterator, Mapping

import click

from penstock import errors


class ExitCode(enum.IntEnum):
    """What `penstock` exits with."""

    OK = 0
    PROBLEM = 1
    REJECTED = 2
    UNAVAILABLE = 3
    FENCED = 4
    CORRUPT = 5
    OUTCOME_UNKNOWN = 6
    INTERRUPTED = 130
    TERMINATED = 143


EXIT_CODES_HELP = """\b
Exit codes:
  0    done, nothing wrong
  1    a problem was found, or not every record is durable
  2    wrong usage, configuration or request: do not repeat it
  3    the store, or another thing that is needed, is unavailable: repeat later
  4    fenced: a newer consumer holds the queue
  5    stored bytes are damaged: keep them
  6    a write may have been applied: verify before repeating
  130  stopped by Ctrl-C    143  stopped by SIGTERM
"""

_BY_KIND: tuple[tuple[type[errors.PenstockError], ExitCode, str], ...] = (
    (errors.PermissionDenied, ExitCode.REJECTED, "check the credentials and what they are allowed to do"),
    (errors.ConfigError, ExitCode.REJECTED, ""),
    (errors.NotFound, ExitCode.REJECTED, "check the address; `penstock doctor STORE` tries it"),
    (errors.LimitExceeded, ExitCode.REJECTED, ""),
    (errors.Rejected, ExitCode.REJECTED, ""),
    (errors.StorageFull, ExitCode.UNAVAILABLE, "make room, then run it again"),
    (errors.Unavailable, ExitCode.UNAVAILABLE, "try again later; `penstock doctor STORE` tells more"),
    (errors.Conflict, ExitCode.UNAVAILABLE, "somebody else wrote first; run it again"),
    (errors.Fenced, ExitCode.FENCED, "a newer consumer took over; stop this one"),
    (errors.Corrupt, ExitCode.CORRUPT, "keep the bytes; `penstock buffer fsck STORE` lists what is damaged"),
    (
        errors.OutcomeUnknown,
        ExitCode.OUTCOME_UNKNOWN,
        "it may have been applied: look with `penstock buffer tail STORE` before repeating it",
    ),
)

_BY_GROUP: Mapping[str, tuple[tuple[type[errors.PenstockError], str], ...]] = {
    "timeseries": (
        (errors.Fenced, "a newer process has taken the database or its queue over; this one has stopped"),
        (errors.Corrupt, "keep the bytes"),
        (errors.OutcomeUnknown, "start it again: it reads what is stored and goes on behind it"),
    ),
    "topics": (
        (errors.PermissionDenied, "check who may read and write there"),
        (errors.StorageFull, "make room, then run it again"),
        (errors.Corrupt, "keep the bytes; `penstock topics verify` lists what is damaged"),
    ),
    "quiver": (
        (errors.PermissionDenied, "check who may read and write there"),
        (errors.StorageFull, "make room, then run it again"),
        (errors.Corrupt, "keep the bytes; `penstock quiver fsck` lists what is damaged"),
    ),
    "up": ((errors.PermissionDenied, "check who may read and write there"),),
    "vector": (
        (errors.PermissionDenied, "check the credentials and what they are allowed to do"),
        (errors.Unavailable, "try again later"),
        (errors.Fenced, "the newer process serves the collection now; there can be one only"),
        (errors.Corrupt, "keep the bytes"),
        (errors.OutcomeUnknown, "start it again: it reads what is stored, and goes on from there"),
    ),
}
"""Hints of groups of commands that do not work on a STORE; where they have none, the message says it all."""


def exit_code(error: errors.PenstockError) -> ExitCode:
    """The code for an error, by what should be done about it."""
    return next((code for kind, code, _ in _BY_KIND if isinstance(error, kind)), ExitCode.PROBLEM)


def hint(error: errors.PenstockError, group: str = "") -> str:
    """What to do next, or nothing when the message itself says it; fits the group of commands, if any."""
    hints = _BY_GROUP.get(group) or [(kind, text) for kind, _, text in _BY_KIND]
    return next((text for kind, text in hints if isinstance(error, kind)), "")


def report(error: errors.PenstockError, group: str = "") -> None:
    """`error: …` on standard error, and below it what to do."""
    click.echo(f"error: {error}", err=True)
    if advice := hint(error, group):
        click.echo(f"hint: {advice}", err=True)


@contextlib.contextmanager
def needs(what: str, *, extras: str) -> Iterator[None]:
    """Import inside: a package that is missing becomes `Unsupported`, which says what to install."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        raise errors.Unsupported(
            f"{what} needs the package {package}: pip install 'penstock[{extras}]'"
        ) from error
