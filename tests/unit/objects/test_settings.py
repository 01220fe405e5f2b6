"""Opening a store by its address and settings."""

from __future__ import annotations

import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest

from penstock.errors import ConfigError
from penstock.objects import LocalStore, MemoryStore, StoreConfig, open_store

OPTIONS = {"access_key_id": "AKIA-hidden", "secret_access_key": "hidden-too", "region": "eu-north-1"}


def test_a_path_is_a_local_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(open_store(str(tmp_path)), LocalStore)
    assert open_store(str(tmp_path)).url == f"file://{tmp_path}"
    assert open_store(f"file://{tmp_path}").url == f"file://{tmp_path}"
    assert open_store(f"file://localhost{tmp_path}/a%20b").url == f"file://{tmp_path}/a b"
    monkeypatch.chdir(tmp_path)
    assert open_store("below").url == f"file://{tmp_path}/below"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert open_store("~/data").url == f"file://{tmp_path}/data"


def test_a_memory_store_is_shared_by_its_name() -> None:
    assert isinstance(open_store("memory://one"), MemoryStore)
    assert open_store("memory://one") is open_store("memory://one/")
    assert open_store("memory://one") is not open_store("memory://two")
    assert open_store("memory://").url == "memory://"


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("s3://bucket", "s3://bucket"),
        ("s3://bucket/", "s3://bucket"),
        ("s3://bucket//a//b/", "s3://bucket/a/b"),
        ("gs://bucket/x", "gs://bucket/x"),
    ],
)
def test_a_bucket_may_have_a_folder(url: str, shown: str) -> None:
    assert open_store(url).url == shown


def test_azure_takes_its_account_from_the_options() -> None:
    config = StoreConfig(url="az://box/x", options={"account_name": "me", "account_key": "aGlkZGVu"})
    assert open_store(config).url == "az://box/x"
    with pytest.raises(ConfigError, match="Account"):
        open_store("az://box/x")


def test_a_store_is_returned_unchanged() -> None:
    store = MemoryStore()
    assert open_store(store) is store


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("s3a://bucket", r"did you mean s3://\?"),
        ("flie:///x", r"did you mean file://\?"),
        ("ftp://host", "az://, file://, gs://, memory://, s3:// or a path"),
        ("s3://", "needs a bucket"),
        ("s3:///folder", "needs a bucket"),
        ("file://relative/path", "file:///relative/path"),
        ("file://", "absolute path"),
        ("s3://bucket/a?region=x", "options"),
        ("s3://bucket/a#b", "options"),
        ("s3://bucket/a/../b", "segment"),
        ("s3://key:hidden@bucket", "pass them as options"),
        ("", "found nothing"),
    ],
)
def test_an_invalid_address_is_reported_with_the_expected_form(url: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        open_store(url)
    assert "hidden" not in str(caught.value)


def test_other_values_are_not_a_store() -> None:
    with pytest.raises(ConfigError, match="int"):
        open_store(7)


@pytest.mark.parametrize("url", ["memory://x", "file:///x"])
def test_options_need_a_remote_store(url: str) -> None:
    with pytest.raises(ConfigError, match="takes no options"):
        open_store(StoreConfig(url=url, options={"region": "x"}))


def test_secrets_stay_out_of_repr() -> None:
    config = StoreConfig(url="s3://bucket", options=OPTIONS)
    for text in (repr(config), str(config), repr(open_store(config)), open_store(config).url):
        assert "hidden" not in text
    assert "access_key_id" in repr(config)


@pytest.mark.parametrize("timeout", [5, 0.5, "500ms", timedelta(seconds=2)])
def test_the_timeout_is_a_duration(timeout: float | str | timedelta) -> None:
    open_store(StoreConfig(url="s3://bucket", options=OPTIONS, request_timeout=timeout))


@pytest.mark.parametrize(
    "wrong", [{"request_timeout": 0}, {"request_timeout": "soon"}, {"retries": -1}, {"threads": 0}]
)
def test_wrong_numbers_are_rejected(wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigError):
        StoreConfig(url="s3://bucket", **wrong)


def test_local_work_does_not_load_the_remote_client() -> None:
    code = "import sys, penstock.objects as o; o.open_store('here'); assert 'obstore' not in sys.modules"
    subprocess.run(
        [sys.executable, "-c", code], check=True, timeout=30, env={"PYTHONPATH": ":".join(sys.path)}
    )
