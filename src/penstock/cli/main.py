"""The entry point: picks the verb, and turns every error into one line and an exit code."""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from collections.abc import Mapping, Sequence

import click

from penstock import __version__, errors
from penstock.cli.failure import EXIT_CODES_HELP, ExitCode, exit_code, report


class LazyGroup(click.Group):
    """Commands by name: where each is (`module:attribute`) and the line of help that lists it."""

    def __init__(
        self,
        name: str | None = None,
        *,
        lazy: Mapping[str, tuple[str, str]] | None = None,
        help: str | None = None,
        epilog: str | None = None,
        context_settings: dict[str, object] | None = None,
    ) -> None:
        super().__init__(name, help=help, epilog=epilog, context_settings=context_settings)
        self._lazy = dict(lazy or {})

    def list_commands(self, ctx: click.Context) -> list[str]:
        """In the order in which they were given: the order in which people need them."""
        return list(self._lazy)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the command."""
        if cmd_name not in self._lazy:
            return None
        module, _, attribute = self._lazy[cmd_name][0].partition(":")
        command = getattr(importlib.import_module(module), attribute)
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """As click does, with the nearest command named for one that does not exist."""
        if args and not args[0].startswith("-") and args[0] not in self._lazy:
            nearest = difflib.get_close_matches(args[0], list(self._lazy), n=1)
            hint = f" Did you mean {nearest[0]!r}?" if nearest else ""
            ctx.fail(f"No such command {args[0]!r}.{hint}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The list in `--help`, without importing anything."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in self._lazy.items()])


_BUFFER = LazyGroup(
    "buffer",
    help="Produce to a queue in object storage, look into it, check it and clean it.",
    epilog="STORE is a directory, file:///…, s3://bucket/folder, az://… or gs://…; with --config it may be "
    "left out. `penstock --help` lists the exit codes.",
    lazy={
        "produce": ("penstock.cli.buffer.produce:produce", "Store lines of a file or of standard input."),
        "tail": ("penstock.cli.buffer.inspect:tail", "Print records, without consuming them."),
        "stat": ("penstock.cli.buffer.inspect:stat", "Show how long the queue is and how far behind."),
        "dump": ("penstock.cli.buffer.inspect:dump", "Print a manifest or a batch as JSON."),
        "fsck": ("penstock.cli.buffer.maintain:fsck", "Check a queue against its rules; changes nothing."),
        "gc": ("penstock.cli.buffer.maintain:gc", "Delete batches that nothing refers to any more."),
    },
)

_TOPICS = LazyGroup(
    "topics",
    help="Run the event-log server, use one, and look after its data.",
    epilog="`penstock --help` lists the exit codes.",
    lazy={
        "serve": ("penstock.cli.topics.data:serve", "Serve topics over HTTP."),
        "put": ("penstock.cli.topics.manage:put", "Create a topic, or change how it keeps its records."),
        "write": ("penstock.cli.topics.write:write", "Append lines of a file or of standard input."),
        "diff": ("penstock.cli.topics.read:diff", "Print records behind a sequence; follow new ones."),
        "watch": ("penstock.cli.topics.read:watch", "Print records as they are written."),
        "delete": ("penstock.cli.topics.manage:delete", "Delete records for good, or a whole topic."),
        "claim": ("penstock.cli.topics.jobs:claim", "Take jobs of a queue."),
        "ack": ("penstock.cli.topics.jobs:ack", "Delete jobs that are done."),
        "nack": ("penstock.cli.topics.jobs:nack", "Give jobs back."),
        "extend": ("penstock.cli.topics.jobs:extend", "Hold jobs longer."),
        "work": ("penstock.cli.topics.workers:work", "Run a command for every job of a queue."),
        "relay": ("penstock.cli.topics.relay:relay", "Move a topic into a queue, each record once."),
        "router": ("penstock.cli.topics.routers:router", "Copy what is written to a topic into another one."),
        "ls": ("penstock.cli.topics.manage:ls", "List topics."),
        "stat": ("penstock.cli.topics.manage:stat", "Show one topic, or how the server is."),
        "verify": ("penstock.cli.topics.data:verify", "Check every checksum of a data directory."),
        "backup": ("penstock.cli.topics.data:backup", "Copy a data directory, also while it is served."),
        "restore": ("penstock.cli.topics.data:restore", "Put a backup in place as a data directory."),
    },
)
_QUIVER = LazyGroup(
    "quiver",
    help="Look into a data directory of Quiver, and look after it.",
    epilog="`penstock --help` lists the exit codes.",
    lazy={
        "inspect": ("penstock.cli.quiver:inspect", "List segments, or show what one holds."),
        "export": ("penstock.cli.quiver:export", "Write segments as Parquet files."),
        "acks": ("penstock.cli.quiver:acks", "Print what subscribers said, oldest first."),
        "subscribers": (
            "penstock.cli.quiver:subscribers",
            "List subscribers and how far they are; drop one.",
        ),
        "fsck": ("penstock.cli.quiver:fsck", "Check every checksum; set aside what is damaged."),
    },
)
_COLLECTOR = LazyGroup(
    "collector",
    help="Take telemetry in over OTLP, keep it safe, and bring it to every destination.",
    epilog="`penstock --help` lists the exit codes.",
    lazy={
        "run": ("penstock.cli.collector:run", "Run the collector of a file."),
        "dead-letters": (
            "penstock.cli.collector:dead_letters",
            "List what destinations refused for good.",
        ),
    },
)
_TIMESERIES = LazyGroup(
    "timeseries",
    help="Run a database of time series over object storage.",
    epilog="`penstock --help` lists the exit codes.",
    lazy={
        "serve": ("penstock.cli.databases:timeseries_serve", "Serve time series over Prometheus' HTTP API."),
    },
)
_VECTOR = LazyGroup(
    "vector",
    help="Run a vector database over object storage.",
    epilog="`penstock --help` lists the exit codes.",
    lazy={
        "serve": ("penstock.cli.databases:vector_serve", "Serve a collection over HTTP, and feed it."),
    },
)
_GROUPS = {
    "buffer": _BUFFER,
    "collector": _COLLECTOR,
    "quiver": _QUIVER,
    "timeseries": _TIMESERIES,
    "topics": _TOPICS,
    "vector": _VECTOR,
}


class _ReaderGone(Exception):
    """The reader of the output has closed it, as in `penstock … | head`."""


class _Root(LazyGroup):
    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return _GROUPS.get(cmd_name) or super().get_command(ctx, cmd_name)

    def invoke(self, ctx: click.Context) -> object:
        """Keep a broken pipe from click, which would report it as a failure."""
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
        "up": ("penstock.cli.up:up", "Run every part of this machine, with one file or none."),
        "init": ("penstock.cli.starting_file:init", "Write a file for `penstock up` to start from."),
        "demo": (
            "penstock.cli.demo.command:demo",
            "Run the whole path here, with kills; totals must balance.",
        ),
        "run": ("penstock.cli.run.command:run", "Run a pipeline: from a queue, through Spark, into tables."),
        "audit": (
            "penstock.cli.pipelines:audit",
            "Close the books of a pipeline: is every record accounted for?",
        ),
        "redrive": ("penstock.cli.pipelines:redrive", "Put a pipeline's bad records back into its queue."),
        "compact": ("penstock.cli.pipelines:compact", "Join the small files of a pipeline's tables."),
        "buffer": ("", "Produce to a queue, look into it, check it, clean it."),
        "topics": ("", "Run an event-log server, use one, look after its data."),
        "collector": ("", "Take telemetry in over OTLP, keep it, bring it to every destination."),
        "quiver": ("", "Look into a telemetry buffer on disk, look after it."),
        "timeseries": ("", "Run a database of time series that answers PromQL."),
        "vector": ("", "Run a vector database over object storage."),
        "doctor": ("penstock.cli.doctor:doctor", "Check this machine and a store; say what to do."),
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
        # Nothing more can be said; the flush at exit must stay silent too.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.OK


if __name__ == "__main__":
    main()
