from __future__ import annotations

import enum
import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.config import Secret, build, closest, faults, from_env, load_mapping, mask, merge
from penstock.errors import ConfigError
from penstock.units import DurationLike, SizeLike, parse_duration


class Compression(enum.Enum):
    NONE = 0
    ZSTD = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Ingest:
    flush_interval: str = "100ms"
    flush_size_bytes: int = 64
    compression: Compression = Compression.NONE

    def __post_init__(self) -> None:
        parse_duration(self.flush_interval)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    store: str
    ingest: Ingest = field(default_factory=Ingest)
    retries: int | None = None
    ratio: float = 0.5
    verbose: bool = False
    hosts: list[str] = field(default_factory=list)
    ports: tuple[int, ...] = ()
    shards: dict[str, Ingest] = field(default_factory=dict)
    limits: Mapping[str, int] = field(default_factory=dict)
    interval: float | str = 1.0
    mode: Literal["fail", "skip"] = "fail"
    key: Secret | None = None
    directory: Path | None = None
    wait: DurationLike = "1s"
    room: SizeLike | None = None


def test_every_kind_of_field_is_built() -> None:
    settings = build(
        Settings,
        {
            "store": "memory://",
            "ingest": {"flush_interval": "5s", "compression": "zstd"},
            "retries": 3,
            "ratio": 1,
            "verbose": True,
            "hosts": ["a", "b"],
            "ports": [1, 2],
            "shards": {"one": {"flush_size_bytes": 1}},
            "limits": {"a": 1},
            "interval": "1s",
            "mode": "skip",
            "key": "hush",
            "directory": "somewhere",
        },
        where="test",
    )
    assert settings == Settings(
        store="memory://",
        ingest=Ingest(flush_interval="5s", compression=Compression.ZSTD),
        retries=3,
        ratio=1.0,
        verbose=True,
        hosts=["a", "b"],
        ports=(1, 2),
        shards={"one": Ingest(flush_size_bytes=1)},
        limits={"a": 1},
        interval="1s",
        mode="skip",
        key=Secret("hush"),
        directory=Path("somewhere"),
    )


def test_text_from_the_environment_becomes_the_type_of_the_field() -> None:
    environ = {
        "PENSTOCK_STORE": "memory://",
        "PENSTOCK_RETRIES": "3",
        "PENSTOCK_RATIO": "0.25",
        "PENSTOCK_VERBOSE": "yes",
        "PENSTOCK_HOSTS": "a, b",
        "PENSTOCK_PORTS": "1,2",
        "PENSTOCK_INGEST__FLUSH_SIZE_BYTES": "7",
        "OTHER": "x",
    }
    settings = build(Settings, from_env("PENSTOCK_", environ), where="environment")
    assert settings == Settings(
        store="memory://",
        retries=3,
        ratio=0.25,
        verbose=True,
        hosts=["a", "b"],
        ports=(1, 2),
        ingest=Ingest(flush_size_bytes=7),
    )


def test_an_unknown_key_names_its_place_and_the_closest_key() -> None:
    with pytest.raises(ConfigError) as caught:
        build(Settings, {"store": "x", "ingest": {"flush_intervall": "1s"}}, where="file.yaml")
    expected = "file.yaml: ingest.flush_intervall: unknown key, did you mean 'flush_interval'?"
    assert str(caught.value) == expected


