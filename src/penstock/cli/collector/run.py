"""`penstock collector run`: OTLP in, kept on this machine, and out to every destination."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final

import click

from penstock.cli.display import print_json
from penstock.cli.failure import ExitCode
from penstock.errors import Unsupported

if TYPE_CHECKING:
    from penstock.collector import Collector, Plan

__all__ = ["run"]

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
    try:
        from penstock.collector import load_plan
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        raise Unsupported(
            f"the collector needs the package {package}: pip install 'penstock[collector]'"
        ) from error
    plan = load_plan(file, {**os.environ, **variables})
    if check:
        return _tell_check(plan, as_json)
    logging.basicConfig(
        level=level.upper(), format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr
    )
    if core_id is None and plan.cores > 1:
        from penstock.cli.collector.crew import run_cores

        again = ["collector", "run", file, "--log", level, *(["--json"] if as_json else [])]
        for name, value in variables.items():
            again += ["--set", f"{name}={value}"]
        return run_cores(plan, again)
    return _run(plan, core_id or 0, as_json)


def _tell_check(plan: Plan, as_json: bool) -> int:
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
            _tell_ready(collector, core_id, as_json)
            await stop.wait()
            _LOG.info("stopping: no more requests are taken, what is kept is delivered as far as possible")
            hurrying = asyncio.create_task(_hurry(collector, stop))
            await collector.stop()
            hurrying.cancel()
        _tell(as_json, {"event": "stopped", "core": core_id}, "stopped")

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


def _tell_ready(collector: Collector, core_id: int, as_json: bool) -> None:
    for name, addresses in collector.addresses.items():
        for address in addresses:
            _LOG.info("%s listens on %s", name, address)
    where = {name: [str(address) for address in found] for name, found in collector.addresses.items()}
    _tell(as_json, {"event": "ready", "core": core_id, "pid": os.getpid(), "addresses": where}, "ready")


def _tell(as_json: bool, event: Mapping[str, object], words: str) -> None:
    if as_json:
        click.echo(json.dumps(event))
        sys.stdout.flush()
    else:
        _LOG.info("%s", words)
