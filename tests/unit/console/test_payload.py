"""The display of bytes: as text if possible, cut if long, and in base64."""

from __future__ import annotations

import base64

from hypothesis import given
from hypothesis import strategies as st

from penstock.console.app import payload_fields, text_fields
from penstock.console.http_poller import Exposition


def test_text_stays_text() -> None:
    assert text_fields(b"<b>hi</b>") == {"text": "<b>hi</b>", "cut": False}


def test_long_text_is_cut_with_a_mark_and_never_within_a_character() -> None:
    fields = text_fields("é".encode() * 10, 5)
    assert fields == {"text": "éé", "cut": True}


def test_bytes_that_are_not_text_are_only_base64() -> None:
    fields = payload_fields(b"\xff\x00")
    assert (fields["text"], fields["bytes_b64"], fields["size"]) == (None, "/wA=", 2)


@given(st.binary(max_size=50), st.integers(0, 60))
def test_only_the_first_bytes_are_shown(data: bytes, most: int) -> None:
    fields = payload_fields(data, most)
    assert data.startswith(base64.b64decode(str(fields["bytes_b64"])))
    assert fields["cut"] is (len(data) > most)
    if fields["text"] is not None:
        assert data.startswith(str(fields["text"]).encode())


def test_metrics_are_read_from_their_text() -> None:
    text = '# TYPE a counter\na{x="1",y="q\\"}"} 2\na{x="2"} 3\nb 1.5\nbroken{\nc NaNs\n'
    found = Exposition(text)
    assert found.total("a") == 5
    assert found.total("a", x="2") == 3
    assert found.by("a", "x") == {"1": 2, "2": 3}
    assert (found.total("b"), found.total("c"), found.total("nothing")) == (1.5, None, None)


def test_a_metric_is_not_confused_with_one_of_a_longer_name() -> None:
    found = Exposition('a_total 7\n# a 9\nxa 5\na{of="a 4"} 1\r\na\t2')
    assert (found.total("a"), found.total("a_total")) == (3, 7)
    assert found.by("a", "of") == {"a 4": 1, "": 2}
