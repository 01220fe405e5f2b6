"""Records stored before there was a nesting limit: every reader gets them as text, with their position."""

from __future__ import annotations

import base64
import json

import msgspec
import pytest

from penstock.console.relayed import run_of, sequences_in
from penstock.jsontext import members, stored_problem
from penstock.servers.topics.answers import read_cursor
from penstock.servers.topics.sse import read_id
from penstock.services.relay_batch import identity_of
from penstock.spark.sources.topic_client import _read_page
from penstock.topics.client import models, queues
from penstock.topics.client.watch import Frame, event_of
from penstock.topics.errors import InvalidRequest
from penstock.topics.log.payload import prepare, split_payload
from penstock.topics.model import NewRecord, job_of, unreadable
from penstock.topics.queues.dead_letters import letter_meta
from penstock.topics.routers.copy_frame import ROUTER_KEY, _with_origin

DEEP = b"[" * 5000 + b"]" * 5000
HEAD = b'{"$seq":%d,"$ts":7,"$tag":"a\\"],b",'
PLAIN = HEAD % 1 + b'"data":1}'
BAD = HEAD % 2 + b'"data":null,"meta":{"k":%b}}' % DEEP
WORSE = HEAD % 3 + b'"data":%b,"meta":null}' % DEEP
RECORDS = b",".join((PLAIN, BAD, WORSE))
PAGE = (
    b'{"topic":"t","records":[%b],"next_from_seq":3,"head_seq":3,"earliest_seq":1,"tombstone":null,'
    b'"performance":{"records_scanned":3}}' % RECORDS
)


def _check(found: list[tuple[int, bytes, bytes | None]]) -> None:
    assert found == [(1, b"1", None), (2, b"null", b'{"k":%b}' % DEEP), (3, DEEP, b"null")]


def test_a_page_of_the_client_has_deep_records_as_text() -> None:
    page = models.read_page(PAGE)
    _check([(one.seq, bytes(one.data), one.meta and bytes(one.meta)) for one in page.records()])
    assert [one.tag for one in page.records()] == ['a"],b'] * 3
    assert [None if (bad := unreadable(one)) is None else bad.seq for one in page.fragments] == [None, 2, 3]


def test_a_page_of_the_spark_source_has_deep_records_as_text() -> None:
    page = _read_page(PAGE)
    _check([(one.seq, bytes(one.data), one.meta and bytes(one.meta)) for one in page.records])
    assert (page.next_from_seq, page.head_seq) == (3, 3)


def test_an_event_of_a_watch_has_deep_records_as_text() -> None:
    text = b'{"topic":"t","from_seq":0,"to_seq":3,"head_seq":3,"records":[%b]}' % RECORDS
    event = event_of(Frame(name="record", data=text))
    assert event is not None
    _check([(one.seq, bytes(one.data), one.meta and bytes(one.meta)) for one in event.records()])


def test_a_worker_gets_deep_jobs_as_text() -> None:
    job = b'{"$seq":4,"lease_id":"lease_1","deadline":9,"$ts":7,"deliveries":1,"data":%b}' % DEEP
    claim = queues.claim_result(b'{"topic":"q","claimed":[%b],"ready":0}' % job)
    assert claim.seqs == [4]
    assert [bytes(one.data) for one in claim.jobs()] == [DEEP]
    assert (job_of(job).lease_id, bytes(job_of(job).data)) == ("lease_1", DEEP)


def test_a_deep_job_becomes_a_dead_letter_with_its_meta() -> None:
    meta = b'{"k":%b}' % DEEP
    found = members(bytes(letter_meta(msgspec.Raw(meta), "q", 3, 4)))
    assert found["$dead_letter_meta"] == meta
    assert found["$dead_letter_src_seq"] == b'"4"'


def test_the_letter_of_a_deep_job_can_be_written_as_it_is() -> None:
    data = b'["a b",%b]' % DEEP
    meta = letter_meta(msgspec.Raw(b'{"k":["a b","' + b":" * 200 + b'",%b]}' % DEEP), "q", 3, 4)
    batch = prepare([NewRecord(msgspec.Raw(data), meta=meta)], parsed=True)
    assert list(batch.data) == [data]


def test_ids_and_cursors_with_deep_json_are_invalid() -> None:
    assert read_id(base64.urlsafe_b64encode(DEEP)) == {}
    with pytest.raises(InvalidRequest):
        read_cursor(base64.b64encode(b'{"x":%b,"after":"a"}' % DEEP).decode())


def test_a_router_gives_a_copy_of_deep_meta_its_origin() -> None:
    found = members(_with_origin(b'{"k":%b}' % DEEP, msgspec.Raw(b'{"source_seq":4}')))
    assert found["k"] == DEEP
    assert json.loads(found[ROUTER_KEY]) == {"source_seq": 4}


@pytest.mark.parametrize(
    ("data", "meta"), [(b"null", DEEP), (DEEP, b"null"), (DEEP, DEEP), (b'{"m":1}', b'{"m":%b}' % DEEP)]
)
def test_a_deep_payload_is_split_into_data_and_meta(data: bytes, meta: bytes) -> None:
    # A second member of that name makes parsing necessary.
    assert split_payload(b'{"d":[{"a":0,"m":1},%b],"m":%b}' % (data, meta)) == (
        b'[{"a":0,"m":1},%b]' % data,
        meta,
    )


def test_deep_records_and_metadata_of_a_queue_do_not_belong_to_a_relay() -> None:
    assert sequences_in([BAD]) == []
    assert run_of(0, BAD) is None
    assert identity_of([BAD], "t") is None


def test_a_number_outside_the_range_of_a_float_is_readable() -> None:
    assert stored_problem(b'{"data":1e400}') is None
    assert unreadable(HEAD % 1 + b'"data":[1e400,-1e999999]}') is None
    assert stored_problem(b"[%b]" % (b"9" * 5000)) == "has a number of 5000 digits"
