"""Bodies of writes: both decoders give the same response as the decoder of all fields."""

from __future__ import annotations

import pytest

from penstock.http.message import Request
from penstock.servers.topics import bodies
from penstock.topics.errors import InvalidRequest
from penstock.topics.model import BareRecord, NewRecord

HEADERS = {b"content-type": b"application/json"}


def read(body: bytes) -> bodies.WriteBody[BareRecord] | bodies.WriteBody[bodies.WireRecord]:
    return bodies.read_write(Request(b"POST", b"/", HEADERS, body))


@pytest.mark.parametrize(
    "body",
    [
        b'{"records":[{"data":1},{"data":[2]}]}',
        b'{"records":[{"data":1,"data":2}],"node":"n","unknown":{}}',
        '{"records":[{"data":"\u00e9"}],"idempotency_key":"k"}'.encode(),
    ],
)
def test_records_with_nothing_but_data_are_bare(body: bytes) -> None:
    got, want = read(body), bodies._WRITE.decode(body)
    assert not any(isinstance(record, NewRecord) for record in got.records)
    assert [bytes(record.data) for record in got.records] == [bytes(record.data) for record in want.records]
    assert (got.node, got.idempotency_key, got.create, got.config) == (
        want.node,
        want.idempotency_key,
        want.create,
        want.config,
    )


@pytest.mark.parametrize(
    "body",
    [
        b'{"records":[{"data":1},{"data":2,"tag":"t"}]}',
        b'{"records":[{"data":1,"meta":null}]}',
        b'{"records":[{"data":1,"other":3}]}',
    ],
)
def test_one_record_with_more_than_data_makes_all_records_full(body: bytes) -> None:
    assert all(isinstance(record, NewRecord) for record in read(body).records)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b'{"records":[{}]}',
        b'{"records":[{"data":}]}',
        b'{"records":[{"data":1}]',
        b'{"records":[{"data":1,"tag":5}]}',
        b'{"records":[{"data":1},{"data":2}],"node":5}',
        b'{"records":[{"data":"\\ud800"}]}',
        b'{"records":[{"data":1}],"config":{"type":"heap"}}',
        b'{"records":' + b"[" * 100_000,
    ],
)
def test_mistakes_are_reported_by_the_decoder_of_all_fields(body: bytes) -> None:
    request = Request(b"POST", b"/", HEADERS, body)
    with pytest.raises(InvalidRequest) as want:
        bodies.read_json(bodies._WRITE, request)
    with pytest.raises(InvalidRequest) as got:
        bodies.read_write(request)
    assert str(got.value) == str(want.value)
