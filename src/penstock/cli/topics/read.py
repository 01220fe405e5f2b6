"""`penstock topics diff` and `watch`: print the records of topics, and every gap between them."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Literal

import click
import msgspec

from penstock.cli.base import Decorator, Output, shared_options
from penstock.cli.failure import ExitCode
from penstock.cli.output import time_text
from penstock.cli.topics.client import topics_command
from penstock.topics import (
    DIFF_LIMIT_MAX,
    SEQ_MAX,
    Client,
    Page,
    Predicate,
    Tombstone,
    WatchEvent,
    parse_match,
    unreadable,
)


class _Fields(msgspec.Struct):
    """The printed fields of a record; `data` is printed as it was written."""

    seq: int = msgspec.field(name="$seq")
    ts_ms: int = msgspec.field(name="$ts")
    data: msgspec.Raw
    tag: str = msgspec.field(name="$tag", default="-")
    node: str = msgspec.field(name="$node", default="-")


_FIELDS = msgspec.json.Decoder(_Fields)


def _position(ctx: click.Context, option: click.Parameter, text: str) -> int | str:
    if text == "latest":
        return text
    if text.isascii() and text.isdigit() and int(text) <= SEQ_MAX:
        return int(text)
    raise click.BadParameter(f"{text!r} is neither a sequence nor 'latest'")


def reading_options() -> Decorator:
    """Add the options that `diff` and `watch` share."""
    return shared_options(
        [
            click.option(
                "-n", "--limit", type=click.IntRange(min=1), metavar="N", help="Stop after N records."
            ),
            click.option("--raw", is_flag=True, help="Print only the data of the records, one per line."),
            click.option(
                "--tag", metavar="TAG", help="Only records with this tag; a * at its end matches any suffix."
            ),
            click.option(
                "--node", "nodes", multiple=True, metavar="NAME",
                help="Leave out records written by NAME; may be repeated.",
            ),
            click.option("--fail-on-gap", is_flag=True, help="Stop with exit code 1 at a gap."),
        ]
    )  # fmt: skip


@dataclass(slots=True, kw_only=True)
class _Reading:
    after: int | str
    follow: bool
    left: int | None
    form: str
    nodes: tuple[str, ...]
    match: Predicate | None
    tags: bool
    meta: bool


@topics_command()
@click.argument("topic")
@click.option(
    "--after",
    callback=_position,
    metavar="SEQ|latest",
    default="0",
    show_default=True,
    help="Begin after this sequence; 0 is the beginning, latest the end.",
)
@click.option("-f", "--follow", is_flag=True, help="Wait for more records.")
@click.option("--no-tags", is_flag=True, help="Leave out the tags.")
@click.option("--no-meta", is_flag=True, help="Leave out meta.")
@reading_options()
async def diff(
    client: Client,
    out: Output,
    topic: str,
    after: int | str,
    follow: bool,
    no_tags: bool,
    no_meta: bool,
    limit: int | None,
    raw: bool,
    tag: str | None,
    nodes: tuple[str, ...],
    fail_on_gap: bool,
) -> int:
    """Print the records of TOPIC up to its head: sequence, time, node, tag, data.

    Records that were evicted or have expired are reported on standard error, with --json as an object
    `{"tombstone": …}` among the records. Deleted records leave no gap. A record that decoders may refuse
    is reported by its sequence on standard error and left out; the exit code is then 1.
    """
    job = _Reading(
        after=after,
        follow=follow,
        left=limit,
        form=out.line_form(raw),
        nodes=nodes,
        match=None if tag is None else parse_match(tag),
        tags=not no_tags,
        meta=not no_meta,
    )
    output, code = sys.stdout.buffer, ExitCode.OK
    async for page in _pages(client, topic, job):
        if page.tombstone is not None:
            print_gap(topic, page.tombstone, job.form)
            if fail_on_gap:
                return ExitCode.PROBLEM
        wanted = page.fragments if job.left is None else page.fragments[: job.left]
        readable = readable_of(topic, wanted)
        output.writelines(line_of(fragment, job.form) for fragment in readable)
        output.flush()
        if len(readable) < len(wanted):
            code = ExitCode.PROBLEM
        if job.left is not None:
            job.left -= len(wanted)
            if job.left <= 0:
                break
    return code


async def _pages(client: Client, topic: str, job: _Reading) -> AsyncIterator[Page]:
    from_seq = await _start_seq(client, topic, job.after)
    if job.follow:
        async for page in client.follow(
            topic,
            from_seq,
            limit=_limit(job),
            node=job.nodes,
            include_tags=job.tags,
            include_meta=job.meta,
            match=job.match,
        ):
            yield page
        return
    while True:
        page = await client.diff(
            topic,
            from_seq,
            limit=_limit(job),
            node=job.nodes,
            include_tags=job.tags,
            include_meta=job.meta,
            match=job.match,
        )
        yield page
        if page.caught_up:
            return
        from_seq = page.next_from_seq


async def _start_seq(client: Client, topic: str, after: int | str) -> int:
    return after if isinstance(after, int) else (await client.state(topic, touch=False)).head_seq


def _limit(job: _Reading) -> int:
    return DIFF_LIMIT_MAX if job.left is None else min(job.left, DIFF_LIMIT_MAX)


def readable_of(topic: str, fragments: Sequence[bytes]) -> list[bytes]:
    """Return the records that decode. Report the others by their sequence on standard error."""
    readable: list[bytes] = []
    for fragment in fragments:
        bad = unreadable(fragment)
        if bad is None:
            readable.append(fragment)
        else:
            click.echo(f"unreadable: record {bad.seq} of {topic} {bad.reason}", err=True)
    return readable


def line_of(fragment: bytes, form: str) -> bytes:
    """Format a record as one line."""
    if form == "json":
        return fragment + b"\n"
    shown = _FIELDS.decode(fragment)
    if form == "raw":
        return bytes(shown.data) + b"\n"
    fields = (str(shown.seq), time_text(shown.ts_ms), _readable(shown.node), _readable(shown.tag))
    return (
        "\t".join(fields).encode()
        + b"\t"
        + _readable(bytes(shown.data).decode("utf-8", "replace")).encode()
        + b"\n"
    )


def _readable(text: str) -> str:
    """Escape characters that could affect a terminal or a column."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def print_gap(topic: str, gap: Tombstone, form: str) -> None:
    """Report a gap: with --json as an object among the records, otherwise on standard error."""
    if form == "json":
        sys.stdout.buffer.write(msgspec.json.encode({"tombstone": dataclasses.asdict(gap)}) + b"\n")
        sys.stdout.buffer.flush()
        return
    if gap.reason == "recreated":
        text = f"{topic} was removed and created again; reading starts over at {gap.earliest_seq}"
    else:
        text = f"records {gap.gap_from} to {gap.gap_to} of {topic} are gone ({gap.reason})"
    click.echo(f"gap: {text}", err=True)


