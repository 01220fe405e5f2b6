"""Each panel over real parts shows the actual state."""

from __future__ import annotations

import time
from typing import Any

import httpx
import pytest
from tests.contract.console.conftest import StageProcess, eventually


def get(console: httpx.Client, path: str, **query: str) -> Any:
    answer = console.get(path, params=query)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_the_overview_draws_the_flow(console: httpx.Client) -> None:
    found = get(console, "overview")
    states = {part["name"]: part["state"] for part in found["parts"]}
    assert states["topics"] == "ready"
    assert states["collector"] == "disabled"
    nodes = {node["id"]: node for node in found["flow"]["nodes"]}
    assert {"clients", "topics", "queue:events", "pipeline:events", "database:vector"} <= nodes.keys()
    edges = {(edge["from"], edge["to"]): edge for edge in found["flow"]["edges"]}
    relay = edges["topics", "queue:events"]
    assert (relay["known"], relay["part"]) == (True, "relay-events")
    assert edges["queue:events", "pipeline:events"]["backlog_unit"] == "batches"
    assert ("pipeline:events", "sink:events/lake") in edges


def test_the_balance_comes_from_the_audit(console: httpx.Client) -> None:
    def is_balanced() -> bool:
        (chain,) = get(console, "overview")["balance"]
        if chain["produced"] is None:
            return False
        parts = ("delivered", "dead_lettered", "dropped", "skipped", "in_flight")
        assert chain["produced"] == sum(chain[part] for part in parts) >= 120
        assert (chain["balances"], chain["source"]) == (True, "durable ledgers")
        return True

    eventually(is_balanced)


def test_a_queue_shows_its_entries_and_unreferenced_objects(console: httpx.Client) -> None:
    rows = {row["name"]: row for row in get(console, "buffers")}
    assert rows.keys() == {"events", "metrics", "vectors"}
    assert (rows["events"]["writers"], rows["events"]["readers"]) == (["relay-events"], ["pipeline-events"])
    found = get(console, "buffers/events")
    assert found["next_sequence"] - found["first_sequence"] == found["depth_batches"] == len(found["entries"])
    newest = found["entries"][0]
    assert newest["sequence"] == found["next_sequence"] - 1
    assert newest["producer"] == "relay:events"
    assert newest["records"] > 0
    assert newest["bytes"] > 0
    assert newest["metadata"][0]["text"].startswith('{"topic":"events"')
    assert found["depth_records"] == sum(entry["records"] for entry in found["entries"])
    assert found["epochs"][-1]["epoch"] == found["epoch"] >= 1
    assert found["gc"]["shards"][0]["data_objects"] >= found["depth_batches"]
    assert found["conflicts"]["unknown"] == ["relay-events", "pipeline-events"]
    assert found["history"]


def test_topics_are_listed_page_by_page(console: httpx.Client) -> None:
    names: list[str] = []
    query = {"limit": "2"}
    for _ in range(10):
        page = get(console, "topics", **query)
        assert len(page["topics"]) <= 2
        names += [topic["name"] for topic in page["topics"]]
        if page["next"] is None:
            break
        query["after"] = page["next"]
    assert names == sorted(names)
    assert {"capped", "events", "gappy", "jobs"} <= set(names)
    jobs = next(t for t in get(console, "topics", prefix="jobs")["topics"] if t["name"] == "jobs")
    assert (jobs["queue"], jobs["class"]) == (True, "disk")
    capped = get(console, "topics", prefix="capped")["topics"][0]
    assert capped["retention"]["cap_records"] == 5


def test_a_topic_s_line_shows_evicted_deleted_and_live_ranges(console: httpx.Client) -> None:
    capped = get(console, "topics/capped")["line"]
    assert [(one["from"], one["to"], one["kind"]) for one in capped] == [(1, 7, "evicted"), (8, 12, "live")]
    gappy = get(console, "topics/gappy")["line"]
    assert [(one["from"], one["to"], one["kind"]) for one in gappy] == [
        (1, 3, "deleted"),
        (4, 20, "live"),
        (21, 24, "deleted"),
        (25, 30, "live"),
    ]


def test_a_queue_topic_shows_leases_and_dead_letters(console: httpx.Client) -> None:
    queue = get(console, "topics/jobs")["queue"]
    assert (queue["in_flight"], queue["dead_lettered"], queue["dead_letter"]) == (2, 1, "jobs-dead")
    assert "<script>" in queue["letters"][0]["text"]


def test_routers_are_a_graph(console: httpx.Client) -> None:
    found = get(console, "routers")
    (edge,) = found["edges"]
    assert (edge["from"], edge["to"]) == ("events", "odd-events")
    assert (edge["behind"], edge["state"]) == (None, None), "the topics API does not tell"
    assert {node["id"] for node in found["nodes"]} == {"events", "odd-events"}


def test_quiver_shows_marks_and_gaps(console: httpx.Client) -> None:
    (row,) = get(console, "quivers")
    assert (row["name"], row["segment_count"]) == ("telemetry", 5)
    found = get(console, "quivers/telemetry")
    archive, lake = found["subscribers"]
    assert (archive["high_water"], archive["gaps"], archive["complete"]) == (2, [[3, 3]], [[4, 4]])
    assert (lake["high_water"], lake["backlog"]) == (1, 5)
    states = [segment["state"] for segment in found["segments"]]
    assert states == ["partly", "pending", "partly", "pending", "pending"], "the first is delivered and gone"
    assert found["budget"]["disk_bytes"] > 0


