"""From the file to the parts to run."""

from __future__ import annotations

import re

import pytest

from penstock.config import Secret
from penstock.errors import ConfigError
from penstock.up.parts import Plan, stage_of
from penstock.up.plan import plan_of, port_faults
from penstock.up.settings import faults_of, read_settings
from penstock.up.status import PartKind

KEY = Secret("own-key")
EVERYTHING: dict[str, object] = {
    "collector": None,
    "topics": None,
    "relays": [{"topic": "events", "queue": "events"}],
    "pipelines": [{"file": "events.yaml", "conf": {"spark.x": "1"}}],
    "timeseries": {"queue": "metrics"},
    "vector": {"queue": "vectors", "dimensions": 3},
}


def plan(mapping: dict[str, object] | None = None, base: str = "/srv/app") -> Plan:
    return plan_of(read_settings(EVERYTHING if mapping is None else mapping, where="f"), base=base, key=KEY)


def faults(mapping: dict[str, object]) -> list[str]:
    found = plan(mapping)
    return [*found.faults, *port_faults(found.settings, found.parts)]


def option(part_plan: Plan, part: str, name: str) -> str:
    arguments = part_plan.part(part).arguments
    return arguments[arguments.index(name) + 1]


def test_every_part_of_the_file_runs_and_no_other() -> None:
    assert [part.name for part in plan().parts] == [
        "collector",
        "topics",
        "relay-events",
        "pipeline-events",
        "timeseries",
        "vector",
    ]
    assert plan({}).parts == ()
    assert plan({"topics": {"enabled": False}}).parts == ()


def test_paths_are_relative_to_the_file() -> None:
    found = plan({**EVERYTHING, "data_dir": "data"})
    assert found.layout.data_dir == "/srv/app/data"
    assert found.part("pipeline-events").arguments[:2] == ("run", "/srv/app/events.yaml")
    assert found.part("topics").environment["TOPICS_DATA_DIR"] == "/srv/app/data/topics"
    assert found.part("timeseries").arguments[2] == "/srv/app/data/timeseries"


def test_a_queue_has_its_producers_and_consumers_at_one_place() -> None:
    queues = {queue.name: queue for queue in plan().map.queues}
    assert queues["events"].producers == ("relay-events",)
    assert (queues["metrics"].producers, queues["metrics"].consumers) == (("collector",), ("timeseries",))
    assert queues["vectors"].producers == ()
    assert option(plan(), "relay-events", "--manifest") == queues["events"].manifest_path == "events/manifest"
    assert option(plan(), "timeseries", "--manifest") == "metrics/manifest"
    assert option(plan(), "timeseries", "--buffer") == queues["metrics"].store


def test_a_described_queue_is_where_the_file_says() -> None:
    described = {"events": {"store": "s3://bucket/q", "manifest_path": "a/m", "data_path_prefix": "a/d"}}
    found = plan({**EVERYTHING, "queues": described})
    assert found.part("relay-events").arguments[3] == "s3://bucket/q"
    assert option(found, "relay-events", "--prefix") == "a/d"


def test_the_queues_of_the_collector_are_where_its_store_is() -> None:
    found = plan({**EVERYTHING, "collector": {"store": "s3://bucket"}})
    assert found.collector_text is not None
    nodes = found.collector_text["nodes"]
    assert isinstance(nodes, dict)
    assert nodes["queues"]["config"]["store"] == "s3://bucket"
    assert option(found, "timeseries", "--buffer") == "s3://bucket"
    (fault,) = plan({**EVERYTHING, "queues": {"metrics": {"store": "s3://other"}}}).faults
    assert fault == "queues.metrics: collector.store sets the place of this queue; set that instead"


def test_parts_stop_in_data_flow_order() -> None:
    stages = [stage_of(part.kind) for part in plan().parts]
    assert stages == sorted(stages)
    assert stage_of(PartKind.COLLECTOR) == stage_of(PartKind.TOPICS) < stage_of(PartKind.RELAY)
    assert stage_of(PartKind.RELAY) < stage_of(PartKind.PIPELINE) < stage_of(PartKind.VECTOR)
    assert stage_of(PartKind.VECTOR) < stage_of(PartKind.CONSOLE)


def test_keys_reach_the_server_and_its_callers_but_no_command_line() -> None:
    found = plan({**EVERYTHING, "topics": {"keys": "secret:rw"}, "timeseries": {"keys": "other"}})
    assert found.part("topics").environment["TOPICS_API_KEYS"] == "secret:rw,own-key"
    assert found.part("relay-events").environment["TOPICS_API_KEY"] == "own-key"
    assert found.part("timeseries").environment["TIMESERIES_API_KEYS"] == "other,own-key"
    assert found.map.topics is not None
    assert found.map.topics.key == KEY
    everything = " ".join(argument for part in found.parts for argument in part.arguments)
    assert "secret" not in everything
    assert "own-key" not in everything + repr(found)


