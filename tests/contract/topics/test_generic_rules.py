"""§1 and §1.1: content types, empty bodies, field typing, query values, names, routing misses."""

from __future__ import annotations

from typing import Any

import pytest
from tests.contract.raw_http import connect, request_bytes
from tests.contract.topics_server import Api, Server, check_answer

RECORDS = [{"data": 1}]
WRITE = b'{"records":[{"data":1}]}'


# --- content type ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("endpoint", ["POST ", "POST /diff", "POST /delete", "PUT "])
@pytest.mark.parametrize("content_type", [None, "text/plain", "application/x-www-form-urlencoded", "json"])
def test_a_body_that_is_not_declared_as_json_gets_415(
    api: Api, topic: str, endpoint: str, content_type: str | None
) -> None:
    method, _, tail = endpoint.partition(" ")
    headers = {} if content_type is None else {"Content-Type": content_type}
    error = api.refused(
        method, f"/v0/topics/{topic}{tail}", status=415, content=b"{not json", headers=headers
    )
    assert error["code"] == "unsupported_media_type"


@pytest.mark.parametrize("content_type", ["application/json", "application/json; charset=utf-8"])
def test_json_may_have_parameters(api: Api, topic: str, content_type: str) -> None:
    headers = {"Content-Type": content_type}
    api.ask("POST", f"/v0/topics/{topic}", status=201, content=WRITE, headers=headers)


def test_json_may_have_blanks_before_it(server: Server, topic: str) -> None:
    with connect(server) as raw:
        headers = {"Content-Type": "   application/json"}
        raw.send(request_bytes("POST", f"/v0/topics/{topic}", WRITE, headers))
        assert raw.reply().status == 201


def test_the_content_type_is_checked_before_the_body(api: Api, topic: str) -> None:
    for body in (b"{not json", WRITE, b"\xff"):
        error = api.refused("POST", f"/v0/topics/{topic}", status=415, content=body)
        assert error["code"] == "unsupported_media_type"
    api.state(topic, status=404)


def test_an_empty_body_needs_no_content_type_on_put_and_diff(api: Api, topic: str) -> None:
    assert api.ask("PUT", f"/v0/topics/{topic}", status=201)["config"]["ttl_ms"] == 0
    assert api.ask("POST", f"/v0/topics/{topic}/diff")["records"] == []


def test_an_empty_body_is_neither_a_write_nor_a_delete(api: Api, topic: str) -> None:
    api.put(topic)
    for tail in ("", "/delete"):
        path = f"/v0/topics/{topic}{tail}"
        assert api.refused("POST", path, status=415)["code"] == "unsupported_media_type"
        headers = {"Content-Type": "application/json"}
        error = api.refused("POST", path, status=400, content=b"", headers=headers)
        assert error["code"] == "invalid_request"


# --- JSON --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body",
    [
        b"{",
        b"[]",
        b"null",
        b'"text"',
        b'{"records":[{"data":1}]} x',
        b'{"records":[{"data":01}]}',
        b'{"records":[{"data":NaN}]}',
        b"{'records':[]}",
        b'{"records":[{"data":"\xff"}]}',
        b'{"records":[{"data":"\xed\xa0\x80"}]}',
        b'{"records":[{"data":"a\nb"}]}',
        b'{"records":[{"data":' + b"[" * 100_000 + b"]" * 100_000 + b"}]}",
        b'\xef\xbb\xbf{"records":[{"data":1}]}',
    ],
)
def test_a_body_that_is_not_a_json_object_gets_400(api: Api, topic: str, body: bytes) -> None:
    headers = {"Content-Type": "application/json"}
    error = api.refused("POST", f"/v0/topics/{topic}", status=400, content=body, headers=headers)
    assert error["code"] == "invalid_request"
    api.state(topic, status=404)


def test_unknown_fields_are_ignored_everywhere(api: Api, topic: str) -> None:
    api.put(topic, colour="red", ttl_ms=0)
    api.write_records(topic, [{"data": 1, "colour": "red"}], colour="red", return_seqs=False)
    assert api.data_of(topic, colour="red") == [1]
    assert api.delete(topic, colour="red", before_seq=2)["deleted"] == 1