def test_a_key_without_a_similar_one_lists_all_keys() -> None:
    with pytest.raises(ConfigError, match="expected one of compression, flush_interval, flush_size_bytes"):
        build(Ingest, {"zzz": 1}, where="file.yaml")


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("store", 1, "file.yaml: store: expected text, found 1"),
        ("store", None, "file.yaml: store: expected text, found nothing"),
        ("retries", "many", "file.yaml: retries: expected a whole number, found 'many'"),
        ("retries", True, "file.yaml: retries: expected a whole number, found True"),
        ("ratio", [], "file.yaml: ratio: expected a number, found a list"),
        ("verbose", 1, "file.yaml: verbose: expected true or false, found 1"),
        ("hosts", {}, "file.yaml: hosts: expected a list, found a mapping"),
        ("ports", [1, "x"], "file.yaml: ports.1: expected a whole number, found 'x'"),
        ("shards", 3, "file.yaml: shards: expected a mapping, found 3"),
        ("shards", {"a": {"b": 1}}, "file.yaml: shards.a.b: unknown key, expected one of"),
        ("ingest", "x", "file.yaml: ingest: expected a mapping of settings, found 'x'"),
        ("interval", None, "file.yaml: interval: expected a number or text, found nothing"),
        ("mode", "skipp", "file.yaml: mode: expected one of fail, skip, found 'skipp'; did you mean 'skip'?"),
        ("directory", 5, "file.yaml: directory: expected a path, found 5"),
        ("directory", "", "file.yaml: directory: expected a path, found ''"),
        ("retries", 7.0, "file.yaml: retries: expected a whole number, found 7.0"),
        ("mode", True, "file.yaml: mode: expected one of fail, skip, found True"),
        ("wait", "5", "file.yaml: wait: '5' is not a duration: it has no unit"),
        ("wait", None, "file.yaml: wait: None is not a duration"),
        ("room", "5s", "file.yaml: room: '5s' is not a size"),
        ("ingest", {"compression": "ztsd"}, "expected one of none, zstd, found 'ztsd'; did you mean 'zstd'?"),
        ("ingest", {"flush_interval": "5"}, "file.yaml: ingest: '5' is not a duration"),
    ],
)
def test_a_wrong_value_states_its_place_and_the_expected_type(key: str, value: object, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build(Settings, {"store": "x", key: value}, where="file.yaml")
    assert message in str(caught.value)


def test_a_size_or_duration_is_left_to_the_constructor() -> None:
    settings = build(Settings, {"store": "x", "wait": "5m", "room": 7}, where="t")
    assert (settings.wait, settings.room) == ("5m", 7)


SETTINGS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just("1s"),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["a", "retries"]), inner, max_size=2)
    ),
    max_leaves=6,
)
KEYS = st.sampled_from([*(one.name for one in fields(Settings)), "retrys"])
INGEST = st.dictionaries(st.sampled_from([one.name for one in fields(Ingest)]), SETTINGS, max_size=3)


@given(st.dictionaries(KEYS, SETTINGS | INGEST, max_size=5))
def test_any_mapping_gives_settings_or_errors_with_their_places(mapping: dict[str, object]) -> None:
    found = faults(Settings, mapping, where="file.yaml")
    if not found:
        assert isinstance(build(Settings, mapping, where="file.yaml"), Settings)
        return
    with pytest.raises(ConfigError) as caught:
        build(Settings, mapping, where="file.yaml")
    assert str(caught.value) == str(found[0])
    names = {*mapping, "store"}
    for fault in found:
        where, _, key = str(fault).partition(": ")
        assert where == "file.yaml"
        assert key.partition(":")[0].partition(".")[0] in names


@given(st.dictionaries(KEYS, SETTINGS | INGEST, max_size=5))
def test_every_error_of_a_key_is_reported_with_those_of_other_keys(mapping: dict[str, object]) -> None:
    alone = set()
    for key, value in mapping.items():
        alone |= {str(fault) for fault in faults(Settings, {"store": "x"} | {key: value}, where="f")}
    together = {str(fault) for fault in faults(Settings, {"store": "x"} | mapping, where="f")}
    assert together == alone


@pytest.mark.parametrize(
    ("word", "found"), [("flush_intervall", "flush_interval"), ("zzz", None), ("", None)]
)
def test_the_closest_choice_is_similar_or_none(word: str, found: str | None) -> None:
    assert closest(word, ["flush_interval", "flush_size_bytes"]) == found


def test_a_missing_required_key_is_named() -> None:
    with pytest.raises(ConfigError, match=r"file\.yaml: store: required, but not set"):
        build(Settings, {}, where="file.yaml")


def test_later_layers_win_key_by_key() -> None:
    file = {"store": "a", "ingest": {"flush_interval": "1s", "flush_size_bytes": 1}}
    environment = {"ingest": {"flush_size_bytes": 2}}
    flags = {"store": "b"}
    assert merge(file, environment, flags) == {
        "store": "b",
        "ingest": {"flush_interval": "1s", "flush_size_bytes": 2},
    }
    assert file["ingest"] == {"flush_interval": "1s", "flush_size_bytes": 1}


MAPPINGS = st.recursive(
    st.dictionaries(st.sampled_from("abc"), st.integers(), max_size=3),
    lambda inner: st.dictionaries(st.sampled_from("abc"), st.integers() | inner, max_size=3),
    max_leaves=8,
)


@given(MAPPINGS, MAPPINGS, MAPPINGS)
def test_merging_does_not_depend_on_grouping_of_equal_shapes(
    first: dict[str, object], second: dict[str, object], third: dict[str, object]
) -> None:
    assert merge(first) == first
    assert merge(first, first) == first
    assert merge(first, {}) == merge({}, first)
    assert merge(merge(first, second), third) == merge(first, second, third)


