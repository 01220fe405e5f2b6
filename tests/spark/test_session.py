from __future__ import annotations

import pytest
from pyspark.sql import SparkSession

from penstock.errors import ConfigError, Unsupported
from penstock.spark import build_session, register
from penstock.spark.session.session import check_spark, is_local, session_settings

CHECKPOINTS = "spark.sql.streaming.checkpointFileManagerClass"


@pytest.mark.parametrize(
    ("master", "local"),
    [("local", True), ("local[2]", True), ("local[*,4]", True), ("local-cluster[2,1,1024]", False)]
    + [("spark://host:7077", False), ("yarn", False), ("k8s://https://host", False)],
)
def test_a_local_master_is_distinguished_from_a_cluster(master: str, local: bool) -> None:
    assert is_local(master) is local


def test_checkpoints_are_renamed_plainly_on_a_local_master_only() -> None:
    assert "FileSystemBased" in session_settings("local[2]", {})[CHECKPOINTS]
    for master in ("spark://host:7077", None):
        assert CHECKPOINTS not in session_settings(master, {})
        assert "spark.ui.enabled" not in session_settings(master, {})


def test_a_local_master_gets_as_many_shuffle_partitions_as_cores() -> None:
    assert session_settings("local[3]", {})["spark.sql.shuffle.partitions"] == "3"
    assert session_settings("local", {})["spark.sql.shuffle.partitions"] == "1"


def test_every_default_can_be_overridden() -> None:
    chosen = dict.fromkeys(session_settings("local[2]", {}), "mine")
    settings = session_settings("local[2]", chosen)
    options = settings.pop("spark.driver.extraJavaOptions")
    assert set(settings.values()) == {"mine"}
    assert options.startswith("mine -Dlog4j2.configurationFile=file:")


def test_log_settings_of_the_user_are_kept() -> None:
    mine = {"spark.driver.extraJavaOptions": "-Dlog4j2.configurationFile=file:/mine"}
    assert session_settings("local[2]", mine)["spark.driver.extraJavaOptions"] == mine.popitem()[1]


def test_the_active_session_is_used_if_no_other_is_requested(spark: SparkSession) -> None:
    assert build_session("another name") is spark
    assert build_session("another name", master="local[2]").sparkContext is spark.sparkContext


def test_another_master_than_that_of_the_active_session_is_refused(spark: SparkSession) -> None:
    with pytest.raises(ConfigError, match=r"a session on local\[2\] is active"):
        build_session("app", master="local[1]")


def test_a_master_and_a_remote_exclude_each_other() -> None:
    with pytest.raises(ConfigError, match="not both"):
        build_session("app", master="local[1]", remote="sc://host")


def test_a_remote_is_the_address_of_a_connect_server() -> None:
    with pytest.raises(ConfigError, match="sc://host"):
        build_session("app", remote="spark://host:7077")


def test_registering_twice_is_safe(spark: SparkSession) -> None:
    register(spark)
    register(spark)


@pytest.mark.parametrize("version", ["3.5.7", "4.1.0"])
def test_a_spark_without_limits_for_python_sources_is_refused(version: str) -> None:
    with pytest.raises(Unsupported, match=r"install pyspark 4\.2 or newer"):
        check_spark(version)


@pytest.mark.parametrize("version", ["4.2.0", "4.3.0", "5.0.0.dev1"])
def test_a_newer_spark_is_accepted(version: str) -> None:
    check_spark(version)