# --- field types -------------------------------------------------------------------------------------------

_INTEGERS = {
    "PUT ": [
        "ttl_ms",
        "cap_records",
        "cap_bytes",
        "idempotency_window_ms",
        "lease_ms",
        "claim_jitter_ms",
        "max_deliveries",
    ],
    "POST /diff": ["from_seq", "limit", "wait_ms", "max_batch_bytes"],
    "POST /delete": ["before_seq"],
}
_BOOLEANS = {
    "PUT ": ["durable", "auto_priority", "auto_create", "dedupe_node", "leases_durable"],
    "POST /diff": ["include_tags", "include_meta"],
}
_NULL_IS_FINE = {"before_seq"}


def cases(fields: dict[str, list[str]]) -> list[tuple[str, str]]:
    return [(endpoint, field) for endpoint, names in fields.items() for field in names]


def refuse_values(api: Api, topic: str, endpoint: str, field: str, values: list[Any]) -> None:
    api.put(topic)
    method, _, tail = endpoint.partition(" ")
    for value in values:
        body = {field: value}
        if tail == "/delete":
            body["match"] = "tag"
        error = api.refused(method, f"/v0/topics/{topic}{tail}", body, status=400)
        assert error["code"] == "invalid_request", value


@pytest.mark.parametrize(("endpoint", "field"), cases(_INTEGERS))
def test_an_integer_is_a_json_integer_in_its_range(api: Api, topic: str, endpoint: str, field: str) -> None:
    wrong: list[Any] = [-1, 1.0, 1.5, 1e3, True, "1", [], {}, 2**64, 2**70]
    if field not in _NULL_IS_FINE:
        wrong.append(None)
    if field in ("limit", "wait_ms"):
        wrong.append(2**32)
    refuse_values(api, topic, endpoint, field, wrong)


@pytest.mark.parametrize("field", ["ttl_ms", "cap_records", "cap_bytes", "idempotency_window_ms"])
def test_the_largest_integer_of_a_config_is_kept_exactly(api: Api, topic: str, field: str) -> None:
    assert api.put(topic, **{field: 2**64 - 1})["config"][field] == 2**64 - 1
    assert api.state(topic)["config"][field] == 2**64 - 1


@pytest.mark.parametrize(("endpoint", "field"), cases(_BOOLEANS))
def test_a_boolean_is_true_or_false_and_nothing_else(api: Api, topic: str, endpoint: str, field: str) -> None:
    refuse_values(api, topic, endpoint, field, [0, 1, "true", None, [], {}])


@pytest.mark.parametrize("field", ["create", "disable_backpressure"])
def test_the_booleans_of_a_write_are_strict(api: Api, topic: str, field: str) -> None:
    for value in (0, 1, "true", []):
        body = {"records": RECORDS, field: value}
        assert api.refused("POST", f"/v0/topics/{topic}", body, status=400)["code"] == "invalid_request"


@pytest.mark.parametrize("field", ["type", "discard", "durability"])
def test_a_choice_has_no_other_values(api: Api, topic: str, field: str) -> None:
    wrong = ["other", "", "LOG", 1, True, [], {}]
    refuse_values(api, topic, "PUT ", field, wrong if field == "durability" else [*wrong, None])


@pytest.mark.parametrize("value", [2**31, -(2**31) - 1, 1.5, "1", True])
def test_a_priority_is_a_signed_integer_of_32_bits(api: Api, topic: str, value: object) -> None:
    refuse_values(api, topic, "PUT ", "priority", [value])


@pytest.mark.parametrize(
    "record",
    [
        {},
        {"tag": "x"},
        {"data": 1, "tag": 1},
        {"data": 1, "node": 1},
        {"data": 1, "tag": ["x"]},
        1,
        "text",
        None,
        [1],
    ],
)
def test_a_record_has_data_and_text_for_tag_and_node(api: Api, topic: str, record: object) -> None:
    error = api.refused("POST", f"/v0/topics/{topic}", {"records": [record]}, status=400)
    assert error["code"] == "invalid_request"


