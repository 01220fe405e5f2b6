"""§9: claim, ack, nack and extend, rule by rule."""

from __future__ import annotations

import concurrent.futures
import socket
import time
from typing import Any

import pytest
from tests.contract.topics_server import Api, Server, fresh_name, serving

VERBS = ("claim", "ack", "nack", "extend")


def call(api: Api, topic: str, verb: str, *, status: int = 200, **fields: object) -> Any:
    fields = {"node": "w", **fields}
    if verb != "claim":
        fields.setdefault("seqs", [])
    if verb == "extend":
        fields.setdefault("lease_ms", 1000)
    return api.ask("POST", f"/v0/topics/{topic}/{verb}", fields, status=status)


def refused(api: Api, topic: str, verb: str, status: int, **fields: object) -> Any:
    return call(api, topic, verb, status=status, **fields)["error"]


def queue(api: Api, topic: str, jobs: int = 0, **config: object) -> None:
    api.put(topic, type="queue", **config)
    if jobs:
        api.write(topic, *range(1, jobs + 1))


def seqs(answer: Any) -> list[int]:
    return [job["$seq"] for job in answer["claimed"]]


def test_the_counts_of_one_job_from_claim_to_ack(api: Api, topic: str) -> None:
    queue(api, topic, lease_ms=30_000)
    api.write_records(topic, [{"data": {"a": 1}, "tag": "t", "node": "n", "meta": {"m": 1}}, {"data": 2}])
    assert api.state(topic)["queue"] == {"ready": 2, "in_flight": 0, "dead_lettered": 0}
    before_ms = time.time_ns() // 1_000_000
    answer = call(api, topic, "claim")
    after_ms = time.time_ns() // 1_000_000
    assert answer.keys() == {"topic", "claimed", "count", "ready", "performance"}
    assert (answer["topic"], answer["count"], answer["ready"]) == (topic, 1, 1)
    (job,) = answer["claimed"]
    assert before_ms + 30_000 <= job.pop("deadline") <= after_ms + 30_000
    assert job.pop("$ts") <= before_ms
    assert job == {
        "$seq": 1,
        "lease_id": "lease_1",
        "$tag": "t",
        "deliveries": 1,
        "data": {"a": 1},
        "meta": {"m": 1},
    }
    assert api.state(topic)["queue"] == {"ready": 1, "in_flight": 1, "dead_lettered": 0}
    extended = call(api, topic, "extend", seqs=[1, 7], lease_ms=60_000, lease_ids=["lease_1", ""])
    assert extended.keys() == {"topic", "extended", "skipped", "deadlines", "performance"}
    assert (extended["extended"], extended["skipped"]) == (1, [7])
    assert extended["deadlines"].keys() == {"1"}
    assert before_ms + 60_000 <= extended["deadlines"]["1"] <= time.time_ns() // 1_000_000 + 60_000
    nacked = call(api, topic, "nack", seqs=[1, 1])
    assert nacked.keys() == {"topic", "nacked", "skipped", "ready", "in_flight", "performance"}
    assert (nacked["nacked"], nacked["skipped"], nacked["ready"], nacked["in_flight"]) == (1, [1], 2, 0)
    (job,) = call(api, topic, "claim")["claimed"]
    assert (job["$seq"], job["lease_id"], job["deliveries"]) == (1, "lease_2", 2)
    acked = call(api, topic, "ack", seqs=[1, 2], lease_ids=["lease_2", ""])
    assert acked.keys() == {"topic", "acked", "skipped", "ready", "in_flight", "performance"}
    assert (acked["acked"], acked["skipped"], acked["ready"], acked["in_flight"]) == (1, [2], 1, 0)
    assert acked["performance"].keys() == {"server_total_ms"}
    assert api.seqs_of(topic) == [2]


def test_only_an_fsync_ack_reports_the_sync_time(api: Api, topic: str) -> None:
    queue(api, topic, 1, durable=True)
    call(api, topic, "claim")
    performance = call(api, topic, "ack", seqs=[1])["performance"]
    assert performance["fsync_ms"] > 0


