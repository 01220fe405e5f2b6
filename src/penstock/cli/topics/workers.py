"""`penstock topics work`: run a command for every job of a queue, and answer for it."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import shutil
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import click

from penstock.cli.failure import ExitCode
from penstock.cli.options import milliseconds
from penstock.cli.output import print_json
from penstock.cli.signals import signal_code
from penstock.cli.topics.jobs import Worker, worker_options
from penstock.errors import ConfigError, PenstockError
from penstock.topics import ClaimedJob, Client, pluralise

_EXTENSIONS: Final = 3
"""A lease is extended so many times before it would end: one or two that fail do no harm."""


@dataclass(slots=True)
class Tally:
    """How often a command ended well, badly, or without its lease."""

    done: int = 0
    failed: int = 0
    lost: int = 0


class Workers:
    """The commands that are running. `on_failure` is called when one of them cannot be answered for."""

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
        """Whether nothing is running, and the queue is empty: nothing ready, held by anybody, or delayed."""
        return not self._running and not (await self._client.state(self._queue, touch=False)).count

    async def finish(self) -> None:
        """Wait for what is running. Raises what was the first to go wrong."""
        while self._running:
            await asyncio.wait(self._running)
        if self._failure is not None:
            raise self._failure

    def abandon(self) -> None:
        """Stop what is running; its jobs go back when the stream ends."""
        for task in self._running:
            task.cancel()

    async def _do(self, job: ClaimedJob) -> None:
        process = await self._begin(job)
        holding = asyncio.create_task(self._hold(job, process))
        try:
            await process.communicate(bytes(job.data) + b"\n")
        except asyncio.CancelledError:
            _stop(process)
            await process.wait()
            raise
        finally:
            holding.cancel()
            (is_lost,) = await asyncio.gather(holding, return_exceptions=True)
        if is_lost is True:
            self.tally.lost += 1
        elif process.returncode == 0:
            acked = (await self._client.ack(self._queue, self._node, [job])).acked
            self.tally.done += acked
            self.tally.lost += 1 - acked
        else:
            self.tally.failed += 1
            await self._client.nack(self._queue, self._node, [job], delay_ms=self._delay_ms)

    async def _begin(self, job: ClaimedJob) -> asyncio.subprocess.Process:
        """Start it in a new session: Ctrl-C is for `penstock`, which waits for the command."""
        facts = {"JOB_SEQ": str(job.seq), "JOB_DELIVERIES": str(job.deliveries), "JOB_TAG": job.tag or ""}
        try:
            return await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.PIPE,
                env=os.environ | facts,
                start_new_session=True,
            )
        except (OSError, ValueError) as error:
            raise ConfigError(f"cannot run {self._command[0]!r}: {error}") from error

    async def _hold(self, job: ClaimedJob, process: asyncio.subprocess.Process) -> bool:
        """Extend the lease while the command runs; when it is lost the command is stopped; true then."""
        clock, lease_s = asyncio.get_running_loop().time, self._lease_ms / 1000
        until_s = clock() + lease_s
        while True:
            await asyncio.sleep(lease_s / _EXTENSIONS)
            asked_s = clock()
            why = await self._extend(job, until_s)
            if why:
                click.echo(f"job {job.seq} {why}: its command is stopped", err=True)
                _stop(process)
                return True
            until_s = asked_s + lease_s

    async def _extend(self, job: ClaimedJob, until_s: float) -> str:
        """Why the job is not held any longer; empty if it is."""
        try:
            async with asyncio.timeout_at(until_s):
                held = await self._client.extend(self._queue, self._node, [job], lease_ms=self._lease_ms)
        except TimeoutError:
            return "could not be held any longer, for the server did not answer in time"
        except PenstockError as error:
            return f"could not be held any longer ({error})"
        return "is no longer held" if held.skipped else ""


def _stop(process: asyncio.subprocess.Process) -> None:
    """With everything that it has started and that is still in its session's first group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


_LOOK_EVERY_S: Final = 0.5


@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("queue")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED, metavar="[--] COMMAND...")
@worker_options
@click.option("--max", "most", type=click.IntRange(1, 1000), default=1, show_default=True, help="At a time.")
@click.option("--lease", metavar="DURATION", help="How long to hold a job; extended while it runs.")
@click.option("--delay", metavar="DURATION", default="0s", help="When a job that failed is tried again.")
@click.option("--drain", is_flag=True, help="Stop when the queue is empty: nothing ready, held or delayed.")
def work(
    queue: str,
    command: Sequence[str],
    worker: Worker,
    as_json: bool,
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
    lease_ms = None if lease is None else milliseconds("--lease", lease)
    delay_ms = milliseconds("--delay", delay)
    tally, code = worker.run(
        lambda client: _work(client, queue, worker.node, most, lease_ms, delay_ms, drain, command)
    )
    if as_json:
        print_json(dataclasses.asdict(tally))
    else:
        text = f"done: {pluralise(tally.done, 'job')}; failed {tally.failed:,} times; lost {tally.lost:,}"
        click.echo(text, err=True)
    return code


async def _work(
    client: Client,
    queue: str,
    node: str,
    most: int,
    lease_ms: int | None,
    delay_ms: int,
    drain: bool,
    command: Sequence[str],
) -> tuple[Tally, ExitCode]:
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
    leaving = _Leaving(workers, stop)
    async with contextlib.aclosing(client.work(queue, node, max=most, lease_ms=lease_ms)) as jobs:
        # The stream gives out no more jobs than may run at a time.
        coming = asyncio.ensure_future(anext(jobs))
        stopping = asyncio.ensure_future(stop.wait())
        try:
            while not stop.is_set() and not (drain and await workers.is_idle()):
                await asyncio.wait(
                    [coming, stopping], timeout=_LOOK_EVERY_S, return_when=asyncio.FIRST_COMPLETED
                )
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
    return workers.tally, leaving.code


class _Leaving:
    """The first signal lets commands finish, the second one does not."""

    def __init__(self, workers: Workers, stop: asyncio.Event) -> None:
        self._workers = workers
        self._stop = stop
        self._is_leaving = False
        self.code = ExitCode.OK
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self._hear, number)

    def _hear(self, number: signal.Signals) -> None:
        if self._is_leaving:
            self.code = signal_code(number)
            self._workers.abandon()
        self._is_leaving = True
        self._stop.set()
