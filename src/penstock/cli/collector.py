"""`penstock collector …`: run the OTLP collector, and list or replay its dead letters."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from types import FrameType
from typing import TYPE_CHECKING, Final

import click

from penstock.child_process import ChildProcess
from penstock.cli.base import EVENTS_HELP, Output, command
from penstock.cli.failure import ExitCode, needs
from penstock.cli.output import print_json, print_table, time_text
from penstock.units import format_size

if TYPE_CHECKING:
    from penstock.collector import Collector, DeadLetter, DeadLetters, Plan


_LOG = logging.getLogger(__name__)
_SECOND_SIGNAL_S: Final = 1.0
_OWN_THREADS: Final = 8
_LOOK_S: Final = 0.2
_RESTART_S: Final = 1.0
_GRACE_S: Final = 30.0
"""Time for closing the stores, in addition to the time for deliveries."""


def _variables(ctx: click.Context, option: click.Parameter, given: tuple[str, ...]) -> dict[str, str]:
    variables: dict[str, str] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise click.BadParameter(f"{text!r} has no '=': write NAME=VALUE")
        variables[name] = value
    return variables


@command(json_help=EVENTS_HELP)
@click.argument("file", type=click.Path(dir_okay=False))
@click.option("--check", is_flag=True, help="Only check the file and report errors; run nothing.")
@click.option(
    "--set", "variables", multiple=True, callback=_variables, metavar="NAME=VALUE",
    help="The value of {{NAME}} in the file; overrides the environment.",
)  # fmt: skip
@click.option(
    "--log", "level", type=click.Choice(["debug", "info", "warning", "error"]), default="info",
    show_default=True, help="The level of the log on standard error.",
)  # fmt: skip
@click.option("--core", "core_id", type=int, hidden=True, help="Run only this core, in this process.")
def run(
    file: str, check: bool, variables: Mapping[str, str], out: Output, level: str, core_id: int | None
) -> int:
    """Run the collector of FILE until SIGTERM or Ctrl-C.

    A stop refuses new requests, makes everything durable, delivers as much as possible within drain_timeout
    and ends with exit code 0. The rest is delivered after the next start. A second signal ends the
    deliveries immediately.
    """
    with needs("the collector", extras="collector"):
        from penstock.collector import load_plan
    plan = load_plan(file, {**os.environ, **variables})
    if check:
        return _print_check(plan, out)
    logging.basicConfig(
        level=level.upper(), format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr
    )
    if core_id is None and plan.cores > 1:
        again = ["collector", "run", file, "--log", level, *(["--json"] if out.is_json else [])]
        for name, value in variables.items():
            again += ["--set", f"{name}={value}"]
        return run_cores(plan, again)
    return _run(plan, core_id or 0, out)


def _print_check(plan: Plan, out: Output) -> int:
    nodes = [
        {"name": node.name, "plugin": str(node.plugin), "destinations": list(node.destinations)}
        for node in plan.graph.nodes.values()
    ]
    left_out = [node.name for node in plan.graph.left_out]
    if out.is_json:
        print_json({"ok": True, "nodes": nodes, "left_out": left_out, "warnings": plan.warnings()})
        return ExitCode.OK
    for node in plan.graph.nodes.values():
        goes = f" -> {', '.join(node.destinations)}" if node.destinations else ""
        click.echo(f"{node.name}: {node.plugin}{goes}")
    for warning in plan.warnings():
        click.echo(f"warning: {warning}", err=True)
    click.echo("the file is valid")
    return ExitCode.OK


def _run(plan: Plan, core_id: int, out: Output) -> int:
    from penstock.collector import Collector
    from penstock.http import run as run_with_signals

    async def main(stop: asyncio.Event) -> None:
        asyncio.get_running_loop().set_default_executor(_threads(plan))
        if core_id == 0:
            for warning in plan.warnings():
                _LOG.warning("%s", warning)
        async with Collector(plan, core_id=core_id) as collector:
            _print_ready(collector, core_id, out)
            await stop.wait()
            _LOG.info("stopping: new requests are refused, stored data is delivered as far as possible")
            hurrying = asyncio.create_task(_hurry(collector, stop))
            await collector.stop()
            hurrying.cancel()
        _print_event(out, "stopped", core=core_id)

    _reuse_memory()
    run_with_signals(main)
    return ExitCode.OK


def _threads(plan: Plan) -> ThreadPoolExecutor:
    """Create one thread for each concurrent delivery, so that a slow disk does not delay the others."""
    from penstock.collector import concurrency_of

    most = sum(concurrency_of(settings) for settings in plan.settings.values())
    return ThreadPoolExecutor(max_workers=_OWN_THREADS + most, thread_name_prefix="collector")


async def _hurry(collector: Collector, stop: asyncio.Event) -> None:
    """End the deliveries at a second signal. A signal that arrives with the first one does not count."""
    await asyncio.sleep(_SECOND_SIGNAL_S)
    stop.clear()
    await stop.wait()
    _LOG.info("stopping immediately: undelivered data is kept")
    collector.hurry()


def _reuse_memory() -> None:
    """Let Arrow allocate from the C library, which reuses large buffers for the next request."""
    import pyarrow as pa

    pa.set_memory_pool(pa.system_memory_pool())


def _print_ready(collector: Collector, core_id: int, out: Output) -> None:
    for name, addresses in collector.addresses.items():
        for address in addresses:
            _LOG.info("%s listens on %s", name, address)
    bound = {name: [str(address) for address in found] for name, found in collector.addresses.items()}
    _print_event(out, "ready", core=core_id, pid=os.getpid(), addresses=bound)


def _print_event(out: Output, event: str, **fields: object) -> None:
    if out.is_json:
        out.event(event, **fields)
        sys.stdout.flush()
    else:
        _LOG.info("%s", event)


class CoreProcess:
    """The process of one core, restarted when it ends unexpectedly."""

    def __init__(self, core_id: int, command: Sequence[str]) -> None:
        self._core_id = core_id
        self._command = [*command, "--core", str(core_id)]
        self.child = self._start()

    def _start(self) -> ChildProcess:
        self.started_s = time.monotonic()
        # In the group of this process, so that killing that group ends the cores as well.
        return ChildProcess.start(self._command, stdin=None, own_session=False)

    def check(self) -> int | None:
        """Restart the process if it has ended. Return its exit code if it failed during its start.

        A process that was killed is always restarted: this does not indicate wrong settings.
        """
        ended = self.child.poll()
        if ended is None:
            return None
        if time.monotonic() - self.started_s < _RESTART_S:
            return ended.code  # None if it was killed: it is restarted at a later check
        _LOG.error("core %d %s and is restarted", self._core_id, ended.reason)
        self.child = self._start()
        return None


def run_cores(plan: Plan, arguments: Sequence[str]) -> int:
    """Run every core until SIGTERM or Ctrl-C. Return 0 if all of them stopped in order.

    A core that ends is restarted. If a core fails during its start, all of them are stopped.
    """
    cores: list[CoreProcess] = []
    stopping = False

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal stopping
        if stopping:
            for core in cores:
                core.child.terminate()
        stopping = True

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    command = [sys.executable, "-m", "penstock.cli", *arguments]
    cores += [CoreProcess(core_id, command) for core_id in range(plan.cores)]
    failed = 0
    while not stopping and not failed:
        time.sleep(_LOOK_S)
        failed = next((code for core in cores if (code := core.check())), 0)
    for core in cores:
        core.child.terminate()
    deadline_s = time.monotonic() + plan.drain_timeout_s + _GRACE_S
    endings = [core.child.finish(deadline_s - time.monotonic()) for core in cores]
    return failed or (ExitCode.OK if all(end.code == 0 for end in endings) else ExitCode.PROBLEM)


@command("dead-letters")
@click.argument("directory", type=click.Path(exists=True, file_okay=False), default="./dead_letters")
@click.option("--exporter", help="Only letters of this exporter.")
@click.option(
    "--replay", "endpoint", metavar="URL",
    help="Send the letters to this OTLP/HTTP endpoint, and delete those that it accepts.",
)  # fmt: skip
def dead_letters(directory: str, exporter: str | None, endpoint: str | None, out: Output) -> int:
    """List the dead letters in DIRECTORY (`dead_letters` in the file): requests that exporters rejected.

    Each .pb file is a complete OTLP request; the .json file next to it has the reason. --replay sends each
    letter once, for example to the collector's own HTTP port; letters that are not accepted stay.
    """
    from penstock.collector import DeadLetters

    store = DeadLetters(directory)
    letters = [letter for letter in store.letters() if exporter is None or letter.exporter == exporter]
    if endpoint is not None:
        return _replay(store, letters, endpoint, out)
    out.show([asdict(letter) for letter in letters], lambda: _print_letters(letters))
    return ExitCode.PROBLEM if letters else ExitCode.OK


def _print_letters(letters: Sequence[DeadLetter]) -> None:
    rows = [
        (letter.exporter, letter.signal, time_text(letter.at_ms), format_size(letter.size),
         letter.damage or letter.reason, letter.path)
        for letter in letters
    ]  # fmt: skip
    if rows:
        print_table(("exporter", "signal", "refused", "size", "reason", "file"), rows, right=(3,))
    else:
        click.echo("no dead letters")


def _replay(store: DeadLetters, letters: Sequence[DeadLetter], endpoint: str, out: Output) -> int:
    from penstock.collector import OtlpExporterSettings, make_otlp_exporter, replay

    exporter = make_otlp_exporter(OtlpExporterSettings(http_endpoint=endpoint))
    done = asyncio.run(replay(letters, store, exporter))
    accepted = sum(one.is_taken for one in done)
    sent = [{"path": one.letter.path, "taken": one.is_taken, "reason": one.outcome.reason} for one in done]
    if not out.is_json:
        for one in done:
            if not one.is_taken:
                click.echo(f"{one.letter.path}: {one.outcome.reason}", err=True)
    out.show(
        {"letters": len(letters), "taken": accepted, "sent": sent},
        f"{accepted} of {len(letters)} were accepted",
    )
    return ExitCode.OK if accepted == len(letters) else ExitCode.PROBLEM
