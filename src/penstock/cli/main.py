"""The entry point: finds the command, and reports every error as one line and an exit code."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping, Sequence

import click

from penstock import __version__, errors
from penstock.cli.failure import EXIT_CODES_HELP, EXIT_CODES_HINT, ExitCode, exit_code, report

_STORES = (
    "STORE is a directory, file:///…, s3://bucket/folder, az://… or gs://…; --config may name it instead. "
)


class LazyGroup(click.Group):
    """A group whose commands are imported on first use.

    Each command has a location below `penstock.cli` (`module:attribute`) and a line of help.
    """

    def __init__(
        self,
        name: str,
        *,
        help: str,
        lazy: Mapping[str, tuple[str, str]],
        epilog: str = EXIT_CODES_HINT,
        context_settings: dict[str, object] | None = None,
    ) -> None:
        super().__init__(name, help=help, epilog=epilog, context_settings=context_settings)
        self._lazy = dict(lazy)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the commands in their declared order."""
        return list(self._lazy)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the command."""
        if cmd_name not in self._lazy:
            return None
        module, _, attribute = self._lazy[cmd_name][0].partition(":")
        command = getattr(importlib.import_module(f"penstock.cli.{module}"), attribute)
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find a command; for an unknown one, suggest the closest name."""
        if args and not args[0].startswith("-") and args[0] not in self._lazy:
            from penstock.config import closest  # loads msgspec, which `--help` must not

            nearest = closest(args[0], self._lazy)
            hint = f" Did you mean {nearest!r}?" if nearest else ""
            ctx.fail(f"No such command {args[0]!r}.{hint}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands in `--help` without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in self._lazy.items()])


_GROUPS: Mapping[str, LazyGroup] = {
    group.name or "": group
    for group in (
        LazyGroup(
            "buffer",
            help="Produce to a queue in object storage; inspect, check and clean it.",
            epilog=_STORES + EXIT_CODES_HINT,
            lazy={
                "produce": ("buffer.produce:produce", "Store the lines of a file or of standard input."),
                "tail": ("buffer.inspect:tail", "Print records, without consuming them."),
                "stat": ("buffer.inspect:stat", "Show the length of the queue and its lag."),
                "dump": ("buffer.inspect:dump", "Print a manifest or a batch as JSON."),
                "fsck": ("buffer.maintain:fsck", "Check a queue against its rules; changes nothing."),
                "gc": ("buffer.maintain:gc", "Delete batches that are no longer referenced."),
            },
        ),
        LazyGroup(
            "topics",
            help="Run an event-log server, use one, and maintain its data.",
            lazy={
                "serve": ("topics.data:serve", "Serve topics over HTTP."),
                "put": ("topics.manage:put", "Create a topic, or change its configuration."),
                "write": ("topics.write:write", "Append the lines of a file or of standard input."),
                "diff": ("topics.read:diff", "Print the records after a sequence; follow new ones."),
                "watch": ("topics.read:watch", "Print records as they are written."),
                "delete": ("topics.manage:delete", "Permanently delete records, or a whole topic."),
                "claim": ("topics.jobs:claim", "Claim jobs of a queue."),
                "ack": ("topics.jobs:ack", "Delete finished jobs."),
                "nack": ("topics.jobs:nack", "Return jobs to the queue."),
                "extend": ("topics.jobs:extend", "Extend the leases of jobs."),
                "work": ("topics.workers:work", "Run a command for every job of a queue."),
                "relay": ("topics.relay:relay", "Move a topic into a queue, each record once."),
                "router": ("topics.routers:router", "Copy the records of one topic into another."),
                "ls": ("topics.manage:ls", "List topics."),
                "stat": ("topics.manage:stat", "Show the state of a topic, or of the server."),
                "verify": ("topics.data:verify", "Check every checksum of a data directory."),
                "backup": ("topics.data:backup", "Copy a data directory, even while it is served."),
                "restore": ("topics.data:restore", "Restore a backup as a data directory."),
            },
        ),
        LazyGroup(
            "collector",
            help="Receive telemetry over OTLP, buffer it on disk, and export it to every destination.",
            lazy={
                "run": ("collector:run", "Run the collector of a file."),
                "dead-letters": (
                    "collector:dead_letters",
                    "List requests that destinations rejected permanently.",
                ),
            },
        ),
        LazyGroup(
            "quiver",
            help="Inspect and maintain a telemetry buffer on disk.",
            lazy={
                "inspect": ("quiver:inspect", "List segments, or show the contents of one."),
                "export": ("quiver:export", "Write segments as Parquet files."),
                "acks": ("quiver:acks", "Print the acks of subscribers, oldest first."),
                "subscribers": ("quiver:subscribers", "List subscribers and their progress; drop one."),
                "fsck": ("quiver:fsck", "Check every checksum; quarantine damaged files."),
            },
        ),
        LazyGroup(
            "timeseries",
            help="Run a time series database with PromQL over object storage.",
            lazy={"serve": ("databases:timeseries_serve", "Serve time series over Prometheus' HTTP API.")},
        ),
        LazyGroup(
            "vector",
            help="Run a vector database over object storage.",
            lazy={"serve": ("databases:vector_serve", "Serve a collection over HTTP.")},
        ),
    )
}


class _ReaderGone(Exception):
    """The reader of the output has closed the pipe, as in `penstock … | head`."""


class _Root(LazyGroup):
    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return _GROUPS.get(cmd_name) or super().get_command(ctx, cmd_name)

    def invoke(self, ctx: click.Context) -> object:
        """Convert a broken pipe, which click would report as a failure."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError as error:
            raise _ReaderGone from error


def _print_version(ctx: click.Context, option: click.Parameter, wanted: bool) -> None:
    if wanted and not ctx.resilient_parsing:
        click.echo(f"penstock {__version__}")
        ctx.exit()


cli = _Root(
    "penstock",
    help="Durable ingestion through object storage and Spark, without a broker.",
    epilog=EXIT_CODES_HELP,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    lazy={
        "up": ("up:up", "Run every part on this machine, with one file or none."),
        "init": ("starting_file:init", "Write a file for `penstock up` to start from."),
        "demo": ("demo.command:demo", "Run the whole path here, kill processes, and check the totals."),
        "run": ("run.command:run", "Run a pipeline: from a queue, through Spark, into tables."),
        "audit": ("pipelines:audit", "Check that a pipeline accounts for every record."),
        "redrive": ("pipelines:redrive", "Put the dead letters of a pipeline back into its queue."),
        "compact": ("pipelines:compact", "Rewrite the small files of a pipeline's tables."),
        **{name: ("", group.help or "") for name, group in _GROUPS.items()},
        "doctor": ("doctor:doctor", "Check this machine and a store; give advice."),
    },
)
cli.params.append(
    click.Option(
        ["--version"],
        is_flag=True,
        expose_value=False,
        is_eager=True,
        callback=_print_version,
        help="Show the version and exit.",
    )
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run `penstock` and exit with its code."""
    sys.exit(_run(arguments))


def _run(arguments: Sequence[str] | None) -> int:
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        result = cli.main(given, "penstock", standalone_mode=False)
        return result if isinstance(result, int) else ExitCode.OK
    except click.exceptions.Exit as leaving:
        return leaving.exit_code
    except (KeyboardInterrupt, click.Abort):
        click.echo("stopped", err=True)
        return ExitCode.INTERRUPTED
    except click.ClickException as wrong:
        wrong.show()
        return wrong.exit_code
    except errors.PenstockError as error:
        report(error, group=given[0] if given else "")
        return exit_code(error)
    except _ReaderGone:
        # Discard the flush at exit, which would fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.OK


if __name__ == "__main__":
    main()
