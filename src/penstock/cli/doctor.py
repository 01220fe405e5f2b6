"""`penstock doctor`: is this machine, and is this store, fit for it? Every line says what to do."""

from __future__ import annotations

import asyncio
import os

import click

from penstock.cli.display import print_json
from penstock.cli.failure import ExitCode
from penstock.cli.health import Check, Status
from penstock.cli.machine import check_machine

__all__ = ["doctor"]

_COLOURS = {Status.OK: "green", Status.WARN: "yellow", Status.FAIL: "red"}


@click.command()
@click.argument("store", required=False)
@click.option("--prefix", metavar="PATH", help="Where probes are written [default: ingest].")
@click.option("--config", type=click.Path(dir_okay=False), metavar="FILE.yaml", help="Settings of the queue.")
@click.option("--store-option", "store_options", multiple=True, metavar="NAME=VALUE", help="As for buffer.")
@click.option("--json", "as_json", is_flag=True, help="Machine-readable output.")
def doctor(
    store: str | None, prefix: str | None, config: str | None, store_options: tuple[str, ...], as_json: bool
) -> int:
    """Check Python, packages, Java and, if given, the STORE: reachable, conditional writes, room, clock.

    A store is tried with small objects of its own below the prefix, which are removed again. Exits with 1
    if anything fails.
    """
    checks = check_machine()
    asked = store is not None or config is not None or "PENSTOCK_BUFFER__STORE" in os.environ
    if asked:
        from penstock.buffer import ConsumerConfig
        from penstock.cli.buffer.target import Target
        from penstock.cli.store_health import check_store

        target = Target.of(store, config=config, prefix=prefix, store_options=store_options)
        checks += asyncio.run(check_store(target.build(ConsumerConfig)))
    failed = sum(check.status is Status.FAIL for check in checks)
    if as_json:
        print_json({"ok": not failed, "checks": [check.to_json() for check in checks]})
    else:
        _print(checks, asked_store=asked)
    return ExitCode.PROBLEM if failed else ExitCode.OK


def _print(checks: list[Check], *, asked_store: bool) -> None:
    width = max(len(check.name) for check in checks)
    for check in checks:
        label = click.style(f"{check.status.value:<4}", fg=_COLOURS[check.status])
        click.echo(f"{label}  {check.name:<{width}}  {check.text}")
        if check.advice:
            click.echo(f"{'':4}  {'':<{width}}  -> {check.advice}")
    if not asked_store:
        click.echo("No store was checked: give its address, `penstock doctor STORE`.")