@pytest.mark.parametrize("verb", VERBS)
def test_a_log_is_not_a_queue_and_a_missing_topic_is_not_found(api: Api, topic: str, verb: str) -> None:
    assert refused(api, topic, verb, 404)["detail"] == {"topic": topic}
    api.put(topic)
    error = refused(api, topic, verb, 409)
    assert (error["code"], error["detail"]) == ("not_a_queue", {"topic": topic})
    assert "queue" not in api.state(topic)


def test_the_order_of_checks_of_a_claim(api: Api, topic: str) -> None:
    path = f"/v0/topics/{topic}/claim"
    assert api.refused("POST", path, status=400)["code"] == "invalid_request"
    assert api.refused("POST", path, status=415, content=b"{}")["code"] == "unsupported_media_type"
    json = {"Content-Type": "application/json"}
    assert api.refused("POST", path, status=400, content=b"{", headers=json)["code"] == "invalid_request"
    assert refused(api, topic, "claim", 404, node="")["code"] == "topic_not_found"
    api.put(topic)
    assert refused(api, topic, "claim", 409, node="")["code"] == "not_a_queue"
    other = topic + ".q"
    queue(api, other)
    assert refused(api, other, "claim", 400, node="")["code"] == "invalid_request"
    assert refused(api, other, "claim", 400, node="é" * 65)["code"] == "invalid_request"
    assert api.refused("POST", f"/v0/topics/{other}/claim", {}, status=400)["code"] == "invalid_request"


@pytest.mark.parametrize("verb", ["ack", "nack", "extend"])
def test_the_order_of_checks_of_the_others(api: Api, topic: str, verb: str) -> None:
    many = [1] * 1001
    assert "lease id" in refused(api, topic, verb, 400, node="", seqs=many, lease_ids=["x"])["message"]
    assert "node" in refused(api, topic, verb, 400, node="", seqs=many, lease_ids=["lease_1"])["message"]
    error = refused(api, topic, verb, 400, seqs=many, lease_ids=["lease_1"])
    assert (error["code"], error["detail"]) == ("batch_too_large", {"seqs": 1001, "max": 1000})
    assert "lease_ids" in refused(api, topic, verb, 400, seqs=[1, 2], lease_ids=["lease_1"])["message"]
    assert refused(api, topic, verb, 404, seqs=[1], lease_ids=["lease_1"])["code"] == "topic_not_found"


@pytest.mark.parametrize(
    ("verb", "fields"),
    [
        ("claim", {"max": -1}),
        ("claim", {"max": None}),
        ("claim", {"max": "1"}),
        ("claim", {"max": 1.5}),
        ("claim", {"lease_ms": True}),
        ("claim", {"lease_ms": 2**64}),
        ("claim", {"node": 7}),
        ("claim", {"node": None}),
        ("ack", {"seqs": None}),
        ("ack", {"seqs": [-1]}),
        ("ack", {"seqs": [2**64]}),
        ("ack", {"seqs": ["1"]}),
        ("ack", {"lease_ids": None}),
        ("ack", {"seqs": [1], "lease_ids": [1]}),
        ("nack", {"delay_ms": None}),
        ("nack", {"delay_ms": -1}),
        ("extend", {"lease_ms": None}),
        ("extend", {"lease_ms": 0.5}),
    ],
)
def test_fields_of_the_wrong_kind_are_refused(
    h1: Api, topic: str, verb: str, fields: dict[str, object]
) -> None:
    queue(h1, topic, 1)
    assert refused(h1, topic, verb, 400, **fields)["code"] == "invalid_request"


@pytest.mark.parametrize("missing", ["seqs", "lease_ms"])
def test_the_required_fields_of_an_extend_are_checked(h1: Api, topic: str, missing: str) -> None:
    queue(h1, topic, 1)
    body = {"node": "w", "seqs": [1], "lease_ms": 1000}
    del body[missing]
    h1.refused("POST", f"/v0/topics/{topic}/extend", body, status=400)


