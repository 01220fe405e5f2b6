from __future__ import annotations

import pytest

from penstock.errors import ConfigError
from penstock.servers.limits import StreamLimits
from penstock.servers.settings import ServerSettings, check_exposure, unknown_variables
from penstock.topics.config import EngineConfig


def test_an_empty_environment_gives_the_defaults_of_the_contract() -> None:
    settings = ServerSettings.from_env({})
    assert (settings.host, settings.port, settings.port_file) == ("127.0.0.1", 4000, None)
    assert settings.engine == EngineConfig(data_dir="./topics-data", segment_process=True)
    assert (settings.body_bytes_max, settings.in_flight_per_key_max) == (67_108_864, 1000)
    assert (settings.probes_need_key, settings.allow_no_keys, len(settings.keys)) == (False, False, 0)


def test_every_variable_reaches_its_setting() -> None:
    settings = ServerSettings.from_env(
        {
            "TOPICS_HOST": "localhost",
            "TOPICS_PORT": "0",
            "TOPICS_PORT_FILE": "/run/port",
            "TOPICS_DATA_DIR": "/data",
            "TOPICS_COLD_DIR": "s3://bucket/cold",
            "TOPICS_API_KEYS": "a,b:read",
            "TOPICS_PROBE_AUTH": "1",
            "TOPICS_ALLOW_INSECURE_NO_AUTH": "true",
            "TOPICS_WAL_SHARDS": "3",
            "TOPICS_SEGMENT_MAX_EVENTS": "10",
            "TOPICS_SEGMENT_MAX_BYTES": "11",
            "TOPICS_SEGMENT_MAX_AGE_MS": "0",
            "TOPICS_HOT_RETAIN_SEGMENTS": "5",
            "TOPICS_HOT_RETAIN_BYTES": "6",
            "TOPICS_MAX_BODY_BYTES": "7",
            "TOPICS_MAX_TOPICS": "8",
            "TOPICS_MAX_INFLIGHT_PER_KEY": "9",
            "TOPICS_MAX_TOTAL_BYTES": "10",
            "TOPICS_LOG": "WARN",
        }
    )
    assert (settings.host, settings.port, settings.port_file) == ("localhost", 0, "/run/port")
    assert (settings.probes_need_key, settings.allow_no_keys, len(settings.keys)) == (True, True, 2)
    assert (settings.body_bytes_max, settings.in_flight_per_key_max, settings.log_level) == (7, 9, "warning")
    assert settings.engine == EngineConfig(
        data_dir="/data",
        cold_dir="s3://bucket/cold",
        wal_shards=3,
        segment_max_events=10,
        segment_max_bytes=11,
        segment_max_age_ms=0,
        hot_retain_segments=5,
        hot_retain_bytes=6,
        segment_process=True,
        max_topics=8,
        max_total_bytes=10,
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TOPICS_PORT", "x"),
        ("TOPICS_PORT", "65536"),
        ("TOPICS_PORT", "-1"),
        ("TOPICS_HOST", "localhost:x"),
        ("TOPICS_SEGMENT_MAX_EVENTS", "0"),
        ("TOPICS_MAX_BODY_BYTES", "64MiB"),
        ("TOPICS_MAX_TOPICS", "1.5"),
        ("TOPICS_PROBE_AUTH", "maybe"),
        ("TOPICS_LOG", "chatty"),
        ("TOPICS_API_KEYS", "k:all"),
        ("TOPICS_WAL_SHARDS", "65"),
        ("TOPICS_WAL_SHARDS", "1" * 5000),
        ("TOPICS_COLD_DIR", "s4://bucket/cold"),
        ("TOPICS_COLD_DIR", "s3://"),
        ("TOPICS_COLD_DIR", "s3://user:secret@bucket"),
    ],
)
def test_an_invalid_value_is_refused_with_a_message(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=rf"{name}|port") as caught:
        ServerSettings.from_env({name: value})
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("value", ["", "0", "many", "-2", "1e3"])
def test_shards_that_cannot_be_read_are_the_default(value: str) -> None:
    settings = ServerSettings.from_env({"TOPICS_WAL_SHARDS": value})
    assert settings.engine.wal_shards == ServerSettings.from_env({}).engine.wal_shards


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("0.0.0.0:81", ("0.0.0.0", 81)),
        ("[::1]:82", ("::1", 82)),
        ("::1", ("::1", 4000)),
        ("::", ("::", 4000)),
        ("name:83", ("name", 83)),
    ],
)
def test_a_host_may_carry_its_port(host: str, expected: tuple[str, int]) -> None:
    settings = ServerSettings.from_env({"TOPICS_HOST": host})
    assert (settings.host, settings.port) == expected


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3", "no-such-host.invalid"])
def test_without_keys_only_this_machine_is_served(host: str) -> None:
    with pytest.raises(ConfigError, match="TOPICS_API_KEYS"):
        check_exposure(ServerSettings.from_env({"TOPICS_HOST": host}))
    check_exposure(ServerSettings.from_env({"TOPICS_HOST": host, "TOPICS_API_KEYS": "k"}))
    check_exposure(ServerSettings.from_env({"TOPICS_HOST": host, "TOPICS_ALLOW_INSECURE_NO_AUTH": "1"}))


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "localhost", "::1"])
def test_loopback_needs_no_keys(host: str) -> None:
    check_exposure(ServerSettings.from_env({"TOPICS_HOST": host}))


