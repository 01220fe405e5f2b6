"""The position in a source: its record, and the order that deltas enforce."""

from __future__ import annotations

import pytest

from penstock.coordinator.position import FedSource, Position
from penstock.errors import Corrupt, InvalidInput


@pytest.mark.parametrize("position", [Position(0), Position(2**64 - 1, "s3://bucket/é|ingest/manifest")])
def test_a_position_is_read_as_it_was_written(position: Position) -> None:
    assert Position.decode(position.encode()) == position


def test_a_position_of_eight_bytes_has_no_name() -> None:
    assert Position.decode(b"\x07" + bytes(7)) == Position(7)


@pytest.mark.parametrize("value", [b"", b"1234567", bytes(8) + b"\xff"], ids=["empty", "short", "no text"])
def test_a_damaged_position_is_corrupt(value: bytes) -> None:
    with pytest.raises(Corrupt):
        Position.decode(value)


@pytest.mark.parametrize("sequence", [-1, 2**64, True])
def test_a_position_is_a_number_that_can_be_stored(sequence: int) -> None:
    with pytest.raises(InvalidInput):
        Position(sequence)


def take(source: FedSource, sequence: int, name: str = "q", error: Exception | None = None) -> None:
    with source.taking(Position(sequence, name)):
        if error is not None:
            raise error


def test_a_position_never_goes_back() -> None:
    source = FedSource(Position(3, "q"))
    for sequence in (2, 3):
        with pytest.raises(InvalidInput, match="is not after 3, which is stored"):
            take(source, sequence)
    take(source, 4)
    assert source.position == Position(4, "q")


def test_nothing_is_taken_after_a_refused_batch() -> None:
    source = FedSource(Position(3, "q"))
    with pytest.raises(ValueError, match="no good"):
        take(source, 4, error=ValueError("no good"))
    with pytest.raises(InvalidInput, match="cannot be stored before 4, which was refused"):
        take(source, 5)
    assert source.position == Position(3, "q")
    take(source, 4)
    take(source, 5)


def test_a_position_without_a_name_gets_one_with_the_next_batch() -> None:
    source = FedSource(Position(3))
    with pytest.raises(InvalidInput):
        take(source, 3)
    take(source, 4)
    assert source.position == Position(4, "q")


def test_another_source_begins_at_its_own_beginning() -> None:
    source = FedSource(Position(3, "old"))
    take(source, 0, "new")
    assert source.position == Position(0, "new")


def test_a_write_without_a_position_changes_nothing() -> None:
    source = FedSource(Position(3, "q"))
    with source.taking(None):
        pass
    assert source.position == Position(3, "q")
