"""The meaning of responses for sent data, for the state of a destination, and for our clients."""

from __future__ import annotations

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2

from penstock import errors
from penstock.collector.breaker import CircuitBreaker, CircuitPolicy, CircuitState
from penstock.collector.outcome import AuthErrors, Verdict, after_grpc, after_http, delivered
from penstock.collector.status import (
    DETAILS_TRAILER,
    RETRY_TRAILER,
    Draining,
    Unauthorized,
    message_of,
    refusal_of,
    retry_after_of_trailers,
    retry_after_s,
    retry_trailers,
    status_bytes,
    status_json,
)
from penstock.quiver.errors import AtCapacity, Closed

ALL_CODES = [code.name for code in grpc.StatusCode if code is not grpc.StatusCode.OK]
RETRIED = {"CANCELLED", "DEADLINE_EXCEEDED", "ABORTED", "OUT_OF_RANGE", "UNAVAILABLE", "DATA_LOSS"}
NOW_MS = 1_700_000_000_000


@pytest.mark.parametrize("code", ALL_CODES)
def test_the_table_of_grpc_codes(code: str) -> None:
    verdict = after_grpc(code, "", None, AuthErrors.REJECT).verdict
    assert verdict is (Verdict.RETRY if code in RETRIED else Verdict.REJECT)


def test_resource_exhausted_is_retried_only_with_a_retry_delay() -> None:
    assert after_grpc("RESOURCE_EXHAUSTED", "", None, AuthErrors.RETRY).verdict is Verdict.REJECT
    hinted = after_grpc("RESOURCE_EXHAUSTED", "", 2.5, AuthErrors.RETRY)
    assert (hinted.verdict, hinted.retry_after_s) == (Verdict.RETRY, 2.5)


@pytest.mark.parametrize("code", ["UNAUTHENTICATED", "PERMISSION_DENIED"])
def test_authentication_errors_are_retried_unless_configured_otherwise(code: str) -> None:
    assert after_grpc(code, "", None, AuthErrors.RETRY).verdict is Verdict.RETRY
    assert after_grpc(code, "", None, AuthErrors.REJECT).verdict is Verdict.REJECT


@pytest.mark.parametrize("status", [400, 401, 403, 404, 405, 413, 415, 429, 500, 501, 502, 503, 504])
def test_the_table_of_http_statuses(status: int) -> None:
    verdict = after_http(status, "", None, AuthErrors.REJECT).verdict
    assert verdict is (Verdict.RETRY if status in (429, 502, 503, 504) else Verdict.REJECT)


def test_a_partial_success_is_never_sent_again() -> None:
    assert delivered(rejected_items=7, message="too old").verdict is Verdict.ACK


def test_the_retry_delay_is_sent_in_both_places_and_read_from_either() -> None:
    trailers = retry_trailers("UNAVAILABLE", "full", 3.25)
    assert {key for key, _ in trailers} == {DETAILS_TRAILER, RETRY_TRAILER}
    for trailer in trailers:
        assert retry_after_of_trailers([trailer]) == pytest.approx(3.25)


@pytest.mark.parametrize("key", [DETAILS_TRAILER, RETRY_TRAILER])
def test_an_unreadable_retry_delay_is_ignored(key: str) -> None:
    assert retry_after_of_trailers([(key, b"\xff\xff\xff")]) is None


def test_a_retry_delay_of_a_year_is_cut_to_an_hour() -> None:
    assert retry_after_of_trailers(retry_trailers("UNAVAILABLE", "", 3e7)) == 3600


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("3", 3.0),
        (" 0 ", 0.0),
        ("Tue, 14 Nov 2023 22:13:30 GMT", 10.0),
        ("Tue, 14 Nov 2023 22:13:10 GMT", 0.0),
        ("soon", None),
        ("-4", None),
        ("", None),
        (None, None),
        ("999999999999999999999", 3600.0),
    ],
)
def test_retry_after_is_seconds_or_a_date(value: str | None, seconds: float | None) -> None:
    assert retry_after_s(value, NOW_MS) == seconds


def test_a_status_has_its_message_and_its_retry_delay() -> None:
    status = status_pb2.Status.FromString(status_bytes("UNAVAILABLE", "full", 2))
    info = error_details_pb2.RetryInfo()
    assert status.details[0].Unpack(info)
    assert (status.code, status.message, info.retry_delay.seconds) == (14, "full", 2)
    assert message_of(status_bytes("INVALID_ARGUMENT", "what")) == "what"
    assert b'"retryDelay": "2s"' in status_json("UNAVAILABLE", "full", 2)