def test_an_unknown_variable_is_reported_with_the_closest_known_one() -> None:
    told = unknown_variables({"TOPICS_PROT": "secret", "TOPICS_ZZZ": "secret", "PATH": "/bin"})
    assert told == [
        "TOPICS_PROT is set but is not a known variable; did you mean TOPICS_PORT?",
        "TOPICS_ZZZ is set but is not a known variable",
    ]


@pytest.mark.parametrize(
    "name",
    [
        *("TOPICS_HOST", "TOPICS_LOG", "TOPICS_HOT_RETAIN_BYTES", "TOPICS_SEGMENT_MAX_AGE_MS"),
        *("TOPICS_MAX_ROUTERS", "TOPICS_MAX_WATCH_SESSIONS", "TOPICS_MAX_SSE_CONNECTIONS_PER_KEY"),
        *("TOPICS_MAX_BATCH_RECORDS", "TOPICS_MAX_CLAIM", "TOPICS_TEST_MIN_HEARTBEAT_MS"),
        *("TOPICS_URL", "TOPICS_API_KEY"),
    ],
)
def test_names_of_the_contract_and_of_the_client_are_known(name: str) -> None:
    assert unknown_variables({name: "1"}) == []


def test_every_variable_that_is_read_is_known() -> None:
    asked: set[str] = set()

    class Asked(dict[str, str]):
        def get(self, name: str, default: str = "") -> str:  # type: ignore[override]
            asked.add(name)
            return default

    ServerSettings.from_env(Asked())
    assert len(asked) >= 19
    assert unknown_variables(dict.fromkeys(asked, "")) == []


def test_an_error_of_the_engine_names_the_variable() -> None:
    with pytest.raises(ConfigError, match=r"^TOPICS_COLD_DIR: expected a directory other than data_dir"):
        ServerSettings.from_env({"TOPICS_DATA_DIR": "/data", "TOPICS_COLD_DIR": "/data/"})


def test_stream_limits_come_from_the_environment() -> None:
    streams = ServerSettings.from_env(
        {
            "TOPICS_MAX_WATCH_SESSIONS": "1",
            "TOPICS_MAX_SSE_CONNECTIONS": "2",
            "TOPICS_MAX_SSE_CONNECTIONS_PER_KEY": "0",
            "TOPICS_TEST_MIN_HEARTBEAT_MS": "5",
        }
    ).streams
    assert streams == StreamLimits(
        sessions_max=1, connections_max=2, connections_per_key_max=0, heartbeat_ms_min=5
    )
    assert ServerSettings.from_env({}).streams == StreamLimits()


def test_the_heartbeats_of_tests_only_lower_the_floor() -> None:
    assert ServerSettings.from_env({"TOPICS_TEST_MIN_HEARTBEAT_MS": "5000"}).streams.heartbeat_ms_min == 1000
    with pytest.raises(ConfigError, match="TOPICS_TEST_MIN_HEARTBEAT_MS"):
        ServerSettings.from_env({"TOPICS_TEST_MIN_HEARTBEAT_MS": "0"})
