from __future__ import annotations

from pathlib import Path

import click
import pytest

from penstock.buffer import ConsumerConfig, ProducerConfig
from penstock.cli.buffer.target import Target
from penstock.errors import ConfigError
from penstock.objects import StoreConfig


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    for name in os.environ:
        if name.startswith("PENSTOCK_BUFFER__"):
            monkeypatch.delenv(name)


def settings_file(folder: Path, text: str) -> str:
    path = folder / "queue.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_flags_override_the_environment_which_overrides_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "store: /file\nmanifest_path: from/file\ndata_path_prefix: from-file\nflush_interval: 50\n"
    path = settings_file(tmp_path, text)
    monkeypatch.setenv("PENSTOCK_BUFFER__STORE", "/environment")
    monkeypatch.setenv("PENSTOCK_BUFFER__MANIFEST_PATH", "from/environment")
    config = Target.of("/flag", config=path).build(ProducerConfig)
    assert config.store == "/flag"
    assert config.manifest_path == "from/environment"
    assert config.data_path_prefix == "from-file"
    assert config.flush_interval_s == pytest.approx(0.05)


def test_one_file_serves_producers_and_consumers(tmp_path: Path) -> None:
    path = settings_file(tmp_path, "object_store: {type: Local, path: /q}\nflush_interval: 50\nprefetch: 2\n")
    target = Target.of(None, config=path)
    assert target.build(ProducerConfig).store == "/q"
    assert target.build(ConsumerConfig).prefetch == 2


def test_the_settings_may_be_in_a_section(tmp_path: Path) -> None:
    path = settings_file(tmp_path, "buffer:\n  store: /q\n")
    assert Target.of(None, config=path).build(ConsumerConfig).store == "/q"


def test_an_address_replaces_the_object_store_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = settings_file(tmp_path, "object_store: {type: Local, path: /q}\n")
    assert Target.of("/flag", config=path).build(ConsumerConfig).store == "/flag"
    monkeypatch.setenv("PENSTOCK_BUFFER__STORE", "/environment")
    assert Target.of(None, config=path).build(ConsumerConfig).store == "/environment"


def test_a_misspelt_setting_names_its_file_and_the_closest_setting(tmp_path: Path) -> None:
    path = settings_file(tmp_path, "store: /q\nflush_intervall: 1s\n")
    with pytest.raises(ConfigError, match=r"queue\.yaml: flush_intervall.*did you mean 'flush_interval'"):
        Target.of(None, config=path)


def test_without_a_store_the_usage_is_shown() -> None:
    with pytest.raises(click.UsageError, match="STORE"):
        Target.of(None)


def test_store_options_stay_out_of_repr() -> None:
    target = Target.of("s3://bucket", store_options=["secret_access_key=hunter2", "region=eu"])
    store = target.build(ConsumerConfig).store
    assert isinstance(store, StoreConfig)
    assert store.options == {"secret_access_key": "hunter2", "region": "eu"}
    assert "hunter2" not in repr(target) + repr(store)


def test_a_store_option_without_a_name_is_refused_without_showing_it() -> None:
    with pytest.raises(click.BadParameter) as caught:
        Target.of("s3://bucket", store_options=["hunter2"])
    assert "hunter2" not in str(caught.value)
