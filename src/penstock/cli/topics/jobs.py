"""Jobs on a command line: who works, and which jobs are meant under which leases."""

from __future__ import annotations

import dataclasses
import socket
from collections.abc import Callable, Sequence
from typing import TypeVar

import click

from penstock.cli.display import print_json
from penstock.cli.failure import ExitCode
from penstock.errors import ConfigError
from penstock.topics import AckResult, ExtendResult, JobRef, NackResult, counted
from penstock.units import parse_duration

__all__ = ["job_arguments", "milliseconds", "node_option", "report"]

F = TypeVar("F", bound=Callable[..., object])


def node_option(command: F) -> F:
    """Who claims, and therefore who may ack."""
    return click.option(
        "--node",
        envvar="TOPICS_NODE",
        default=socket.gethostname,
        metavar="NAME",
        help="The name of the worker; TOPICS_NODE, else this machine's name.",
    )(command)


def job_arguments(command: F) -> F:
    """`SEQ`, or `SEQ:LEASE_ID` for exactly that delivery."""
    return click.argument("jobs", nargs=-1, required=True, metavar="JOB...", callback=_job_refs)(command)


def _job_refs(context: click.Context, parameter: click.Parameter, given: Sequence[str]) -> list[JobRef]:
    return [_job_ref(text) for text in given]


def _job_ref(text: str) -> JobRef:
    seq, colon, lease_id = text.partition(":")
    if not seq.isascii() or not seq.isdigit() or (colon and not lease_id):
        raise click.BadParameter(f"{text!r} is no job: write SEQ, or SEQ:LEASE_ID as the claim printed it.")
    return (int(seq), lease_id) if colon else int(seq)


def milliseconds(option: str, text: str) -> int:
    """A duration that was given for an option."""
    try:
        return round(parse_duration(text) * 1000)
    except ConfigError as error:
        raise click.BadParameter(str(error), param_hint=f"'{option}'") from error


def report(result: AckResult | NackResult | ExtendResult, sentence: str, *, as_json: bool) -> int:
    """Print what became of the jobs, and on standard error which were not the worker's; the exit code."""
    skipped = result.skipped
    if as_json:
        print_json(dataclasses.asdict(result))
    else:
        click.echo(sentence)
        _tell_skipped(skipped)
    return ExitCode.REJECTED if skipped else ExitCode.OK


def _tell_skipped(skipped: Sequence[int]) -> None:
    if skipped:
        named = ", ".join(map(str, skipped[:10])) + (", …" if len(skipped) > 10 else "")
        click.echo(f"skipped {counted(len(skipped), 'job')} that this node does not hold: {named}", err=True)
