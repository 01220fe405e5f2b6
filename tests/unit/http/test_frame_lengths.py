"""The lengths of HTTP/2 frames, for any split of the bytes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.http.h2_stream import FrameLengths

HEADERS, CONTINUATION = 1, 9
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


def frame(length: int, kind: int = 0) -> bytes:
    return length.to_bytes(3, "big") + bytes([kind]) + bytes(5) + b"\xff" * length


@given(st.lists(st.integers(0, 40), max_size=20), st.lists(st.integers(1, 60), max_size=60))
def test_frames_that_are_short_enough_pass_however_they_are_cut(lengths: list[int], cuts: list[int]) -> None:
    stream = PREFACE + b"".join(map(frame, lengths))
    watch = FrameLengths(length_max=40, head_length_max=60, skip=len(PREFACE))
    at = 0
    for cut in [*cuts, len(stream)]:
        assert watch.allow(stream[at : at + cut])
        at += cut


@given(st.lists(st.integers(0, 40), max_size=20), st.integers(1, 60))
def test_a_frame_that_is_too_long_is_seen_by_its_head_alone(lengths: list[int], cut: int) -> None:
    stream = PREFACE + b"".join(map(frame, lengths)) + frame(41)[:9]
    watch = FrameLengths(length_max=40, head_length_max=60, skip=len(PREFACE))
    allowed = [watch.allow(stream[at : at + cut]) for at in range(0, len(stream), cut)]
    assert allowed[:-1] == [True] * (len(allowed) - 1)
    assert allowed[-1] is False


@given(st.integers(0, 40), st.lists(st.integers(0, 40), max_size=6))
def test_the_frames_of_one_head_are_counted_together(first: int, more: list[int]) -> None:
    watch = FrameLengths(length_max=40, head_length_max=60, skip=0)
    assert watch.allow(frame(40, HEADERS))
    allowed = [watch.allow(frame(first, HEADERS)), *(watch.allow(frame(one, CONTINUATION)) for one in more)]
    within = [sum([first, *more[:count]]) <= 60 for count in range(len(more) + 1)]
    assert allowed[: within.count(True)] == [True] * within.count(True)
    if False in within:
        assert allowed[within.index(False)] is False
