from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families
from tests.unit.servers.doubles import http, running

from penstock.servers.topics.metrics import TOPIC_SERIES_MAX
from penstock.topics.config import TopicConfig

GAUGES = {
    "topics_topics",
    "topics_topics_by_class",
    "topics_routers",
    "topics_records_live",
    "topics_bytes_live",
    "topics_topic_head_seq",
    "topics_topic_earliest_seq",
    "topics_topic_records_live",
    "topics_topic_bytes_live",
    "topics_topic_queue_ready",
    "topics_topic_queue_in_flight",
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
    "topics_pressure",
    "topics_delivery_waiting",
    "topics_delivery_deferred",
}
COUNTERS = {"frames", "batches", "fsyncs", "bytes_written", "rotations", "submit_full"}
JSON_KEYS = {
    *("topics", "topics_ephemeral", "topics_memory", "topics_disk", "topics_fsync", "routers"),
    *("records_live", "bytes_live", "queue_topics", "queue_leases_in_flight", "sse_connections"),
    *("watch_sessions", "ready", "replay_progress", "uptime_ms", "wal"),
    *("pressure", "delivery_waiting", "delivery_deferred"),
}
WAL_KEYS = {
    *("fsyncs", "frames", "batches", "bytes_written", "rotations", "queue_depth", "queue_depth_peak"),
    *("submit_full_total", "read_only", "fsync_count", "fsync_micros_total"),
}


async def test_prometheus_reads_every_metric_of_the_contract() -> None:
    async with running() as server, http(server.url) as client:
        await server.engine.put_topic("x", TopicConfig())
        await server.engine.put_topic("q", TopicConfig(type="queue", durable=True))
        await client.post("/v0/topics/x", json={"records": [{"data": 12}]})
        for seconds in (0.000_08, 0.000_15):
            server.engine._sync_times.observe(seconds)
        response = await client.get("/v0/metrics")
        assert response.headers["content-type"] == "text/plain; version=0.0.4"
        families = {family.name: family for family in text_string_to_metric_families(response.text)}
    assert families.keys() >= GAUGES
    assert {f"topics_wal_{name}" for name in COUNTERS} <= families.keys()
    assert "topics_uptime_ms" in families
    values = {
        (sample.name, *sample.labels.values()): sample.value
        for family in families.values()
        for sample in family.samples
    }
    assert values["topics_topics_by_class", "fsync"] == 1
    assert values["topics_topic_records_live", "x"] == 1
    assert values["topics_topic_bytes_live", "x"] == 2
    assert values["topics_topic_queue_ready", "q"] == 0
    assert ("topics_topic_queue_ready", "x") not in values
    assert values[("topics_queue_topics",)] == 1
    assert values["topics_wal_fsync_latency_us_bucket", "100"] == 1
    assert values["topics_wal_fsync_latency_us_bucket", "+Inf"] == 2
    assert values[("topics_wal_frames_total",)] == 4


async def test_json_has_every_key_of_the_contract() -> None:
    for is_recovered in (True, False):
        async with running(is_recovered=is_recovered) as server, http(server.url) as client:
            response = await client.get("/v0/metrics", headers={"accept": "text/html, application/json"})
            assert response.headers["content-type"] == "application/json"
            assert response.json().keys() == JSON_KEYS
            assert response.json()["wal"].keys() == WAL_KEYS


async def test_series_of_topics_are_capped() -> None:
    async with running() as server, http(server.url) as client:
        for number in range(TOPIC_SERIES_MAX + 5):
            await server.engine.put_topic(f"t{number}", TopicConfig())
        text = (await client.get("/v0/metrics")).text
    assert text.count("topics_topic_head_seq{") == TOPIC_SERIES_MAX
    assert "topics_topic_metrics_truncated 1\n" in text


async def test_a_key_sees_series_of_its_own_names_only_and_the_totals_of_all() -> None:
    keys = "narrow:read:team-|mine,wide:read"
    async with running(keys) as server, http(server.url, key="narrow") as narrow:
        for name in ("team-a", "mine", "secret"):
            await server.engine.put_topic(name, TopicConfig(type="queue"))
        text = (await narrow.get("/v0/metrics")).text
        values = await narrow.get("/v0/metrics", headers={"accept": "application/json"})
        async with http(server.url, key="wide") as wide:
            assert 'topic="secret"' in (await wide.get("/v0/metrics")).text
    assert 'topics_topic_head_seq{topic="team-a"} 0\n' in text
    assert 'topics_topic_queue_ready{topic="mine"} 0\n' in text
    assert "secret" not in text
    assert "secret" not in values.text
    assert "topics_topics 3\n" in text
    assert values.json()["topics"] == 3


async def test_the_cap_of_series_counts_only_what_a_key_may_see() -> None:
    async with running("k:read:z") as server, http(server.url, key="k") as client:
        for number in range(TOPIC_SERIES_MAX + 5):
            await server.engine.put_topic(f"t{number}", TopicConfig())
        await server.engine.put_topic("z", TopicConfig())
        text = (await client.get("/v0/metrics")).text
    assert 'topics_topic_head_seq{topic="z"} 0\n' in text
    assert "topics_topic_metrics_truncated 0\n" in text


async def test_pressure_shows_in_both_forms() -> None:
    async with running() as server, http(server.url) as client:
        for _ in range(40):
            server.engine.scheduler.sample(late_ms=500.0)
        values = (await client.get("/v0/metrics", headers={"accept": "application/json"})).json()
        text = (await client.get("/v0/metrics")).text
    assert values["pressure"] == 1.0
    assert values["delivery_deferred"] is True
    assert values["delivery_waiting"] == 0
    assert "topics_delivery_deferred 1" in text
    assert "topics_delivery_waiting 0" in text
