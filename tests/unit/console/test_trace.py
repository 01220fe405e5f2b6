"""The path of a record as text, which states what is unknown."""

from __future__ import annotations

from penstock.console.relayed import run_of, sequences_in
from penstock.console.trace import (
    database_step,
    letter_step,
    micro_batch_step,
    relay_step,
    table_step,
    verdict,
)
from penstock.spark import BatchLine, Letter, SinkCommit

LINE = BatchLine(batch=3, at_ms=9, start={0: 4}, end={0: 6}, read=40, dead=1, rows={"lake": 39})
LETTER = Letter(shard=0, sequence=4, index=1, reason="bad", at_ms=5, value=b"\xff", redriven=True)


def commit(has_it: bool | None, text: str = "why") -> SinkCommit:
    return SinkCommit(sink="lake", kind="delta", place="/lake", has_it=has_it, version=7, text=text)


def test_a_relay_has_passed_records_up_to_its_position() -> None:
    assert relay_step("t", 5, "q", "relay:t", 5).state == "passed"
    assert relay_step("t", 6, "q", "relay:t", 5).state == "unknown"
    assert "nothing" in relay_step("t", 1, "q", "relay:t", None).text


def test_only_a_relay_s_metadata_is_a_run() -> None:
    run = run_of(2, b'{"topic":"t","first":11,"last":20,"ts":1}')
    assert run is not None
    assert (run.topic, run.first, run.last, run.start_index) == ("t", 11, 20, 2)
    for other in (b"", b"metrics", b'{"topic":"t","gap":{}}', b"\xff", b"[]", b'{"first":"x"}'):
        assert run_of(0, other) is None


def test_only_records_that_all_carry_a_sequence_have_one() -> None:
    assert sequences_in([b'{"$seq":3,"data":1}', b'{"$seq":4}']) == [3, 4]
    for other in (b"1", b"\xff", b'{"seq":1}', b'{"$seq":"x"}'):
        assert sequences_in([b'{"$seq":3}', other]) == []


def test_a_missing_micro_batch_is_unknown() -> None:
    assert micro_batch_step("p", None, {0: 4}).state == "unknown"
    assert micro_batch_step("p", LINE, None).at_ms == 9


def test_a_table_has_the_record_or_not_or_it_is_unknown() -> None:
    assert table_step(commit(True), None).state == "here"
    assert table_step(commit(False), None).state == "unknown"
    assert table_step(commit(None, "the log was cleaned"), None).text == "the log was cleaned"
    assert table_step(commit(True), LETTER).state == "passed"


def test_a_dead_letter_is_where_the_record_is() -> None:
    step = letter_step(LETTER)
    assert (step.state, step.detail["text"]) == ("here", None)
    assert "redrive" in step.text


def test_a_database_that_does_not_respond_is_unknown() -> None:
    assert database_step("d", 3, 3, is_known=True, error=None).state == "here"
    assert database_step("d", 4, 3, is_known=True, error=None).state == "unknown"
    assert "away" in database_step("d", 1, None, is_known=False, error="away").text


def test_the_verdict_is_the_last_place_where_the_record_is() -> None:
    steps = [relay_step("t", 5, "q", "a", 5), table_step(commit(True), None)]
    assert verdict(steps) == (True, steps[1].text)
    assert verdict([relay_step("t", 6, "q", "a", 5)])[0] is False
    assert verdict([]) == (False, "nothing of the plan knows it")
