"""The limits of depth and numbers, exact for strings and escapes."""

from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import InvalidInput
from penstock.jsontext import check_json, json_depth, json_problem, parts_problem, shallow
from penstock.limits import JSON_DEPTH_MAX

PADDING = b'"' + b"x" * 5000 + b'"'
"""Pads a text so that the search uses arrays."""


def nested(levels: int) -> bytes:
    return b"[" * levels + b"]" * levels


def test_text_of_128_levels_is_accepted_and_of_129_refused() -> None:
    check_json(nested(JSON_DEPTH_MAX))
    check_json(b'{"a":' * 128 + b"1" + b"}" * 128)
    with pytest.raises(InvalidInput, match="the body is nested more than 128 levels deep"):
        check_json(nested(JSON_DEPTH_MAX + 1))
    with pytest.raises(InvalidInput, match="line 3 is nested"):
        check_json(b'{"a":' * 129 + b"1" + b"}" * 129, "line 3")


@pytest.mark.parametrize("text", [b'"%b"', b'{"\\"%b":1}', b'["\\\\\\"%b"]', b'["\\\\","%b"]'])
def test_brackets_in_strings_do_not_count_as_levels(text: bytes) -> None:
    whole = text % nested(200)
    json.loads(whole)
    assert json_problem(whole) is None


def test_closing_brackets_in_strings_do_not_hide_levels() -> None:
    assert json_problem(b'{"}":' * 129 + b"1" + b"}" * 129) is not None


NUMBERS = [
    (b"9" * 1000, True),
    (b"-" + b"9" * 1000, True),
    (b"9" * 1001, False),
    (b"9" * 5000, False),
    (b"1e308", True),
    (b"1e309", False),
    (b"-1E+400", False),
    (b"1e-400", True),
    (b"1e-9999", False),
    (b"0.1e00000000001", True),
    (b"1" * 400 + b".5", False),
    (b'"1e400"', True),
    (b'"a,1e400,b"', True),
    (b'"\\",1e400,"', True),
    (b'"' + b"1" * 5000 + b'"', True),
]


@pytest.mark.parametrize(("number", "taken"), NUMBERS)
@pytest.mark.parametrize("form", [b"%b", b"[1,%b]", b'{"a": %b }', b"[%b," + PADDING + b"]"])
def test_numbers_beyond_the_range_of_decoders_are_refused(number: bytes, taken: bool, form: bytes) -> None:
    assert (json_problem(form % number) is None) is taken


@given(
    st.recursive(
        st.none() | st.floats(allow_nan=False, allow_infinity=False) | st.integers() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
        max_leaves=30,
    ),
    st.booleans(),
)
def test_the_measured_depth_is_exact_and_accepted_text_decodes(value: object, ascii_only: bool) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")

    def depth(node: object) -> int:
        children = node.values() if isinstance(node, dict) else node if isinstance(node, list) else None
        return 0 if children is None else 1 + max(map(depth, children), default=0)

    assert json_depth(text) == depth(value)
    assert json_problem(text) is None


@given(st.integers(0, 400), st.integers(-450, 450), st.integers(0, 1200), st.sampled_from([b"", b".5"]))
def test_text_within_the_limits_decodes_everywhere(
    levels: int, exponent: int, digits: int, point: bytes
) -> None:
    number = b"1" + b"0" * digits + point + (b"e%d" % exponent if exponent else b"")
    text = b"[" * levels + number + b"]" * levels
    if json_problem(text) is None:
        assert "inf" not in repr(json.loads(text))
        msgspec.json.decode(text)


def test_parts_of_a_body_are_held_to_the_same_limit() -> None:
    def body(levels: int) -> tuple[bytes, list[bytes]]:
        parts = [b"{}"] * 200 + [nested(levels)]
        return b'{"records":[%b]}' % b",".join(b'{"data":%b}' % part for part in parts), parts

    assert parts_problem(*body(125), levels=3) is None
    assert parts_problem(*body(126), levels=3) is not None


def test_text_of_any_depth_is_read_without_its_deep_parts() -> None:
    deep = nested(5000)
    text = b'{"$seq":7,"data":%b,"s":"[{\\"","l":[1]}' % deep
    found = shallow(text, 1)
    assert json.loads(found.text) == {"$seq": 7, "data": None, "s": '[{"', "l": None}
    assert found.cut == [deep, b"[1]"]
