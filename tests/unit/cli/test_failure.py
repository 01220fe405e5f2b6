from __future__ import annotations

import pytest

from penstock import errors
from penstock.buffer import errors as buffer_errors
from penstock.cli.failure import EXIT_CODES_HELP, ExitCode, exit_code, hint

CASES = [
    (errors.ConfigError, 2),
    (errors.InvalidInput, 2),
    (errors.LimitExceeded, 2),
    (errors.NotFound, 2),
    (errors.PermissionDenied, 2),
    (errors.Unsupported, 2),
    (errors.Unavailable, 3),
    (errors.StorageFull, 3),
    (errors.Conflict, 3),
    (errors.Fenced, 4),
    (errors.Corrupt, 5),
    (errors.OutcomeUnknown, 6),
    (buffer_errors.BatchMissing, 5),
    (buffer_errors.RetriesExhausted, 3),
    (buffer_errors.SerializationError, 5),
    (buffer_errors.StorageRejected, 2),
    (buffer_errors.OutcomeUnknown, 6),
    (buffer_errors.FencedError, 4),
]


@pytest.mark.parametrize(("kind", "code"), CASES)
def test_each_error_has_its_exit_code(kind: type[errors.PenstockError], code: int) -> None:
    assert exit_code(kind("text")) == code


@pytest.mark.parametrize("kind", [kind for kind, _ in CASES])
def test_no_hint_for_topics_mentions_a_store(kind: type[errors.PenstockError]) -> None:
    told = hint(kind("text"), "topics")
    assert "STORE" not in told
    assert "buffer" not in told
    assert "somebody else wrote first" not in told


def test_the_hint_for_damage_names_the_command_of_its_group() -> None:
    damage = errors.Corrupt("text")
    assert "`penstock topics verify`" in hint(damage, "topics")
    assert "`penstock buffer fsck STORE`" in hint(damage, "buffer")
    assert "`penstock buffer fsck STORE`" in hint(damage, "audit")


def test_every_exit_code_is_documented() -> None:
    for code in ExitCode:
        assert f"  {code.value} " in EXIT_CODES_HELP


def test_an_unknown_outcome_must_be_verified_first() -> None:
    assert "before repeating" in hint(errors.OutcomeUnknown("text"))
