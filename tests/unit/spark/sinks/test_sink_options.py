from __future__ import annotations

import pickle

import pytest

from penstock.buffer import CompressionType, Transaction
from penstock.errors import ConfigError
from penstock.spark.sinks.buffer import BufferStreamWriter
from penstock.spark.sinks.options import SinkOptions


def parse(**given: str) -> SinkOptions:
    return SinkOptions.parse({"store": "/queue", **given})


def test_a_store_is_enough() -> None:
    options = parse()
    assert (options.manifest_path, options.data_path_prefix) == ("ingest/manifest", "ingest")
    assert options.compression is CompressionType.NONE
    assert options.batch_bytes == 16 << 20
    assert options.transaction is None
    assert options.producer.prefix == "ingest"


def test_every_option_is_read_whatever_its_case() -> None:
    options = parse(
        MANIFEST_PATH="q/m",
        datapathprefix="/q/data/",
        compression="ZSTD",
        batchbytes="1MiB",
        txnappid="query",
        txnversion="7",
        checkpointlocation="/checkpoint",
        sharded="false",
    )
    assert options.producer.manifest_key == "q/m"
    assert options.producer.prefix == "q/data"
    assert options.compression is CompressionType.ZSTD
    assert options.batch_bytes == 1 << 20
    assert options.transaction == Transaction(app="query", version=7)
    assert options.sharded is False


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"compresion": "zstd"}, "compression"),
        ({"startingOffsets": "earliest"}, "startingOffsets"),
        ({"compression": "gzip"}, "none or zstd"),
        ({"batch_bytes": "0"}, "batch_bytes"),
        ({"batch_bytes": "2GiB"}, "batch_bytes"),
        ({"txnAppId": "query"}, "txnVersion: give txnAppId and txnVersion together"),
        ({"txnVersion": "1"}, "txnAppId: give"),
        ({"txnAppId": "query", "txnVersion": "one"}, "whole number, found 'one'"),
        ({"txnAppId": "query", "txnVersion": "-1"}, "txnVersion"),
        ({"txnAppId": "", "txnVersion": "1"}, "1 to 200 bytes"),
        ({"path": "/twice"}, "once"),
        ({"manifest_path": "a*b"}, "manifest_path"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_a_wrong_option_is_named(given: dict[str, str], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        parse(**given)


def test_a_stream_uses_its_own_transactions() -> None:
    with pytest.raises(ConfigError, match="for batch writes"):
        BufferStreamWriter(parse(txnAppId="query", txnVersion="1"))


def test_store_options_reach_the_tasks_and_are_never_shown() -> None:
    options = SinkOptions.parse({"store": "s3://bucket", "store.secret_access_key": "hush"})
    assert pickle.loads(pickle.dumps(options)) == options
    assert options.store.options["secret_access_key"] == "hush"
    assert "hush" not in repr(options)