def test_without_keys_no_key_is_created() -> None:
    assert "TOPICS_API_KEYS" not in plan().part("topics").environment
    assert plan().part("relay-events").environment == {}


def test_a_pipeline_is_asked_to_stop_before_it_would_be_killed() -> None:
    found = plan({**EVERYTHING, "stop_timeout": "30s"})
    assert option(found, "pipeline-events", "--stop-timeout") == "20s"
    assert found.part("pipeline-events").grace_s == 30.0


@pytest.mark.parametrize(
    ("mapping", "told"),
    [
        ({"relays": [{"topic": "a", "queue": "b"}]}, "topics is not in the file"),
        ({"topics": {"port": 9090}, "timeseries": {}}, r"topics\.port and timeseries\.port are both 9090"),
        ({"topics": {"port": 4600}}, r"console\.port and topics\.port are both 4600"),
        ({"pipelines": [{"file": "a/x.yaml"}, {"file": "b/x.yaml"}]}, "two parts are called pipeline-x"),
        ({"topics": {}, "relays": [{"topic": "a", "queue": "b"}] * 2}, "two parts are called relay-a"),
    ],
)
def test_contradicting_parts_are_refused(mapping: dict[str, object], told: str) -> None:
    (fault,) = faults(mapping)
    assert re.search(told, fault)


def test_all_contradictions_are_reported_together() -> None:
    mapping: dict[str, object] = {
        "topics": {"host": "0.0.0.0", "port": 9090},
        "timeseries": {},
        "vector": {"host": "localhost", "port": 9090, "queue": "../up"},
        "relays": [{"topic": "a", "queue": "b"}] * 2,
    }
    name, queue, *others = faults(mapping)
    assert name == "two parts are called relay-a: give one of them another name (name)"
    assert queue.startswith("queue '../up': data_path_prefix: object key '../up' contains the segment '..'")
    assert others == [
        "topics.port and timeseries.port are both 9090: change one of them",
        "topics.port and vector.port are both 9090: change one of them",
        "timeseries.port and vector.port are both 9090: change one of them",
    ]


@pytest.mark.parametrize(("written", "argument"), [("36h", "36h"), (129_600, "129600.000000s")])
def test_a_duration_in_the_file_is_passed_with_a_unit(written: object, argument: str) -> None:
    found = plan({"timeseries": {"retention": written}})
    arguments = next(part.arguments for part in found.parts if part.kind is PartKind.TIMESERIES)
    assert arguments[arguments.index("--retention") + 1] == argument


def test_one_port_on_two_addresses_is_not_a_conflict() -> None:
    mapping: dict[str, object] = {"topics": {"host": "127.0.0.2", "port": 9090}, "timeseries": {}}
    assert faults(mapping) == []


def test_port_0_may_be_requested_twice() -> None:
    assert faults({"topics": {"port": 0}, "timeseries": {"port": 0}, "console": {"port": 0}}) == []


def test_all_faults_of_a_file_are_reported_together() -> None:
    mapping: dict[str, object] = {
        "topcs": {},
        "topics": {"port": "many", "hots": "x"},
        "relays": [{"topic": "a"}, {"topic": "b", "queue": "c", "value": "all"}],
        "timeseries": {"retention": "long"},
        "vector": {"port": 70000},
        "stop_timeout": "soon",
        "collector": {"file": "a", "config": {}},
    }
    told = [str(fault) for fault in faults_of(mapping, where="f")]
    for words in (
        "f: topcs: unknown key, did you mean 'topics'?",
        "f: topics.port: expected a whole number",
        "f: topics.hots: unknown key, did you mean 'host'?",
        "f: relays.0.queue: required, but not set",
        "f: relays.1.value: expected one of record, data",
        "f: timeseries.retention: 'long' is not a duration",
        "f: vector: port: expected 0 to 65535",
        "f: stop_timeout: 'soon' is not a duration",
        "f: collector: give file or config, not both",
    ):
        assert any(words in line for line in told), (words, told)
    with pytest.raises(ConfigError):
        read_settings(mapping, where="f")


def test_a_file_without_faults_has_none() -> None:
    assert faults_of(EVERYTHING, where="f") == []


def test_the_plan_knows_every_secret_and_shows_none() -> None:
    keys = {
        "topics": {"keys": "one:rw, two"},
        "collector": {"tokens": ["three"]},
        "console": {"keys": "four"},
    }
    found = plan(keys)
    assert found.secrets == {"own-key", "one", "two", "three", "four"}
    assert not any(secret in repr(found) for secret in ("own-key", "three", "four"))
