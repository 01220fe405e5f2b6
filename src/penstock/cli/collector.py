"""`penstock collector …`: run the OTLP collector, and look at what destinations refused."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from types import FrameType
from typing import TYPE_CHECKING, Final

import click

from penstock.cli.failure import ExitCode, needs
from penstock.cli.output import print_json, print_table, time_text
from penstock.units import format_size

if TYPE_CHECKING:
    from penstock.collector import Collector, DeadLetter, DeadLetters, Plan


_LOG = logging.getLogger(__name__)
_SECOND_SIGNAL_S: Final = 1.0
_OWN_THREADS: Final = 8


def _variables(ctx: click.Context, option: click.Parameter, given: tuple[str, ...]) -> dict[str, str]:
    variables: dict[str, str] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise click.BadParameter(f"{text!r} has no '=': write NAME=VALUE")
        variables[name] = value
    return variables


@click.command()
@click.argument("file", type=click.Path(dir_okay=False))
@click.option("--check", is_flag=True, help="Read the file, say what is wrong with it, and run nothing.")
@click.option(
    "--set", "variables", multiple=True, callback=_variables, metavar="NAME=VALUE",
    help="What {{NAME}} in the file stands for; comes before the environment.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Tell what happens as JSON, a line for each event.")
@click.option(
    "--log", "level", type=click.Choice(["debug", "info", "warning", "error"]), default="info",
    show_default=True, help="How much is told on standard error.",
)  # fmt: skip
@click.option("--core", "core_id", type=int, hidden=True, help="Run this core alone, in this process.")
def run(
    file: str, check: bool, variables: Mapping[str, str], as_json: bool, level: str, core_id: int | None
) -> int:
    """Run the collector of FILE until SIGTERM or Ctrl-C.

    A stop takes no more requests, makes everything durable, delivers what can be delivered within
    drain_timeout, and ends with exit code 0. What is left is delivered after the next start. A second signal
    ends the deliveries at once.
    """
    with needs("the collector", extras="collector"):
        from penstock.collector import load_plan
    plan = load_plan(file, {**os.environ, **variables})
    if check:
        return _print_check(plan, as_json)
    logging.basicConfig(
        level=level.upper(), format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr
    )
    if core_id is None and plan.cores > 1:
        again = ["collector", "run", file, "--log", level, *(["--json"] if as_json else [])]
        for name, value in variables.items():
            again += ["--set", f"{name}={value}"]
        return run_cores(plan, again)
    return _run(plan, core_id or 0, as_json)


def _print_check(plan: Plan, as_json: bool) -> int:
    nodes = [
        {"name": node.name, "plugin": str(node.plugin), "destinations": list(node.destinations)}
        for node in plan.graph.nodes.values()
    ]
    left_out = [node.name for node in plan.graph.left_out]
    if as_json:
        print_json({"ok": True, "nodes": nodes, "left_out": left_out, "warnings": plan.warnings()})
        return ExitCode.OK
    for node in plan.graph.nodes.values():
        goes = f" -> {', '.join(node.destinations)}" if node.destinations else ""
        click.echo(f"{node.name}: {node.plugin}{goes}")
    for sentence in plan.warnings():
        click.echo(f"warning: {sentence}", err=True)
    click.echo("the file can run")
    return ExitCode.OK


def _run(plan: Plan, core_id: int, as_json: bool) -> int:
    from penstock.collector import Collector
    from penstock.http import run as run_with_signals

    async def main(stop: asyncio.Event) -> None:
        asyncio.get_running_loop().set_default_executor(_threads(plan))
        if core_id == 0:
            for sentence in plan.warnings():
                _LOG.warning("%s", sentence)
        async with Collector(plan, core_id=core_id) as collector:
            _print_ready(collector, core_id, as_json)
            await stop.wait()
            _LOG.info("stopping: no more requests are taken, what is kept is delivered as far as possible")
            hurrying = asyncio.create_task(_hurry(collector, stop))
            await collector.stop()
            hurrying.cancel()
        _print_event(as_json, {"event": "stopped", "core": core_id}, "stopped")

    _reuse_memory()
    run_with_signals(main)
    return ExitCode.OK


def _threads(plan: Plan) -> ThreadPoolExecutor:
    """One for all that each destination has under way: a disk that hangs must not hold up the others."""
    from penstock.collector import concurrency_of

    most = sum(concurrency_of(settings) for settings in plan.settings.values())
    return ThreadPoolExecutor(max_workers=_OWN_THREADS + most, thread_name_prefix="collector")


async def _hurry(collector: Collector, stop: asyncio.Event) -> None:
    """A second signal ends the deliveries; one that comes along with the first counts as the same."""
    await asyncio.sleep(_SECOND_SIGNAL_S)
    stop.clear()
    await stop.wait()
    _LOG.info("stopping at once: what is not delivered is kept")
    collector.hurry()


def _reuse_memory() -> None:
    """Take Arrow's memory from the C library, which keeps large buffers for the next request."""
    import pyarrow as pa

    pa.set_memory_pool(pa.system_memory_pool())