@pytest.mark.parametrize("records", [None, {}, "x", 1, True])
def test_records_is_an_array(api: Api, topic: str, records: object) -> None:
    error = api.refused("POST", f"/v0/topics/{topic}", {"records": records}, status=400)
    assert error["code"] == "invalid_request"


def test_a_write_without_records_is_refused(api: Api, topic: str) -> None:
    for body in ({}, {"records": []}):
        assert api.refused("POST", f"/v0/topics/{topic}", body, status=400)["code"] == "invalid_request"
    api.state(topic, status=404)


def test_null_is_accepted_where_the_contract_lists_it(api: Api, topic: str) -> None:
    api.put(topic, priority=None, durability=None, dead_letter=None)
    nulls = {"tag": None, "node": None, "meta": None}
    api.write_records(
        topic, [{"data": None, **nulls}], node=None, idempotency_key=None, create=None, config=None
    )
    page = api.diff(topic, node=None, include_tags=True)
    assert [record.keys() for record in page["records"]] == [{"$seq", "$ts", "data"}]
    assert api.delete(topic, before_seq=None, match="tag")["deleted"] == 0
    assert api.delete(topic, before_seq=2, match=None)["deleted"] == 1


@pytest.mark.parametrize("node", [1, True, {}, [1], ["a", None]])
def test_the_node_of_a_reader_is_text_or_a_list_of_texts(api: Api, topic: str, node: object) -> None:
    api.put(topic)
    assert api.refused("POST", f"/v0/topics/{topic}/diff", {"node": node}, status=400)["code"] == (
        "invalid_request"
    )


def test_half_a_surrogate_pair_is_invalid_everywhere(api: Api, topic: str) -> None:
    api.write(topic, 1)
    headers = {"Content-Type": "application/json"}
    for tail, body in (
        ("", rb'{"records":[{"data":"\ud800"}]}'),
        ("", rb'{"records":[{"data":1,"meta":{"a":"\udc00"}}]}'),
        ("", rb'{"records":[{"data":1,"tag":"\ud800"}]}'),
        ("", rb'{"records":[{"data":1,"node":"\udc00x"}]}'),
        ("", rb'{"records":[{"data":1}],"node":"\ud800"}'),
        ("", rb'{"records":[{"data":1}],"idempotency_key":"\ud800"}'),
        ("/diff", rb'{"node":"\ud800"}'),
        ("/delete", rb'{"match":"\ud800"}'),
    ):
        error = api.refused("POST", f"/v0/topics/{topic}{tail}", status=400, content=body, headers=headers)
        assert error["code"] == "invalid_request", body
    assert api.state(topic)["count"] == 1


# --- queries -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("value", "shown"), [("true", True), ("1", True), ("false", False), ("0", False)])
def test_a_query_boolean_is_a_word_or_a_digit(api: Api, topic: str, value: str, shown: bool) -> None:
    answer = api.ask("POST", f"/v0/topics/{topic}?return_seqs={value}", {"records": RECORDS}, status=201)
    assert ("seqs" in answer) is shown


@pytest.mark.parametrize("value", ["", "TRUE", "False", "yes", "no", "2", "-1", "%20false"])
def test_any_other_query_boolean_is_the_default(api: Api, topic: str, value: str) -> None:
    answer = api.ask("POST", f"/v0/topics/{topic}?return_seqs={value}", {"records": RECORDS}, status=201)
    assert "seqs" in answer
    assert api.remove(topic, if_empty=value)["deleted"]


@pytest.mark.parametrize("value", ["", "x", "1.5", "-1", "1e3", "0x10", "99999999999999999999999"])
def test_an_invalid_query_number_is_the_default(api: Api, topic: str, value: str) -> None:
    for number in range(3):
        api.put(f"{topic}.{number}")
    listed = api.ask("GET", "/v0/topics", params={"prefix": f"{topic}.", "page_size": value})
    assert len(listed["topics"]) == 3


