"""`penstock init`: the files that it writes, and what `penstock up` runs when there is none."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import click

from penstock.cli.failure import ExitCode
from penstock.config import Setting
from penstock.errors import ConfigError
from penstock.up import DATA_DIR_VARIABLE


@click.command()
@click.argument("directory", type=click.Path(file_okay=False, path_type=Path), default=Path())
@click.option("--force", is_flag=True, help="Replace files that are there.")
def init(directory: Path, force: bool) -> int:
    """Write penstock.yaml and a pipeline, events.yaml, into DIRECTORY (this one unless given).

    Both are commented, and run as they are: `penstock up` there. Nothing that exists is replaced.
    """
    files = {
        directory / "penstock.yaml": starting_text(),
        directory / "events.yaml": pipeline_text(),
    }
    there = [path for path in files if path.exists()]
    if there and not force:
        named = " and ".join(str(path) for path in there)
        raise ConfigError(f"{named}: there already; --force replaces what is there")
    for path, text in files.items():
        _write(path, text)
        click.echo(f"wrote {path}")
    where = "" if directory == Path() else f"cd {directory} && "
    click.echo(f"next: {where}penstock up --check, then {where}penstock up")
    return ExitCode.OK


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from error


DEFAULT_PIPELINE: Final = "pipelines/events.yaml"
"""Below the data directory, when there is no file."""
DIMENSIONS: Final = 384


def default_mapping(data_dir: str) -> dict[str, Setting]:
    """Everything, with every default."""
    return {
        "data_dir": data_dir,
        "collector": {},
        "topics": {},
        "relays": [{"topic": "events", "queue": "events"}],
        "pipelines": [{"file": f"{data_dir}/{DEFAULT_PIPELINE}"}],
        "timeseries": {"queue": "metrics"},
        "vector": {"queue": "vectors", "dimensions": DIMENSIONS, "metric": "cosine"},
        "console": {},
    }


def pipeline_text(data_dir: str | None = None) -> str:
    """The pipeline of the queue `events`; `data_dir` is as seen from the file's directory.

    Without it the file keeps everything where the fleet that runs it has its data.
    """
    head = _HEAD if data_dir is not None else _HEAD + _FOLLOWS
    place = data_dir if data_dir is not None else f"${{{DATA_DIR_VARIABLE}:-penstock-data}}"
    return _PIPELINE.replace("<head>", head).replace("<data>", place)


def starting_text() -> str:
    """A file with every part and every default, most of them as comments."""
    return _TEXT


_TEXT: Final = f"""\
# What `penstock up` runs on this machine. A part runs if its key is here; take out what you do not need.
# Check it: penstock up --check. Every key: docs/reference/up-file.md. Paths are relative to this file.

data_dir: ./penstock-data
# host: 127.0.0.1          # where parts listen; for other machines to come in, give every part keys first
# stop_timeout: 60s        # how long each part may take to stop before it is killed

# Queues are named by the parts below. Unless described here, a queue is in data_dir/queues.
# queues:
#   events: {{store: "s3://bucket/folder"}}

# OTLP over gRPC and HTTP, kept on this disk until it is in the queues metrics, traces and logs.
collector:
  # grpc_port: 4317
  # http_port: 4318
  # tokens: [a-secret]     # senders bring one as `Authorization: Bearer …`
  # file: collector.yaml   # instead of the above: a collector file of your own

# The event-log server.
topics:
  # port: 4000
  # keys: "a-secret:rw"    # or TOPICS_API_KEYS in the environment

# Each topic below is moved into its queue, each record once.
relays:
  - {{topic: events, queue: events}}

# Spark pipelines: from a queue into tables.
pipelines:
  - {{file: events.yaml}}

# Time series with PromQL, fed with the metrics of the collector.
timeseries:
  queue: metrics
  # port: 9090
  # retention: 15d

# Vectors.
vector:
  queue: vectors
  dimensions: {DIMENSIONS}          # of every vector; cannot be changed later
  metric: cosine
  # port: 8080

# The console in the browser, and /health, /ready and /metrics of the whole.
console:
  # port: 4600
  # keys: "a-secret"       # or PENSTOCK_CONSOLE_KEYS in the environment
"""

_HEAD: Final = """\
# Records of the topic `events`, as the relay puts them into the queue, into a Delta table.
# Every key: docs/reference/pipeline.md. Check it: penstock run FILE --check
"""
_FOLLOWS: Final = f"""\
# ${{{DATA_DIR_VARIABLE}}} is the data directory of `penstock up`; for other commands it is penstock-data
# beside this file, unless the environment says otherwise.
"""
_PIPELINE: Final = """\
<head>name: events
source: {buffer: {store: "<data>/queues", manifest_path: events/manifest, data_path_prefix: events}}
decode:
  format: json
  schema: "`$seq` bigint NOT NULL, `$ts` bigint, `$node` string, `$tag` string, data string, meta string"
transform: >
  SELECT `$seq` AS seq, timestamp_millis(`$ts`) AS at, `$node` AS node, `$tag` AS tag, data, meta FROM input
sink: {delta: {path: "<data>/lake/events"}}
trigger: {interval: 2s}
checkpoint: "<data>/checkpoints/events"
"""