@pytest.mark.parametrize(
    ("error", "code", "status", "hint"),
    [
        (errors.InvalidInput("x"), "INVALID_ARGUMENT", 400, None),
        (AtCapacity("x", retry_after_s=4), "UNAVAILABLE", 503, 4),
        (errors.StorageFull("x"), "UNAVAILABLE", 503, 1),
        (errors.LimitExceeded("x"), "RESOURCE_EXHAUSTED", 413, None),
        (Draining("x"), "UNAVAILABLE", 503, 1),
        (Closed("x"), "UNAVAILABLE", 503, 1),
        (errors.Unsupported("x"), "UNIMPLEMENTED", 415, None),
        (Unauthorized("x"), "UNAUTHENTICATED", 401, None),
        (errors.PermissionDenied("/of/a/disk"), "UNAVAILABLE", 503, 1),
        (errors.NotFound("/of/a/disk"), "UNAVAILABLE", 503, 1),
        (errors.ConfigError("x"), "UNAVAILABLE", 503, 1),
        (errors.Fenced("x"), "UNAVAILABLE", 503, 1),
        (errors.Corrupt("x"), "UNAVAILABLE", 503, 1),
        (errors.OutcomeUnknown("x"), "UNAVAILABLE", 503, 1),
        (ZeroDivisionError("a secret"), "INTERNAL", 500, None),
    ],
)
def test_every_error_has_its_response(error: Exception, code: str, status: int, hint: float | None) -> None:
    refusal = refusal_of(error)
    assert (refusal.code, refusal.status, refusal.retry_after_s) == (code, status, hint)
    assert "secret" not in refusal.message
    assert "/of/a/disk" not in refusal.message


def test_an_open_circuit_allows_one_probe_when_it_is_due() -> None:
    circuit = CircuitBreaker(CircuitPolicy(initial_s=2, max_s=10))
    assert all(circuit.try_acquire(0) for _ in range(5))
    circuit.failed(0, draw=1)
    assert not circuit.try_acquire(1.9)
    assert circuit.try_acquire(2)
    assert not circuit.try_acquire(2), "one probe at a time"
    circuit.succeeded()
    assert circuit.try_acquire(2)
    assert circuit.state is CircuitState.CLOSED


def test_failures_of_concurrent_bundles_do_not_lengthen_the_wait() -> None:
    circuit = CircuitBreaker(CircuitPolicy(initial_s=2, max_s=10))
    for _ in range(5):
        circuit.failed(0, draw=1)
    assert circuit.due_s == 2


def test_each_probe_that_fails_doubles_the_wait_up_to_the_cap() -> None:
    circuit = CircuitBreaker(CircuitPolicy(initial_s=1, max_s=5))
    now, waits = 0.0, []
    for _ in range(5):
        assert circuit.try_acquire(now)
        circuit.failed(now, draw=1)
        waits.append(circuit.due_s - now)
        now = circuit.due_s
    assert waits == [1, 2, 4, 5, 5]


def test_a_retry_delay_is_a_minimum_for_the_wait() -> None:
    circuit = CircuitBreaker(CircuitPolicy(initial_s=1, max_s=5))
    circuit.failed(0, draw=0, retry_after_s=3)
    assert circuit.due_s == 3
    circuit.failed(0, draw=0, retry_after_s=7)
    assert circuit.due_s == 7


def test_a_probe_that_found_no_bundle_lets_the_next_one_probe() -> None:
    circuit = CircuitBreaker(CircuitPolicy())
    circuit.failed(0, draw=0)
    assert circuit.try_acquire(60)
    assert circuit.is_probing
    circuit.release(was_probe=True)
    assert circuit.try_acquire(60)


def test_a_bundle_sent_before_the_destination_failed_does_not_end_a_probe() -> None:
    circuit = CircuitBreaker(CircuitPolicy())
    assert circuit.try_acquire(0)
    assert not circuit.is_probing
    circuit.failed(0, draw=0)
    assert circuit.try_acquire(60), "the probe"
    circuit.release(was_probe=False)
    assert not circuit.try_acquire(60), "one probe at a time"


def test_bytes_that_cannot_be_decoded_are_a_bad_request() -> None:
    status = status_pb2.Status.FromString(status_bytes("INVALID_ARGUMENT", "no request"))
    bad = error_details_pb2.BadRequest()
    assert status.details[0].Unpack(bad)
    assert [violation.description for violation in bad.field_violations] == ["no request"]
    assert b"BadRequest" in status_json("INVALID_ARGUMENT", "no request")


def test_invalid_waits_are_refused() -> None:
    with pytest.raises(errors.ConfigError, match="above 0"):
        CircuitPolicy(initial_s=0)