def test_limits_lower_the_requested_values(h1: Api, topic: str) -> None:
    queue(h1, topic, 1200)
    assert call(h1, topic, "claim", max=0)["count"] == 1
    assert call(h1, topic, "claim", max=5000)["count"] == 1000
    (job,) = call(h1, topic, "claim", lease_ms=10**15)["claimed"]
    now_ms = time.time_ns() // 1_000_000
    assert 86_390_000 < job["deadline"] - now_ms <= 86_400_000
    deadline = call(h1, topic, "extend", seqs=[1], lease_ms=0)["deadlines"]["1"]
    assert deadline - now_ms < 10_000
    assert call(h1, topic, "claim", lease_ms=None, unknown=1)["count"] == 1


def test_an_ack_of_no_jobs_counts(h1: Api, topic: str) -> None:
    queue(h1, topic, 2)
    answer = call(h1, topic, "ack", seqs=[])
    assert (answer["acked"], answer["skipped"], answer["ready"], answer["in_flight"]) == (0, [], 2, 0)


def test_an_expired_lease_is_free_to_claim_and_its_holder_is_fenced(h1: Api, topic: str) -> None:
    queue(h1, topic, 1)
    (job,) = call(h1, topic, "claim", lease_ms=100)["claimed"]
    while not (again := call(h1, topic, "claim", lease_ms=60_000)["claimed"]):
        time.sleep(0.01)
    assert again[0]["deliveries"] == 2
    assert time.time_ns() // 1_000_000 > job["deadline"]
    assert call(h1, topic, "ack", seqs=[1], lease_ids=[job["lease_id"]])["skipped"] == [1]
    assert call(h1, topic, "ack", seqs=[1], lease_ids=[again[0]["lease_id"]])["acked"] == 1


def test_a_delayed_nack_is_not_ready_until_then(h1: Api, topic: str) -> None:
    queue(h1, topic, 1)
    call(h1, topic, "claim")
    answer = call(h1, topic, "nack", seqs=[1], delay_ms=300)
    assert (answer["ready"], answer["in_flight"]) == (0, 0)
    assert call(h1, topic, "claim")["count"] == 0
    time.sleep(0.3)
    assert call(h1, topic, "claim")["count"] == 1


def test_after_its_last_delivery_a_job_goes_to_the_dead_letters(api: Api, topic: str) -> None:
    dead = topic + ".dead"
    queue(api, topic, max_deliveries=2, dead_letter=dead)
    api.write_records(topic, [{"data": {"a": 1}, "tag": "t", "node": "n", "meta": {"m": 1}}])
    for delivery in (1, 2):
        (job,) = call(api, topic, "claim")["claimed"]
        assert job["deliveries"] == delivery
        call(api, topic, "nack", seqs=[1])
    assert call(api, topic, "claim") | {"performance": {}} == {
        "topic": topic,
        "claimed": [],
        "count": 0,
        "ready": 0,
        "performance": {},
    }
    assert api.state(topic)["queue"] == {"ready": 0, "in_flight": 0, "dead_lettered": 1}
    (record,) = api.diff(dead, include_tags=True)["records"]
    assert (record["data"], record["$tag"], record["$node"]) == ({"a": 1}, "t", "n")
    assert record["meta"] == {
        "m": 1,
        "$dead_letter_from": topic,
        "$dead_letter_deliveries": "2",
        "$dead_letter_src_seq": "1",
    }
    assert api.state(dead)["type"] == "log"


def test_a_dead_letter_that_is_refused_puts_the_job_back(h1: Api, topic: str) -> None:
    dead = topic + ".dead"
    h1.put(dead, discard="reject", cap_records=1)
    h1.write(dead, "full")
    queue(h1, topic, 1, max_deliveries=1, dead_letter=dead)
    call(h1, topic, "claim")
    call(h1, topic, "nack", seqs=[1])
    assert call(h1, topic, "claim")["count"] == 0
    assert h1.state(topic)["queue"] == {"ready": 1, "in_flight": 0, "dead_lettered": 0}
    h1.delete(dead, before_seq=2)
    assert call(h1, topic, "claim")["count"] == 0
    assert h1.state(topic)["queue"] == {"ready": 0, "in_flight": 0, "dead_lettered": 1}


def test_a_full_queue_that_rejects_loses_no_job_and_has_room_after_an_ack(h1: Api, topic: str) -> None:
    queue(h1, topic, 3, discard="reject", cap_records=3)
    call(h1, topic, "claim", max=3)
    call(h1, topic, "ack", seqs=[2])
    h1.write(topic, 4)
    assert h1.seqs_of(topic) == [1, 3, 4]
    h1.write(topic, 5, status=422)