def test_a_pipeline_shows_its_micro_batches(console: httpx.Client) -> None:
    (row,) = get(console, "pipelines")
    assert (row["name"], row["queue"], row["error"]) == ("events", "events", None)
    found = get(console, "pipelines/events")
    first, second = found["batches"][:2]
    assert (first["id"], first["from"], first["to"]) == (0, {"0": 0}, {"0": 2})
    assert (second["records_in"], second["dead_letters"], second["rows"]) == (40, 4, {"lake": 36})
    assert second["duration_ms"] > 0
    assert second["rows_per_s"] == pytest.approx(40_000 / second["duration_ms"], abs=0.001)
    assert found["checkpoint"]["done"] >= 1
    assert {sink["name"] for sink in found["sinks"]} == {"lake", "dead letters"}


def test_dead_letters_come_with_their_bytes(console: httpx.Client) -> None:
    page = get(console, "pipelines/events/dead-letters", limit="3")
    assert [letter["position"] for letter in page["letters"]] == ["0:0:7", "0:0:17", "0:1:7"]
    assert page["total"] >= 8
    assert page["letters"][0]["reason"] == "n: expected a number"
    assert "<script>" in page["letters"][0]["text"]
    rest = get(console, "pipelines/events/dead-letters", after=page["next"])
    assert rest["letters"][0]["position"] == "0:1:17"


def test_databases_show_watermarks_and_their_feed(console: httpx.Client) -> None:
    def is_durable() -> bool:
        rows = {row["name"]: row for row in get(console, "databases")}
        series = rows["timeseries"]
        assert series["kind"] == "timeseries"
        marks = series["watermarks"]
        assert marks["applied"] >= marks["flushed"] >= marks["durable"]
        return bool(marks["durable"] >= 1 and series["feed"]["sequence"] == 2)

    eventually(is_durable)


def test_a_promql_query_is_answered_by_the_database(console: httpx.Client) -> None:
    now = time.time()
    asked = {"query": "stage_load", "start": now - 60, "end": now, "step": 5}
    answer = console.post("databases/timeseries/query", json=asked)
    assert answer.status_code == 200
    found = answer.json()
    assert found["status"] == "success"
    assert found["data"]["resultType"] == "matrix"
    wrong = console.post("databases/timeseries/query", json={"query": "rate("})
    assert (wrong.status_code, wrong.json()["status"]) == (400, "error")


def test_a_vector_search_is_answered_by_the_database(console: httpx.Client) -> None:
    def has_hits() -> bool:
        answer = console.post("databases/vector/search", json={"vector": [1, 0, 0], "k": 3})
        assert answer.status_code == 200, answer.text
        return len(answer.json()["results"]) == 3

    eventually(has_hits)
    asked = console.post("databases/timeseries/search", json={"vector": [1, 0, 0]})
    assert asked.status_code == 400


@pytest.mark.parametrize(
    ("query", "stages"),
    [
        (
            {"buffer": "events", "sequence": "0", "index": "1"},
            ["buffer:passed", "batch:here", "microbatch:passed", "table:here"],
        ),
        (
            {"buffer": "events", "sequence": "0", "index": "7"},
            ["buffer:passed", "batch:here", "microbatch:passed", "table:passed", "dead_letter:here"],
        ),
        ({"pipeline": "events", "batch": "1"}, ["microbatch:passed", "table:here"]),
        ({"topic": "capped", "seq": "2"}, ["topic:gone"]),
        ({"topic": "gappy", "seq": "22"}, ["topic:gone"]),
        ({"topic": "gappy", "seq": "99"}, ["topic:unknown"]),
        ({"buffer": "events", "sequence": "99999"}, ["buffer:unknown"]),
        ({"pipeline": "events", "batch": "99999"}, ["microbatch:unknown"]),
        ({"buffer": "metrics", "sequence": "1"}, ["buffer:here", "batch:here", "database:here"]),
    ],
)
def test_a_trace_shows_where_a_record_is(
    console: httpx.Client, query: dict[str, str], stages: list[str]
) -> None:
    found = get(console, "trace", **query)
    assert [f"{step['stage']}:{step['state']}" for step in found["steps"]] == stages
    assert found["found"] is any(not stage.endswith("unknown") for stage in stages)
    assert all(step["text"] for step in found["steps"])


def test_a_trace_by_a_batch_finds_its_sequence(console: httpx.Client) -> None:
    entry = get(console, "buffers/metrics")["entries"][0]
    name = entry["location"].rpartition("/")[2].removesuffix(".batch")
    for ident in (name, entry["location"]):
        steps = get(console, "trace", id=ident)["steps"]
        assert steps[0]["detail"]["sequence"] == entry["sequence"]


def test_a_record_is_traced_from_its_topic_into_the_table(console: httpx.Client, stage: StageProcess) -> None:
    """The relay moves the record, the console sees its batch, and the pipeline delivers it."""
    before = get(console, "topics/events")["head"]
    stage.order("write 20")
    seq = before + 3

    def is_relayed() -> bool:
        steps = get(console, "trace", topic="events", seq=str(seq))["steps"]
        return [step["stage"] for step in steps][:4] == ["topic", "relay", "buffer", "batch"]

    eventually(is_relayed)
    assert get(console, "trace", topic="events", seq=str(seq))["steps"][-1]["state"] == "unknown"
    assert stage.order("deliver")["micro_batches"]
    found = get(console, "trace", topic="events", seq=str(seq))
    assert [step["state"] for step in found["steps"]] == [
        "here",
        "passed",
        "passed",
        "here",
        "passed",
        "here",
    ]
    assert "version" in found["text"]
    assert found["steps"][3]["detail"]["text"] == found["steps"][0]["detail"]["text"]
