"""§1.3: every hard limit at its boundary."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.contract.topics_server import Api

MIB = 1024**2


def refuse_record(api: Api, topic: str, code: str, **record: object) -> Any:
    body = {"records": [{"data": 1, **record}]}
    error = api.refused("POST", f"/v0/topics/{topic}", body, status=400)
    assert error["code"] == code
    return error


def test_a_write_has_at_most_ten_thousand_records(api: Api, topic: str) -> None:
    answer = api.write(topic, *range(10_000))
    assert (answer["count"], answer["last_seq"]) == (10_000, 10_000)
    assert answer["seqs"] == list(range(1, 10_001))
    body = {"records": [{"data": 1}] * 10_001}
    assert api.refused("POST", f"/v0/topics/{topic}", body, status=400)["code"] == "batch_too_large"
    assert api.state(topic)["head_seq"] == 10_000


def test_a_record_of_exactly_one_mebibyte_is_allowed(api: Api, topic: str) -> None:
    text = "x" * (MIB - 2)
    api.write(topic, text)
    assert api.state(topic)["bytes"] == MIB
    refuse_record(api, topic, "record_too_large", data=text + "x")


def test_data_and_meta_are_counted_together(api: Api, topic: str) -> None:
    meta = {"m": "y" * 93}
    size = len(json.dumps(meta, separators=(",", ":")))
    text = "x" * (MIB - 2 - size)
    api.write_records(topic, [{"data": text, "meta": meta}])
    assert api.state(topic)["bytes"] == MIB
    refuse_record(api, topic, "record_too_large", data=text + "x", meta=meta)


def test_blanks_between_tokens_do_not_count(api: Api, topic: str) -> None:
    body = b'{"records":[{"data":[' + b" " * MIB + b'1 ,\n\t2 ] , "meta" : { "a" : " b " } }]}'
    headers = {"Content-Type": "application/json"}
    api.ask("POST", f"/v0/topics/{topic}", status=201, content=body, headers=headers)
    assert api.state(topic)["bytes"] == len('[1,2]{"a":" b "}')


def test_escapes_count_as_the_characters_they_stand_for(api: Api, topic: str) -> None:
    body = rb'{"records":[{"data":"\u00e9\u20ac\ud83d\ude00\u0041\/\n"}]}'
    headers = {"Content-Type": "application/json"}
    api.ask("POST", f"/v0/topics/{topic}", status=201, content=body, headers=headers)
    assert api.state(topic)["bytes"] == len('"é€😀A/\\n"'.encode())


def test_tag_node_and_framing_do_not_count(api: Api, topic: str) -> None:
    api.write_records(topic, [{"data": 1, "tag": "t" * 256, "node": "n" * 128}])
    assert api.state(topic)["bytes"] == 1


def test_meta_has_at_most_sixteen_kibibytes(api: Api, topic: str) -> None:
    filler = "y" * (16 * 1024 - len('{"m":""}'))
    api.write_records(topic, [{"data": 1, "meta": {"m": filler}}])
    refuse_record(api, topic, "invalid_request", meta={"m": filler + "y"})


def test_meta_has_at_most_sixty_four_keys(api: Api, topic: str) -> None:
    keys = {f"k{number}": {"a": 1, "b": 2} for number in range(64)}
    api.write_records(topic, [{"data": 1, "meta": keys}])
    refuse_record(api, topic, "invalid_request", meta=keys | {"one": "more"})


@pytest.mark.parametrize("character", ["x", "é"])
def test_a_tag_has_at_most_256_bytes(api: Api, topic: str, character: str) -> None:
    fits = 256 // len(character.encode())
    api.write_records(topic, [{"data": 1, "tag": character * fits}])
    refuse_record(api, topic, "invalid_request", tag=character * (fits + 1))


@pytest.mark.parametrize("character", ["x", "é"])
def test_a_node_has_at_most_128_bytes(api: Api, topic: str, character: str) -> None:
    fits = 128 // len(character.encode())
    long = character * (fits + 1)
    api.write_records(topic, [{"data": 1, "node": character * fits}], node=character * fits)
    refuse_record(api, topic, "invalid_request", node=long)
    body = {"records": [{"data": 1}], "node": long}
    assert api.refused("POST", f"/v0/topics/{topic}", body, status=400)["code"] == "invalid_request"
    for node in (long, ["a", long]):
        error = api.refused("POST", f"/v0/topics/{topic}/diff", {"node": node}, status=400)
        assert error["code"] == "invalid_request"


@pytest.mark.parametrize("where", ["body", "header"])
def test_an_idempotency_key_has_at_most_256_bytes(api: Api, topic: str, where: str) -> None:
    for key, status in (("k" * 256, 201), ("k" * 257, 400)):
        body: dict[str, object] = {"records": [{"data": 1}]}
        headers = {"Content-Type": "application/json"}
        if where == "body":
            body["idempotency_key"] = key
        else:
            headers["Idempotency-Key"] = key
        api.ask("POST", f"/v0/topics/{topic}", body, status=status, headers=headers)


def test_one_record_over_a_limit_refuses_the_whole_write(api: Api, topic: str) -> None:
    records = [{"data": 1}, {"data": 2, "tag": "x" * 257}, {"data": 3}]
    api.write_records(topic, records, status=400)
    api.state(topic, status=404)


def test_a_diff_returns_256_records_by_default_and_at_most_1000(h1: Api, topic: str) -> None:
    h1.write(topic, *range(1500))
    assert len(h1.seqs_of(topic)) == 256
    for limit, delivered in ((0, 256), (1, 1), (1000, 1000), (1001, 1000), (2**32 - 1, 1000)):
        page = h1.diff(topic, limit=limit)
        assert len(page["records"]) == delivered
        assert (page["next_from_seq"], page["lag"]) == (delivered, 1500 - delivered)
        assert page["caught_up"] is False


def test_a_diff_returns_one_mebibyte_by_default_and_at_most_eight(h1: Api, topic: str) -> None:
    text = "x" * (256 * 1024 - 2)
    for _ in range(9):
        h1.write(topic, *[text] * 4)
    for asked, delivered in ((0, 4), (1, 1), (2 * MIB, 8), (8 * MIB, 32), (2**64 - 1, 32)):
        assert len(h1.seqs_of(topic, max_batch_bytes=asked)) == delivered


def test_a_record_larger_than_the_batch_is_delivered_alone(api: Api, topic: str) -> None:
    api.write(topic, "x" * 100, "y")
    page = api.diff(topic, max_batch_bytes=10)
    assert (len(page["records"]), page["next_from_seq"], page["caught_up"]) == (1, 1, False)


def test_a_list_has_100_topics_by_default_and_between_1_and_1000(h1: Api, topic: str) -> None:
    for number in range(102):
        h1.put(f"{topic}.{number}", durability="ephemeral")
    for size, listed in ((None, 100), ("0", 1), ("1", 1), ("101", 101), ("5000", 102)):
        query = {"prefix": f"{topic}."} | ({} if size is None else {"page_size": size})
        page = h1.ask("GET", "/v0/topics", params=query)
        assert len(page["topics"]) == listed
        assert ("next_cursor" in page) is (listed < 102)
