"""`penstock topics work`: run a command for every job of a queue."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import shutil
import signal
from collections.abc import Sequence
from typing import Final

import click

from penstock.cli.display import print_json
from penstock.cli.failure import ExitCode
from penstock.cli.topics.crew import Crew, Tally
from penstock.cli.topics.jobs import milliseconds, node_option
from penstock.cli.topics.target import Server, run, server_options
from penstock.errors import ConfigError
from penstock.topics import counted

__all__ = ["work"]

_LOOK_EVERY_S: Final = 0.5
_EXIT_CODES: Final = {signal.SIGINT: ExitCode.INTERRUPTED, signal.SIGTERM: ExitCode.TERMINATED}


@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("queue")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED, metavar="[--] COMMAND...")
@server_options
@node_option
@click.option("--max", "most", type=click.IntRange(1, 1000), default=1, show_default=True, help="At a time.")
@click.option("--lease", metavar="DURATION", help="How long to hold a job; extended while it runs.")
@click.option("--delay", metavar="DURATION", default="0s", help="When a job that failed is tried again.")
@click.option("--drain", is_flag=True, help="Stop when the queue is empty: nothing ready, held or delayed.")
def work(
    queue: str,
    command: Sequence[str],
    url: str,
    key: str | None,
    timeout: str,
    retry_for: str,
    as_json: bool,
    node: str,
    most: int,
    lease: str | None,
    delay: str,
    drain: bool,
) -> int:
    """Run COMMAND for every job of QUEUE: its data on standard input, exit code 0 when it is done.

    Put -- before a COMMAND that has options of its own; those without it are taken for options of this verb.

    A job whose command fails goes back. The command finds JOB_SEQ, JOB_DELIVERIES and JOB_TAG in its
    environment. Ctrl-C or SIGTERM waits for what is running, and ends; the second one stops that too, and
    its jobs go back.
    """
    if shutil.which(command[0]) is None:
        raise ConfigError(f"there is no command {command[0]!r} that could be run for the jobs")
    server = Server(url=url, key=key, timeout=timeout, retry_for=retry_for)
    lease_ms = None if lease is None else milliseconds("--lease", lease)
    delay_ms = milliseconds("--delay", delay)
    tally, code = run(_work(server, queue, node, most, lease_ms, delay_ms, drain, command))
    if as_json:
        print_json(dataclasses.asdict(tally))
    else:
        text = f"done: {counted(tally.done, 'job')}; failed {tally.failed:,} times; lost {tally.lost:,}"
        click.echo(text, err=True)
    return code


async def _work(
    server: Server,
    queue: str,
    node: str,
    most: int,
    lease_ms: int | None,
    delay_ms: int,
    drain: bool,
    command: Sequence[str],
) -> tuple[Tally, ExitCode]:
    async with server.client() as client:
        if lease_ms is None:
            lease_ms = (await client.state(queue, touch=False)).config.lease_ms
        stop = asyncio.Event()
        crew = Crew(
            client,
            queue,
            node,
            lease_ms=lease_ms,
            delay_ms=delay_ms,
            command=command,
            on_failure=stop.set,
        )
        leaving = _Leaving(crew, stop)
        async with contextlib.aclosing(client.work(queue, node, max=most, lease_ms=lease_ms)) as jobs:
            # The stream gives out no more jobs than may run at a time.
            coming = asyncio.ensure_future(anext(jobs))
            stopping = asyncio.ensure_future(stop.wait())
            try:
                while not stop.is_set() and not (drain and await crew.is_idle()):
                    await asyncio.wait(
                        [coming, stopping], timeout=_LOOK_EVERY_S, return_when=asyncio.FIRST_COMPLETED
                    )
                    if coming.done():
                        crew.start(coming.result())
                        coming = asyncio.ensure_future(anext(jobs))
            finally:
                try:
                    await crew.finish()
                finally:
                    coming.cancel()
                    stopping.cancel()
                    await asyncio.gather(coming, stopping, return_exceptions=True)
        return crew.tally, leaving.code


class _Leaving:
    """The first signal lets commands finish, the second one does not."""

    def __init__(self, crew: Crew, stop: asyncio.Event) -> None:
        self._crew = crew
        self._stop = stop
        self._is_told = False
        self.code = ExitCode.OK
        for number in _EXIT_CODES:
            asyncio.get_running_loop().add_signal_handler(number, self._hear, number)

    def _hear(self, number: signal.Signals) -> None:
        if self._is_told:
            self.code = _EXIT_CODES[number]
            self._crew.abandon()
        self._is_told = True
        self._stop.set()
