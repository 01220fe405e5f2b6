"""The cold tier, for the commands that read a data directory themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import click

from penstock.storage import FileSystem
from penstock.topics import SegmentRoot, open_cold_store

__all__ = ["cold_option", "open_cold"]

F = TypeVar("F", bound=Callable[..., object])


def cold_option(command: F) -> F:
    return click.option(
        "--cold",
        envvar="TOPICS_COLD_DIR",
        metavar="PLACE",
        help="Where old segments are: a directory or a store; TOPICS_COLD_DIR unless given.",
    )(command)


@contextmanager
def open_cold(place: str | None, fs: FileSystem) -> Iterator[SegmentRoot | None]:
    """The cold tier, closed again at the end; None without one."""
    if not place:
        yield None
        return
    tier = open_cold_store(place, fs)
    try:
        yield tier
    finally:
        tier.close()
