"""`penstock init`: the files that it writes, and the defaults of `penstock up` without a file."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import click

from penstock.cli.failure import ExitCode
from penstock.config import Setting
from penstock.errors import ConfigError
from penstock.up import DATA_DIR_VARIABLE

DEFAULT_PIPELINE: Final = "pipelines/events.yaml"
"""The path below the data directory of the pipeline that runs without a file."""
DIMENSIONS: Final = 384
_HEAD: Final = """\
# Moves records of the topic `events` from the queue, where the relay puts them, into a Delta table.
# Every key: docs/reference/pipeline.md. Check it: penstock run FILE --check
"""
_FOLLOWS: Final = f"""\
# ${{{DATA_DIR_VARIABLE}}} is the data directory of `penstock up`. Other commands use penstock-data next to
# this file, unless the variable is set.
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


@click.command()
@click.argument("directory", type=click.Path(file_okay=False, path_type=Path), default=Path())
@click.option("--force", is_flag=True, help="Replace existing files.")
def init(directory: Path, force: bool) -> int:
    """Write penstock.yaml and a pipeline, events.yaml, into DIRECTORY (by default this directory).

    Both have comments and run unchanged with `penstock up`. Existing files are not replaced.
    """
    files = {
        directory / "penstock.yaml": starting_text(),
        directory / "events.yaml": pipeline_text(),
    }
    existing = [path for path in files if path.exists()]
    if existing and not force:
        named = " and ".join(str(path) for path in existing)
        raise ConfigError(f"{named}: exists already; use --force to replace it")
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


def default_mapping(data_dir: str) -> dict[str, Setting]:
    """Return a file that contains every part with its defaults."""
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
    """Return the pipeline of the queue `events`. `data_dir` is relative to the file's directory.

    Without `data_dir`, the file uses the data directory of the `penstock up` that runs it.
    """
    head = _HEAD if data_dir is not None else _HEAD + _FOLLOWS
    place = data_dir if data_dir is not None else f"${{{DATA_DIR_VARIABLE}:-penstock-data}}"
    return _PIPELINE.replace("<head>", head).replace("<data>", place)


def starting_text() -> str:
    """Return a file with all parts and defaults, most of them as comments."""
    return _TEXT


_TEXT: Final = f"""\
# The parts that `penstock up` runs on this machine. A part runs if its key is here.
# Check it: penstock up --check. Every key: docs/reference/up-file.md. Paths are relative to this file.

data_dir: ./penstock-data
# host: 127.0.0.1          # where parts listen; set keys for every part before you let other machines connect
# stop_timeout: 60s        # how long a part may take to stop before it is killed

# The parts below name their queues. A queue that is not listed here is in data_dir/queues.
# queues:
#   events: {{store: "s3://bucket/folder"}}

# OTLP over gRPC and HTTP, buffered on disk until it is in the queues metrics, traces and logs.
collector:
  # grpc_port: 4317
  # http_port: 4318
  # tokens: [a-secret]     # senders send one as `Authorization: Bearer …`
  # file: collector.yaml   # instead of the above: your own collector file

# The event-log server.
topics:
  # port: 4000
  # keys: "a-secret:rw"    # or TOPICS_API_KEYS in the environment

# Each topic below is moved into its queue, every record once.
relays:
  - {{topic: events, queue: events}}

# Spark pipelines, each from a queue into tables.
pipelines:
  - {{file: events.yaml}}

# Time series with PromQL, fed with the collector's metrics.
timeseries:
  queue: metrics
  # port: 9090
  # retention: 15d

# A vector database.
vector:
  queue: vectors
  dimensions: {DIMENSIONS}          # of every vector; cannot be changed later
  metric: cosine
  # port: 8080

# The web console, and /health, /ready and /metrics of all parts together.
console:
  # port: 4600
  # keys: "a-secret"       # or PENSTOCK_CONSOLE_KEYS in the environment
"""