# --- names -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a", "Z9", "0", "a._:-", "x" * 255, "a" + ":" * 20])
def test_valid_topic_names_are_accepted(api: Api, name: str) -> None:
    assert api.put(name)["topic"] == name
    api.remove(name)


@pytest.mark.parametrize(
    "name",
    [
        "x" * 256,
        ".a",
        "-a",
        "_a",
        ":a",
        "a%20b",
        "a%2Fb",
        "%C3%A9",
        "a%3Eb",
        "a%00",
        "%FF",
        "a%0A",
        "a@b",
        "a*",
    ],
)
def test_invalid_topic_names_are_refused_and_nothing_is_created(api: Api, name: str) -> None:
    assert api.refused("PUT", f"/v0/topics/{name}", {}, status=400)["code"] == "invalid_request"
    error = api.refused("POST", f"/v0/topics/{name}", {"records": RECORDS}, status=400)
    assert error["code"] == "invalid_request"


def test_an_invalid_name_is_not_found_where_nothing_would_be_created(api: Api) -> None:
    for method, tail, body in (
        ("GET", "", None),
        ("POST", "/diff", {}),
        ("POST", "/delete", {"before_seq": 1}),
    ):
        error = api.refused(method, f"/v0/topics/a%20b{tail}", body, status=404)
        assert (error["code"], error["detail"]) == ("topic_not_found", {"topic": "a b"})
    body = {"records": RECORDS, "create": False}
    assert api.refused("POST", "/v0/topics/a%20b", body, status=404)["code"] == "topic_not_found"
    assert api.remove("a%20b")["deleted"] is False


def test_names_are_percent_decoded_before_use(api: Api, topic: str) -> None:
    api.put(f"{topic}%3Ax%2d%2D")
    assert api.state(f"{topic}:x--")["topic"] == f"{topic}:x--"
    api.write(f"{topic}%3ax--", 1)
    assert api.data_of(f"{topic}:x--") == [1]


def test_names_are_case_sensitive(api: Api, topic: str) -> None:
    api.put(topic)
    api.state(topic.upper(), status=404)


# --- routing misses ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/v0",
        "/v0/",
        "/v1/topics",
        "/v0/topics/",
        "/v0/topics/x/unknown",
        "/v0/topics/x/diff/",
        "/v0//topics",
    ],
)
def test_an_unknown_path_gets_404(api: Api, path: str) -> None:
    assert api.refused("GET", path, status=404)["code"] == "not_found"


@pytest.mark.parametrize(
    ("method", "tail"),
    [
        ("PUT", "/x/diff"),
        ("GET", "/x/diff"),
        ("DELETE", "/x/diff"),
        ("PUT", "/x/delete"),
        ("GET", "/x/delete"),
        ("PATCH", "/x"),
        ("POST", ""),
        ("PUT", ""),
        ("DELETE", ""),
        ("TRACE", "/x"),
        ("OPTIONS", "/x"),
    ],
)
def test_a_known_path_with_another_method_gets_405(api: Api, method: str, tail: str) -> None:
    assert api.refused(method, f"/v0/topics{tail}", status=405)["code"] == "method_not_allowed"


def test_a_head_request_gets_405_without_a_body(api: Api) -> None:
    response = api.client.head("/v0/health")
    assert response.status_code == 405
    check_answer(response)
    assert response.content == b""


def test_a_missing_topic_is_named_in_the_detail(api: Api, topic: str) -> None:
    for method, tail, body in (
        ("GET", "", None),
        ("POST", "/diff", {}),
        ("POST", "/delete", {"before_seq": 1}),
        ("POST", "", {"records": RECORDS, "create": False}),
    ):
        error = api.refused(method, f"/v0/topics/{topic}{tail}", body, status=404)
        assert error["code"] == "topic_not_found"
        assert error["detail"] == {"topic": topic}
        assert error["message"] == f'topic "{topic}" does not exist'
