"""`penstock topics work`: run a command for every job of a queue, then ack or nack the job."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import shutil
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Final

import click

from penstock.child_process import AsyncChild
from penstock.cli.base import Output, milliseconds
from penstock.cli.failure import ExitCode
from penstock.cli.signals import signal_code
from penstock.cli.topics.client import topics_command
from penstock.cli.topics.jobs import node_option
from penstock.errors import ConfigError, PenstockError
from penstock.topics import ClaimedJob, Client, pluralise

_EXTENSIONS: Final = 3
"""Extensions per lease duration, so that one or two failed extensions do not lose the lease."""
_LOOK_EVERY_S: Final = 0.5


@dataclass(slots=True)
class Tally:
    """The number of commands that succeeded, failed, or lost their lease."""

    done: int = 0
    failed: int = 0
    lost: int = 0


class Workers:
    """The running commands. `on_failure` is called if the result of one cannot be reported to the server."""

    def __init__(
        self,
        client: Client,
        queue: str,
        node: str,
        *,
        lease_ms: int,
        delay_ms: int,
        command: Sequence[str],
        on_failure: Callable[[], None],
    ) -> None:
        self._client = client
        self._queue = queue
        self._node = node
        self._lease_ms = lease_ms
        self._delay_ms = delay_ms
        self._command = command
        self._on_failure = on_failure
        self._running: set[asyncio.Task[None]] = set()
        self._failure: BaseException | None = None
        self.tally = Tally()

    def start(self, job: ClaimedJob) -> None:
        """Run the command for a job."""
        task = asyncio.create_task(self._do(job))
        self._running.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._failure = self._failure or task.exception()
            self._on_failure()

    async def is_idle(self) -> bool:
        """Return whether no command runs and the queue has no job that is ready, held or delayed."""
        return not self._running and not (await self._client.state(self._queue, touch=False)).count

    async def finish(self) -> None:
        """Wait for the running commands. Raise the first failure."""
        while self._running:
            await asyncio.wait(self._running)
        if self._failure is not None:
            raise self._failure

    def abandon(self) -> None:
        """Kill the running commands. Their jobs are returned when the stream ends."""
        for task in self._running:
            task.cancel()

    async def _do(self, job: ClaimedJob) -> None:
        process = await self._begin(job)
        holding = asyncio.create_task(self._hold(job, process))
        try:
            ended = await process.wait()
        except asyncio.CancelledError:
            process.kill()
            await process.wait()
            raise
        finally:
            holding.cancel()
            (is_lost,) = await asyncio.gather(holding, return_exceptions=True)
        if is_lost is True:
            self.tally.lost += 1
        elif ended.code == 0:
            acked = (await self._client.ack(self._queue, self._node, [job])).acked
            self.tally.done += acked
            self.tally.lost += 1 - acked
        else:
            self.tally.failed += 1
            await self._client.nack(self._queue, self._node, [job], delay_ms=self._delay_ms)

    async def _begin(self, job: ClaimedJob) -> AsyncChild:
        """Start the command in its own session, so that Ctrl-C reaches only `penstock`, which waits."""
        facts = {"JOB_SEQ": str(job.seq), "JOB_DELIVERIES": str(job.deliveries), "JOB_TAG": job.tag or ""}
        try:
            return await AsyncChild.start(
                self._command, os.environ | facts, input=bytes(job.data) + b"\n", kill_group=False
            )
        except (OSError, ValueError) as error:
            raise ConfigError(f"cannot run {self._command[0]!r}: {error}") from error

    async def _hold(self, job: ClaimedJob, process: AsyncChild) -> bool:
        """Extend the lease while the command runs. If the lease is lost, kill the command and return True."""
        clock, lease_s = asyncio.get_running_loop().time, self._lease_ms / 1000
        until_s = clock() + lease_s
        while True:
            await asyncio.sleep(lease_s / _EXTENSIONS)
            requested_s = clock()
            why = await self._extend(job, until_s)
            if why:
                click.echo(f"job {job.seq} {why}: its command is killed", err=True)
                process.kill()
                return True
            until_s = requested_s + lease_s

    async def _extend(self, job: ClaimedJob, until_s: float) -> str:
        """Extend the lease. Return why it is lost, or an empty string."""
        try:
            async with asyncio.timeout_at(until_s):
                held = await self._client.extend(self._queue, self._node, [job], lease_ms=self._lease_ms)
        except TimeoutError:
            return "could not be held: the server did not respond in time"
        except PenstockError as error:
            return f"could not be held ({error})"
        return "is no longer held" if held.skipped else ""


@topics_command(context_settings={"ignore_unknown_options": True})
@click.argument("queue")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED, metavar="[--] COMMAND...")
@click.option(
    "--max", "most", type=click.IntRange(1, 1000), default=1, show_default=True, help="Concurrent jobs."
)
@click.option(
    "--lease", "lease_ms", callback=milliseconds, metavar="DURATION",
    help="How long to hold a job; extended while its command runs.",
)  # fmt: skip
@click.option(
    "--delay", "delay_ms", callback=milliseconds, metavar="DURATION", default="0s",
    help="How long to wait before a failed job is tried again.",
)  # fmt: skip
@click.option("--drain", is_flag=True, help="Stop when the queue is empty: no job ready, held or delayed.")
@node_option
async def work(
    client: Client,
    out: Output,
    queue: str,
    command: Sequence[str],
    most: int,
    lease_ms: int | None,
    delay_ms: int,
    drain: bool,
    node: str,
) -> int:
    """Run COMMAND for every job of QUEUE: the data on its standard input, exit code 0 if it is done.

    Put -- before a COMMAND that has options; otherwise they are taken as options of `work`.

    If the command fails, the job is returned to the queue. The command's environment has JOB_SEQ,
    JOB_DELIVERIES and JOB_TAG. Ctrl-C or SIGTERM waits for the running commands; a second one kills them and
    returns their jobs.
    """
    if shutil.which(command[0]) is None:
        raise ConfigError(f"there is no command {command[0]!r} to run for the jobs")
    if lease_ms is None:
        lease_ms = (await client.state(queue, touch=False)).config.lease_ms
    stop = asyncio.Event()
    workers = Workers(
        client,
        queue,
        node,
        lease_ms=lease_ms,
        delay_ms=delay_ms,
        command=command,
        on_failure=stop.set,
    )
    signals = _Signals(workers, stop)
    async with contextlib.aclosing(client.work(queue, node, max=most, lease_ms=lease_ms)) as jobs:
        await _start_until(stop, jobs, workers, drain=drain)
    tally = workers.tally
    text = f"done: {pluralise(tally.done, 'job')}; failed {tally.failed:,} times; lost {tally.lost:,}"
    out.show(dataclasses.asdict(tally), lambda: click.echo(text, err=True))
    return signals.code


async def _start_until(
    stop: asyncio.Event, jobs: AsyncIterator[ClaimedJob], workers: Workers, *, drain: bool
) -> None:
    """Start a command for each job until `stop` is set or the queue is drained, then wait for all."""
    # The stream yields no more jobs than may run concurrently.
    coming = asyncio.ensure_future(anext(jobs))
    stopping = asyncio.ensure_future(stop.wait())
    try:
        while not stop.is_set() and not (drain and await workers.is_idle()):
            await asyncio.wait([coming, stopping], timeout=_LOOK_EVERY_S, return_when=asyncio.FIRST_COMPLETED)
            if coming.done():
                workers.start(coming.result())
                coming = asyncio.ensure_future(anext(jobs))
    finally:
        try:
            await workers.finish()
        finally:
            coming.cancel()
            stopping.cancel()
            await asyncio.gather(coming, stopping, return_exceptions=True)


class _Signals:
    """SIGINT and SIGTERM: the first one lets the commands finish, the second one kills them."""

    def __init__(self, workers: Workers, stop: asyncio.Event) -> None:
        self._workers = workers
        self._stop = stop
        self._is_leaving = False
        self.code = ExitCode.OK
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal, number)

    def _on_signal(self, number: signal.Signals) -> None:
        if self._is_leaving:
            self.code = signal_code(number)
            self._workers.abandon()
        self._is_leaving = True
        self._stop.set()
