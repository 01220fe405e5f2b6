"""§4: JSON values are returned as sent, apart from blanks between tokens."""

from __future__ import annotations

import pytest
from tests.contract.topics_server import Api

JSON = {"Content-Type": "application/json"}
TEXTS = [
    "null",
    "true",
    "false",
    "0",
    "-0",
    "-0.0",
    "1e300",
    "-1E-999",
    "0.1000",
    "1.0",
    "1E5",
    "123456789012345678901234567890",
    "-98765432109876543210.123456789012345678901234567890",
    '""',
    '"é€😀"',
    '"\\u00e9\\u20AC\\uD83D\\ude00"',
    '"\\u0000\\/\\b\\f\\n\\r\\t\\"\\\\"',
    '"  blanks  inside  "',
    '"{\\"d\\":1,\\"m\\":2}"',
    "[]",
    "{}",
    "[[],{},[{}]]",
    '{"a":1,"a":2,"a":{"a":3}}',
    '{"z":1,"y":2,"m":3,"d":4,"a":5}',
    '{"":null,"$seq":9,"data":1,"meta":2}',
    "[" * 120 + "]" * 120,
]


def raw_records(api: Api, topic: str) -> bytes:
    """Return the text between the brackets of `records`."""
    content = api.client.post(f"/v0/topics/{topic}/diff").content
    return content.partition(b'"records":[')[2].partition(b'],"next_from_seq"')[0]


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
@pytest.mark.parametrize("durability", ["ephemeral", "disk"])
def test_data_is_returned_as_written(api: Api, topic: str, text: str, durability: str) -> None:
    api.put(topic, durability=durability)
    body = '{"records":[{"data":%s}]}' % text  # noqa: UP031
    api.ask("POST", f"/v0/topics/{topic}", content=body.encode(), headers=JSON)
    assert raw_records(api, topic).endswith(b',"data":%b}' % text.encode())


@pytest.mark.parametrize("text", [one for one in TEXTS if one != "null"], ids=range(len(TEXTS) - 1))
def test_meta_is_returned_as_written(api: Api, topic: str, text: str) -> None:
    for data in ("1", '{"a":0,"m":{"m":1}}', '",\\"m\\":"'):
        body = '{"records":[{"meta":%s,"data":%s}]}' % (text, data)  # noqa: UP031
        answer = api.client.post(f"/v0/topics/{topic}", content=body.encode(), headers=JSON)
        assert answer.status_code in (200, 201)
    records = raw_records(api, topic)
    for data in ("1", '{"a":0,"m":{"m":1}}', '",\\"m\\":"'):
        assert (b',"data":%b,"meta":%b}' % (data.encode(), text.encode())) in records


def test_many_values_in_one_write_keep_their_text_and_order(api: Api, topic: str) -> None:
    texts = TEXTS * 3
    body = '{"records":[%s]}' % ",".join('{"data":%s}' % text for text in texts)  # noqa: UP031
    api.ask("POST", f"/v0/topics/{topic}", status=201, content=body.encode(), headers=JSON)
    records = raw_records(api, topic)
    at = 0
    for text in texts:
        piece = b',"data":%b}' % text.encode()
        at = records.index(piece, at) + len(piece)


def test_only_blanks_between_tokens_are_lost(api: Api, topic: str) -> None:
    body = (
        b'{ "records" : [ { "data" : { "a" : [ 1 ,\r\n\t2.50 ] , " b " : " c " } , "meta" : { "x" : 1 } } ] }'
    )
    api.ask("POST", f"/v0/topics/{topic}", status=201, content=body, headers=JSON)
    assert raw_records(api, topic).endswith(b'"data":{"a":[1,2.50]," b ":" c "},"meta":{"x":1}}')


def test_many_records_with_blanks_lose_only_the_blanks(api: Api, topic: str) -> None:
    one = b'{"data": {"a b": [1, " x , y ", 2.50]}}'
    body = b'{"records": [' + b", ".join([one] * 60) + b"]}"
    api.ask("POST", f"/v0/topics/{topic}", status=201, content=body, headers=JSON)
    assert raw_records(api, topic).count(b'"data":{"a b":[1," x , y ",2.50]}') == 60


@pytest.mark.parametrize("name", ['t"ag\\', "tag\nline\x01", "é😀", "  ", "*"])
def test_tags_and_nodes_are_any_text(api: Api, topic: str, name: str) -> None:
    api.write_records(topic, [{"data": 1, "tag": name, "node": name}])
    (record,) = api.diff(topic, include_tags=True)["records"]
    assert (record["$tag"], record["$node"]) == (name, name)
    assert api.diff(topic, node=name)["records"] == []
    assert api.delete(topic, match=["tag", "Eq", name])["deleted"] == 1


@pytest.mark.parametrize("field", ["data", "meta"])
@pytest.mark.parametrize("text", ["[" * 200 + "]" * 200, "1e400", "9" * 5000], ids=["deep", "large", "long"])
def test_a_value_that_a_later_stage_cannot_decode_is_refused(
    api: Api, topic: str, text: str, field: str
) -> None:
    api.put(topic)
    body = '{"records":[{"data":1,"%s":%s}]}' % (field, text)  # noqa: UP031
    answer = api.client.post(f"/v0/topics/{topic}", content=body.encode(), headers=JSON)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_request")
    assert api.data_of(topic) == []
