"""Which segments a command is about."""

from __future__ import annotations

import datetime as dt
import os
from collections.abc import Callable
from typing import TypeVar

import click

from penstock.errors import InvalidInput, NotFound
from penstock.quiver import SegmentInfo, SegmentSource, Signal, is_store_url, open_source, select

__all__ = ["choice_options", "choose", "open_place"]

F = TypeVar("F", bound=Callable[..., object])


def choice_options(command: F) -> F:
    """`--signal`, `--core`, `--since`, `--until`."""
    for option in (
        click.option("--until", metavar="TIME", help="Before this moment, as 2026-01-31T12:00:00Z."),
        click.option(
            "--since", metavar="TIME", help="From this moment on, by event time where there is one."
        ),
        click.option("--core", type=int, help="This core alone."),
        click.option(
            "--signal", type=click.Choice([each.value for each in Signal]), help="This signal alone."
        ),
    ):
        command = option(command)
    return command


def open_place(place: str) -> SegmentSource:
    """The segments at PATH. Raises `NotFound` for a directory that is not there."""
    if not is_store_url(place) and not os.path.isdir(place):
        raise NotFound(f"{place} is not a directory; name the data directory, the one with core_0 in it")
    return open_source(place)


def choose(
    infos: list[SegmentInfo], *, signal: str | None, core: int | None, since: str | None, until: str | None
) -> list[SegmentInfo]:
    """The segments that the options ask for. Raises `InvalidInput` for a time that is none."""
    chosen = select(infos, since=_moment(since, "--since"), until=_moment(until, "--until"))
    return [
        info
        for info in chosen
        if (signal is None or info.signal == signal) and (core is None or info.core_id == core)
    ]


def _moment(text: str | None, option: str) -> dt.datetime | None:
    if text is None:
        return None
    try:
        moment = dt.datetime.fromisoformat(text)
    except ValueError as error:
        raise InvalidInput(f"{option}: {text!r} is no moment; write it as 2026-01-31T12:00:00Z") from error
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=dt.UTC)