def _print_ready(collector: Collector, core_id: int, as_json: bool) -> None:
    for name, addresses in collector.addresses.items():
        for address in addresses:
            _LOG.info("%s listens on %s", name, address)
    where = {name: [str(address) for address in found] for name, found in collector.addresses.items()}
    _print_event(
        as_json, {"event": "ready", "core": core_id, "pid": os.getpid(), "addresses": where}, "ready"
    )


def _print_event(as_json: bool, event: Mapping[str, object], words: str) -> None:
    if as_json:
        click.echo(json.dumps(event))
        sys.stdout.flush()
    else:
        _LOG.info("%s", words)


_LOG = logging.getLogger(__name__)
_LOOK_S: Final = 0.2
_RESTART_S: Final = 1.0
_GRACE_S: Final = 30.0
"""Beyond the time that deliveries get, for closing the stores."""


class _CoreProcess:
    """One process; started again when it ends by itself."""

    def __init__(self, core_id: int, command: Sequence[str]) -> None:
        self._core_id = core_id
        self._command = [*command, "--core", str(core_id)]
        self._started_s = 0.0
        self._process = self._start()
        self.is_up = True

    def _start(self) -> subprocess.Popen[bytes]:
        self._started_s = time.monotonic()
        return subprocess.Popen(self._command)

    def look(self) -> int | None:
        """Start it again if it died after it had been up for a while; else the code it ended with.

        One that was killed is started again in any case: that says nothing about its settings.
        """
        code = self._process.poll()
        if code is None:
            return None
        is_new = time.monotonic() - self._started_s < _RESTART_S
        if is_new and code < 0:
            return None  # it is started again as soon as it is not new any more
        if is_new:
            self.is_up = False
            return code
        how = f"was killed by signal {-code}" if code < 0 else f"ended with {code}"
        _LOG.error("core %d %s and is started again", self._core_id, how)
        self._process = self._start()
        return None

    def stop(self) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)

    def wait(self, timeout_s: float) -> int:
        try:
            return self._process.wait(max(0.0, timeout_s))
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()


def run_cores(plan: Plan, arguments: Sequence[str]) -> int:
    """Run every core until SIGTERM or Ctrl-C. One that dies is started again; one that cannot start ends all.

    A core that is killed while it starts counts as one that dies.

    The code is 0 when all of them stopped in order.
    """
    stopping = False

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal stopping
        if stopping:
            for core in cores:
                core.stop()
        stopping = True

    cores: list[_CoreProcess] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    command = [sys.executable, "-m", "penstock.cli", *arguments]
    cores += [_CoreProcess(core_id, command) for core_id in range(plan.cores)]
    failed = 0
    while not stopping and not failed:
        time.sleep(_LOOK_S)
        failed = next((code for core in cores if (code := core.look())), 0)
    for core in cores:
        core.stop()
    deadline_s = time.monotonic() + plan.drain_timeout_s + _GRACE_S
    codes = [core.wait(deadline_s - time.monotonic()) for core in cores]
    return failed or (ExitCode.OK if not any(codes) else ExitCode.PROBLEM)


@click.command("dead-letters")
@click.argument("directory", type=click.Path(exists=True, file_okay=False), default="./dead_letters")
@click.option("--exporter", help="Only those of this exporter.")
@click.option(
    "--replay", "endpoint", metavar="URL",
    help="Send them again to this OTLP/HTTP endpoint, and remove those that it takes.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
def dead_letters(directory: str, exporter: str | None, endpoint: str | None, as_json: bool) -> int:
    """List the refused bundles in DIRECTORY (the `dead_letters` of the file).

    Each .pb file is a whole OTLP request, and the .json beside it says why it was refused. --replay sends
    each once, for example to a collector's own HTTP port; what is not taken stays.
    """
    from penstock.collector import DeadLetters

    store = DeadLetters(directory)
    letters = [letter for letter in store.letters() if exporter is None or letter.exporter == exporter]
    if endpoint is not None:
        return _replay(store, letters, endpoint, as_json)
    if as_json:
        print_json([asdict(letter) for letter in letters])
    elif not letters:
        click.echo("nothing was refused")
    else:
        rows = [
            (letter.exporter, letter.signal, time_text(letter.at_ms), format_size(letter.size),
             letter.damage or letter.reason, letter.path)
            for letter in letters
        ]  # fmt: skip
        print_table(("exporter", "signal", "refused", "size", "reason", "file"), rows, right=(3,))
    return ExitCode.PROBLEM if letters else ExitCode.OK


def _replay(store: DeadLetters, letters: Sequence[DeadLetter], endpoint: str, as_json: bool) -> int:
    from penstock.collector import OtlpExporterSettings, make_otlp_exporter, replay

    exporter = make_otlp_exporter(OtlpExporterSettings(http_endpoint=endpoint))
    done = asyncio.run(replay(letters, store, exporter))
    taken = sum(one.is_taken for one in done)
    if as_json:
        told = [
            {"path": one.letter.path, "taken": one.is_taken, "reason": one.outcome.reason} for one in done
        ]
        print_json({"letters": len(letters), "taken": taken, "sent": told})
    else:
        for one in done:
            if not one.is_taken:
                click.echo(f"{one.letter.path}: {one.outcome.reason}", err=True)
        click.echo(f"{taken} of {len(letters)} were taken")
    return ExitCode.OK if taken == len(letters) else ExitCode.PROBLEM