@topics_command()
@click.argument("topics", nargs=-1, required=True)
@click.option("--from-start", is_flag=True, help="Print existing records first, instead of only new ones.")
@reading_options()
async def watch(
    client: Client,
    out: Output,
    topics: tuple[str, ...],
    from_start: bool,
    limit: int | None,
    raw: bool,
    tag: str | None,
    nodes: tuple[str, ...],
    fail_on_gap: bool,
) -> int:
    """Print the records of TOPICS as they are written: topic, sequence, time, node, tag, data.

    A topic that ends in * matches all topics with that prefix, including those created later; quote it for
    the shell. The command runs until it is interrupted or every topic is deleted, and reconnects when the
    server was unavailable. A record that decoders may refuse is reported by its sequence on standard error.
    """
    form = out.line_form(raw)
    start: int | Literal["tail"] = 0 if from_start else "tail"
    match = None if tag is None else parse_match(tag)
    async for event in client.watch(dict.fromkeys(topics, start), node=nodes, include_tags=True, match=match):
        if event.kind == "gap" and event.tombstone is not None:
            print_gap(event.topic, event.tombstone, form)
            if fail_on_gap:
                return ExitCode.PROBLEM
        shown = _print_event(event, form, limit)
        if limit is not None:
            limit -= shown
            if limit <= 0:
                break
    return ExitCode.OK


def _print_event(event: WatchEvent, form: str, limit: int | None) -> int:
    """Print the records of an event; return their number."""
    if event.kind in ("deleted", "not_followed", "put_off"):
        message = event.message or f"{event.topic} was deleted"
        if event.kind == "put_off":
            message = f"{event.topic} is delayed: {message}"
        click.echo(f"note: {message}", err=True)
    fragments = event.fragments if limit is None else event.fragments[:limit]
    output = sys.stdout.buffer
    for fragment in readable_of(event.topic, fragments):
        output.write(_watch_line(event.topic, fragment, form))
    output.flush()
    return len(fragments)


def _watch_line(topic: str, fragment: bytes, form: str) -> bytes:
    if form == "json":
        return b'{"topic":%b,"record":%b}\n' % (msgspec.json.encode(topic), fragment)
    line = line_of(fragment, form)
    return line if form == "raw" else topic.encode() + b"\t" + line
