"""§10.2 and §10.3: probes and metrics."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.contract.raw_http import connect, request_bytes
from tests.contract.topics_server import Api, serving

GAUGES = [
    "topics_topics",
    "topics_routers",
    "topics_records_live",
    "topics_bytes_live",
    "topics_topic_metrics_truncated",
    "topics_queue_topics",
    "topics_queue_leases_in_flight",
    "topics_sse_connections",
    "topics_watch_sessions",
    "topics_ready",
    "topics_recovery_progress",
    "topics_wal_queue_depth",
    "topics_wal_queue_depth_peak",
    "topics_wal_read_only",
]
PER_TOPIC = [
    "topics_topic_head_seq",
    "topics_topic_earliest_seq",
    "topics_topic_records_live",
    "topics_topic_bytes_live",
    "topics_topic_queue_ready",
    "topics_topic_queue_in_flight",
]
COUNTERS = [
    "topics_uptime_ms",
    "topics_wal_frames_total",
    "topics_wal_batches_total",
    "topics_wal_fsyncs_total",
    "topics_wal_bytes_written_total",
    "topics_wal_rotations_total",
    "topics_wal_submit_full_total",
]
BUCKETS = ["50", "100", "250", "500", "1000", "5000", "10000", "50000", "100000", "+Inf"]


def scrape(api: Api) -> tuple[dict[str, float], dict[str, str]]:
    """Return every sample by name and labels, and the type of every family."""
    response = api.client.get("/v0/metrics")
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/plain; version=0.0.4"
    types = dict(re.findall(r"^# TYPE (\S+) (\S+)$", response.text, re.MULTILINE))
    lines = [line for line in response.text.splitlines() if line and not line.startswith("#")]
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}, types


@pytest.mark.parametrize("path", ["/v0/health", "/healthz"])
def test_health_reports_that_the_process_runs(api: Api, path: str) -> None:
    body = api.ask("GET", path)
    assert body.keys() == {"status", "version", "uptime_ms"}
    assert body["status"] == "ok"
    assert re.fullmatch(r"\d+\.\d+\.\d+\S*", body["version"])
    assert isinstance(body["uptime_ms"], int)
    assert api.ask("GET", path)["uptime_ms"] >= body["uptime_ms"]


@pytest.mark.parametrize("path", ["/v0/ready", "/readyz"])
def test_ready_reports_that_the_log_is_replayed(api: Api, topic: str, path: str) -> None:
    before = api.ask("GET", path)
    assert before.keys() == {"status", "wal_replay_complete", "topics"}
    assert (before["status"], before["wal_replay_complete"]) == ("ready", True)
    api.put(topic)
    assert api.ask("GET", path)["topics"] == before["topics"] + 1


def test_metrics_have_every_name_of_the_contract(api: Api, topic: str) -> None:
    api.put(topic, type="queue", durability="fsync")
    api.write(topic, 1, "xx")
    samples, types = scrape(api)
    for name in GAUGES:
        assert name in samples
        assert types[name] == "gauge"
    for name in COUNTERS:
        assert name in samples
        assert types[name] == "counter"
    for name in PER_TOPIC:
        assert types[name] == "gauge"
    assert samples["topics_ready"] == samples["topics_recovery_progress"] == 1
    assert samples["topics_wal_read_only"] == 0
    for durability in ("ephemeral", "memory", "disk", "fsync"):
        assert f'topics_topics_by_class{{class="{durability}"}}' in samples
    assert samples["topics_queue_topics"] >= 1
    assert samples["topics_wal_fsyncs_total"] > 0
    assert samples["topics_wal_frames_total"] > 0


def test_the_topics_add_up_over_their_classes(api: Api, topic: str) -> None:
    for durability in ("ephemeral", "memory", "disk", "fsync"):
        api.put(f"{topic}.{durability}", durability=durability)
    samples, _ = scrape(api)
    classes = [value for name, value in samples.items() if name.startswith("topics_topics_by_class{")]
    assert len(classes) == 4
    assert sum(classes) == samples["topics_topics"]


def test_a_topic_has_its_own_series(api: Api) -> None:
    # Names are sorted and the number of series is limited: this name comes first.
    topic = "0-first"
    api.remove(topic)
    api.put(topic, cap_records=2)
    api.write(topic, 1, "xx", "yyy")
    samples, _ = scrape(api)
    label = f'{{topic="{topic}"}}'
    assert samples["topics_topic_head_seq" + label] == 3
    assert samples["topics_topic_earliest_seq" + label] == 2
    assert samples["topics_topic_records_live" + label] == 2
    assert samples["topics_topic_bytes_live" + label] == 9
    assert "topics_topic_queue_ready" + label not in samples, "only queues have that"
    api.remove(topic)
    assert "topics_topic_head_seq" + label not in scrape(api)[0]


def test_the_sync_latency_is_a_histogram_with_the_buckets_of_the_contract(api: Api, topic: str) -> None:
    api.write(topic, 1, config={"durability": "fsync"})
    samples, types = scrape(api)
    name = "topics_wal_fsync_latency_us"
    assert types[name] == "histogram"
    counts = [samples[f'{name}_bucket{{le="{bound}"}}'] for bound in BUCKETS]
    assert counts == sorted(counts)
    assert counts[-1] == samples[f"{name}_count"] > 0
    assert samples[f"{name}_sum"] > 0


def test_metrics_as_json_have_every_name_of_the_contract(api: Api, topic: str) -> None:
    api.write(topic, 1, config={"durability": "fsync"})
    for accept in ("application/json", "text/html, application/json;q=0.9"):
        body = api.ask("GET", "/v0/metrics", headers={"Accept": accept})
        assert body.keys() == {
            "pressure",
            "delivery_waiting",
            "delivery_deferred",
            "topics",
            "topics_ephemeral",
            "topics_memory",
            "topics_disk",
            "topics_fsync",
            "routers",
            "records_live",
            "bytes_live",
            "queue_topics",
            "queue_leases_in_flight",
            "sse_connections",
            "watch_sessions",
            "ready",
            "replay_progress",
            "uptime_ms",
            "wal",
        }
        assert body["wal"].keys() == {
            "fsyncs",
            "frames",
            "batches",
            "bytes_written",
            "rotations",
            "queue_depth",
            "queue_depth_peak",
            "submit_full_total",
            "read_only",
            "fsync_count",
            "fsync_micros_total",
        }
        assert body["wal"]["fsync_count"] > 0
        assert (body["ready"], body["replay_progress"]) == (True, 1.0)


def test_a_write_is_counted(api: Api, topic: str) -> None:
    def numbers() -> tuple[int, int, int]:
        body = api.ask("GET", "/v0/metrics", headers={"Accept": "application/json"})
        return body["records_live"], body["bytes_live"], body["wal"]["frames"]

    api.put(topic)
    before = numbers()
    api.write(topic, "xx", "yy")
    after = numbers()
    assert (after[0] - before[0], after[1] - before[1]) == (2, 8)
    assert after[2] - before[2] >= 2


def test_only_a_thousand_topics_have_their_own_series(tmp_path: Path) -> None:
    total, headers = 1001, {"Content-Type": "application/json"}
    with serving(tmp_path / "data") as server:
        with connect(server) as raw:
            for start in range(0, total, 20):
                names = [f"t{number:04}" for number in range(start, min(start + 20, total))]
                body = b'{"type":"queue","durability":"memory"}'
                raw.send(
                    b"".join(request_bytes("PUT", f"/v0/topics/{name}", body, headers) for name in names)
                )
                assert {raw.reply().status for _ in names} == {201}
        api = server.api()
        samples, _ = scrape(api)
        assert samples["topics_topic_metrics_truncated"] == 1
        for name in PER_TOPIC:
            assert len([one for one in samples if one.startswith(name + "{")]) == 1000
        assert samples["topics_topics"] == samples["topics_queue_topics"] == total
        api.remove("t0000")
        assert scrape(api)[0]["topics_topic_metrics_truncated"] == 0