def test_after_a_kill_acked_jobs_stay_deleted_and_leased_ones_return(tmp_path: Any) -> None:
    with serving(tmp_path / "data") as first:
        api = first.api()
        queue(api, "q", 3)
        queue(api, "kept", 3, leases_durable=True)
        for topic in ("q", "kept"):
            call(api, topic, "claim", max=2)
            call(api, topic, "ack", seqs=[1])
        first.kill()
    with serving(tmp_path / "data") as second:
        api = second.api()
        assert api.state("q")["queue"] == {"ready": 2, "in_flight": 0, "dead_lettered": 0}
        assert api.state("kept")["queue"] == {"ready": 1, "in_flight": 1, "dead_lettered": 0}
        jobs = call(api, "q", "claim", max=5)["claimed"]
        assert [(job["$seq"], job["deliveries"]) for job in jobs] == [(2, 1), (3, 1)]
        assert jobs[0]["lease_id"] not in {"lease_1", "lease_2"}
        assert seqs(call(api, "kept", "claim", max=5, node="v")) == [3]
        assert call(api, "kept", "ack", seqs=[2], lease_ids=["lease_2"])["acked"] == 1


def test_scopes_and_prefixes_apply_to_queues(tmp_path: Any) -> None:
    keys = "root,reader:read,writer:write,both:rw:a."
    with serving(tmp_path / "data", key="root", TOPICS_API_KEYS=keys) as server:
        root = server.api(key="root")
        queue(root, "a.q", 1)
        queue(root, "b.q", 1)
        for key in ("reader", "writer"):
            assert refused(server.api(key=key), "a.q", "claim", 403)["code"] == "forbidden"
        both = server.api(key="both")
        assert refused(both, "b.q", "claim", 403)["code"] == "forbidden"
        assert call(both, "a.q", "claim")["count"] == 1
        assert refused(server.api(key="reader"), "a.q", "ack", 403)["code"] == "forbidden"
        assert call(server.api(key="writer"), "a.q", "ack", seqs=[1])["acked"] == 1
        assert refused(server.api(), "a.q", "claim", 401)["code"] == "unauthorized"


def test_a_cohort_is_served_together_and_fairly(server: Server) -> None:
    topic = fresh_name("queue")
    queue(server.api(), topic, 30, claim_jitter_ms=500)
    apis = [server.api() for _ in range(3)]
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        answers = list(pool.map(lambda api: call(api, topic, "claim", max=20), apis))
    assert sorted(answer["count"] for answer in answers) == [10, 10, 10]
    assert sorted(seq for answer in answers for seq in seqs(answer)) == list(range(1, 31))
    assert all(seqs(answer) == sorted(seqs(answer)) for answer in answers)


def test_a_client_that_leaves_within_the_claim_window_gets_no_jobs(server: Server) -> None:
    topic = fresh_name("queue")
    api = server.api()
    queue(api, topic, 3, claim_jitter_ms=300)
    body = b'{"node":"gone","max":3}'
    head = b"POST /v0/topics/%b/claim HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with socket.create_connection(server.host_and_port) as impatient:
        impatient.sendall(head % topic.encode() + b"Content-Length: %d\r\n\r\n%b" % (len(body), body))
        time.sleep(0.1)
    assert call(api, topic, "claim", max=3)["count"] == 3


def test_metrics_include_queues(tmp_path: Any) -> None:
    with serving(tmp_path / "data") as server:
        api = server.api()
        queue(api, "q", 3)
        call(api, "q", "claim", max=2)
        text = api.client.get("/v0/metrics").text
        for line in (
            "topics_queue_topics 1",
            "topics_queue_leases_in_flight 2",
            'topics_topic_queue_ready{topic="q"} 1',
            'topics_topic_queue_in_flight{topic="q"} 2',
        ):
            assert line in text.splitlines(), text
        numbers = api.client.get("/v0/metrics", headers={"Accept": "application/json"}).json()
        assert (numbers["queue_topics"], numbers["queue_leases_in_flight"]) == (1, 2)