@pytest.mark.parametrize(
    "environ",
    [{"P_A": "1", "P_A__B": "2"}, {"P_A__B": "1", "P_A__B__C": "2"}, {"P_A____B": "1"}, {"P___A": "1"}],
)
def test_contradicting_variables_are_refused(environ: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="environment: P_"):
        from_env("P_", environ)


def test_a_yaml_file_is_loaded(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("store: memory://\ningest: {flush_interval: 1s}\n")
    assert load_mapping(path) == {"store": "memory://", "ingest": {"flush_interval": "1s"}}


def test_an_empty_file_is_an_empty_mapping(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("# nothing yet\n")
    assert load_mapping(path) == {}


def test_yaml_anchors_and_merge_keys_work(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("a: &a {x: 1, y: 2}\nb: {<<: *a, y: 3}\n")
    assert load_mapping(path)["b"] == {"x": 1, "y": 3}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\na: 2\n", "key 'a' appears twice"),
        ("x: {a: 1, a: 1}\n", "key 'a' appears twice"),
        ("- 1\n", "expected a mapping of settings, found a list"),
        ("just text\n", "expected a mapping of settings, found 'just text'"),
        ("a: [1\n", "not valid YAML"),
        ("a: !!python/object/apply:os.system [ls]\n", "not valid YAML"),
        ("1: a\n", "key 1 is not text"),
        ("a: {true: b}\n", "key True is not text"),
        ("? [a]\n: b\n", "not valid YAML"),
        ("a: 2020-99-99\n", "not valid YAML"),
    ],
)
def test_a_wrong_file_is_refused_with_its_name(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_mapping(path)
    assert str(path) in str(caught.value)
    assert message in str(caught.value)


def test_a_missing_or_binary_file_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load_mapping(tmp_path / "none.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_mapping(tmp_path / "binary.yaml")


def test_a_secret_is_never_shown() -> None:
    secret = Secret("hush-hush")
    shown = [repr(secret), str(secret), f"{secret}", f"{secret:>5}", repr([secret])]
    assert not any("hush" in text for text in shown)
    assert secret.reveal() == "hush-hush"
    assert "hush" not in repr(build(Settings, {"store": "x", "key": "hush-hush"}, where="t"))
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(secret)


def test_a_wrong_secret_is_not_shown_in_the_error() -> None:
    with pytest.raises(ConfigError) as caught:
        build(Settings, {"store": "x", "key": 12345}, where="t")
    assert "12345" not in str(caught.value)


def test_a_masked_text_shows_only_whether_it_is_set() -> None:
    assert mask("hush") == "***"
    assert mask("") == mask(None) == "(not set)"


@dataclass(frozen=True, kw_only=True)
class _Inner:
    port: int
    host: str = ""

    def __post_init__(self) -> None:
        if self.port < 0:
            raise ConfigError("port: expected 0 or more")


@dataclass(frozen=True, kw_only=True)
class _Outer:
    name: str
    one: _Inner | None = None
    many: tuple[_Inner, ...] = ()
    named: dict[str, _Inner] = field(default_factory=dict)


def test_every_fault_is_reported_with_its_place() -> None:
    found = faults(
        _Outer,
        {
            "nmae": "x",
            "one": {"port": "many", "hots": "y"},
            "many": [{"port": 1}, {}, {"port": -1}, 5],
            "named": {"a": {"port": None}},
        },
        where="f",
    )
    assert sorted(str(fault) for fault in found) == [
        "f: many.1.port: required, but not set",
        "f: many.2: port: expected 0 or more",
        "f: many.3: expected a mapping of settings, found 5",
        "f: name: required, but not set",
        "f: named.a.port: expected a whole number, found nothing",
        "f: nmae: unknown key, did you mean 'name'?",
        "f: one.hots: unknown key, did you mean 'host'?",
        "f: one.port: expected a whole number, found 'many'",
    ]


@pytest.mark.parametrize(
    "mapping",
    [
        {},
        {"name": 1},
        {"name": "x"},
        {"name": "x", "one": None, "many": "a,b"},
        {"name": "x", "many": [{"port": "1"}]},
    ],
)
def test_faults_are_found_exactly_if_build_refuses(mapping: dict[str, object]) -> None:
    refused = []
    try:
        build(_Outer, mapping, where="f")
    except ConfigError as error:
        refused.append(str(error))
    found = [str(fault) for fault in faults(_Outer, mapping, where="f")]
    assert set(refused) <= set(found)
    assert bool(refused) == bool(found)
