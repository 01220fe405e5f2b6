"""The bodies of frames that are not records."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.errors import Corrupt
from penstock.topics.log.control import (
    Deletion,
    TopicChange,
    Watermarks,
    read_head_watermark,
    write_head_watermark,
)
from penstock.topics.model import Predicate

DELETIONS = [
    Deletion(before_seq=5, bound_head=9),
    Deletion(match=Predicate(value="a\u00e9"), bound_head=1),
    Deletion(match=Predicate(value="", is_prefix=True), before_seq=2**64 - 1),
    Deletion(seqs=np.array([1, 2**64 - 1], np.uint64)),
    Deletion(),
]


def test_the_bodies_have_the_bytes_of_the_format() -> None:
    assert TopicChange(name="ab", config=b"{}").encode().hex() == "02000000" + "6162" + "02000000" + "7b7d"
    assert Watermarks(cap=1, earliest_seq=2, ttl=3).encode().hex() == (
        "0100000000000000" + "0200000000000000" + "0300000000000000"
    )
    deletion = Deletion(
        before_seq=3, match=Predicate(value="p", is_prefix=True), seqs=np.array([7], np.uint64)
    )
    assert deletion.encode().hex() == (
        "01" + "0300000000000000" + "01" + "01" + "01000000" + "70" + "01000000" + "0700000000000000" + "00"
    )


@pytest.mark.parametrize("deletion", DELETIONS)
def test_a_deletion_round_trips(deletion: Deletion) -> None:
    read = Deletion.decode(deletion.encode())
    assert read == deletion
    assert (read.before_seq, read.match, read.bound_head) == (
        deletion.before_seq,
        deletion.match,
        deletion.bound_head,
    )
    assert read.seqs.tolist() == deletion.seqs.tolist()


def test_a_topic_change_round_trips() -> None:
    for change in (
        TopicChange(name="t", config=b'{"x":1}'),
        TopicChange(name="t"),
        TopicChange(name="t", config=b"{}", lost_seq=2**40),
    ):
        assert TopicChange.decode(change.encode()) == change


def test_the_trim_floor_is_encoded_only_when_it_has_moved() -> None:
    short, long = Watermarks(cap=1, earliest_seq=2, ttl=3), Watermarks(cap=1, earliest_seq=2, ttl=3, trim=9)
    assert (len(short.encode()), len(long.encode())) == (24, 32)
    assert [Watermarks.decode(one.encode()) for one in (short, long)] == [short, long]


def test_a_reserved_head_round_trips() -> None:
    assert read_head_watermark(write_head_watermark(2**40)) == 2**40


@pytest.mark.parametrize(
    ("decode", "body"),
    [
        *((Deletion.decode, deletion.encode()) for deletion in DELETIONS),
        (TopicChange.decode, TopicChange(name="ab", config=b"{}").encode()),
        (Watermarks.decode, Watermarks(cap=1, earliest_seq=1, ttl=1, trim=2).encode()),
        (read_head_watermark, write_head_watermark(7)),
    ],
)
def test_a_truncated_or_too_long_body_is_corrupt(decode, body: bytes) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(Corrupt, match="damaged"):
        decode(body + b"\0")
    for size in range(len(body)):
        if decode == Watermarks.decode and size == 24:
            continue
        with pytest.raises(Corrupt, match="ends too early"):
            decode(body[:size])


def test_unknown_values_are_corrupt() -> None:
    with pytest.raises(Corrupt, match="neither absent"):
        Deletion.decode(b"\2")
    with pytest.raises(Corrupt, match="unknown operator 2"):
        Deletion.decode(b"\0\1\2")
    with pytest.raises(Corrupt, match="not UTF-8"):
        TopicChange.decode(b"\1\0\0\0\xff\0\0\0\0")
