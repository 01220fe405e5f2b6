"""Deliberate bugs in the collector; see `mutants.py`."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

__all__ = ["COLLECTOR_MUTANTS"]

COURIER = "tests/unit/collector/test_export_worker.py"
OUTCOMES = "tests/unit/collector/test_outcomes.py"
RECEIVERS = "tests/unit/collector/test_receivers.py"
STORED = "tests/unit/collector/test_stored_exporters.py"
BODIES = "tests/unit/collector/test_bodies.py"

COLLECTOR_MUTANTS = (
    Mutant(
        name="a collector is ready although its disk takes no write",
        where="collector:Collector._takes_requests",
        old=" and all(pipeline.health.takes_writes for pipeline in self._pipelines.values())\n",
        new="\n",
        test="tests/process/collector/test_disk_trouble.py"
        "::test_ready_is_503_while_no_write_succeeds_and_200_again_after_that",
    ),
    Mutant(
        name="a request is answered before the store has it",
        where="collector:RawConsumer.take",
        old=(
            "    with self._health.watching():\n"
            "        await self._quiver.ingest_raw(data, signal.value)\n"
            "    return TAKEN\n"
        ),
        new=(
            "    import asyncio\n"
            "\n"
            "    keeping = asyncio.ensure_future(self._quiver.ingest_raw(data, signal.value))\n"
            "    keeping.add_done_callback(lambda done: done.exception())\n"
            "    return TAKEN\n"
        ),
        test=f"{RECEIVERS}::test_a_full_store_sends_a_retry_delay_in_both_places",
    ),
    Mutant(
        name="the hint is sent in the standard place alone",
        where="collector:retry_trailers",
        old="        (RETRY_TRAILER, _retry_info(wait_s).SerializeToString()),\n",
        new="",
        test=f"{RECEIVERS}::test_a_full_store_sends_a_retry_delay_in_both_places",
    ),
    Mutant(
        name="a full store is an error that clients must not repeat",
        where="collector:refusal_of",
        old='code="UNAVAILABLE", status=503, message=message, retry_after_s=_hint(error))\n',
        new='code="INTERNAL", status=500, message=message)\n',
        test=f"{OUTCOMES}::test_every_error_has_its_response",
    ),
    Mutant(
        name="a bomb is unpacked before it is measured",
        where="collector:_zlib.unpack",
        old="            _check_size(total, limit_bytes)\n            found.append(piece)\n",
        new="            found.append(piece)\n",
        test=f"{BODIES}::test_a_bomb_stops_at_the_cap",
    ),
    Mutant(
        name="a refused bundle is rejected although it was not kept",
        where="collector:ExportWorker._is_stored",
        old='        delivery.nack(f"{outcome.reason}; not stored: {error}")\n        return False\n',
        new="        return True\n",
        test=f"{COURIER}::test_a_refused_bundle_that_cannot_be_stored_is_retried",
    ),
    Mutant(
        name="a destination that is down is tried with everything",
        where="collector:CircuitBreaker.try_acquire",
        old="        self.state = CircuitState.PROBING\n        return True\n",
        new="        self.state = CircuitState.CLOSED\n        return True\n",
        test=f"{COURIER}::test_a_destination_that_is_down_gets_one_bundle_at_a_time",
    ),
    Mutant(
        name="a bundle is lost when an exporter has a bug",
        where="collector:ExportWorker._attempt",
        old='        return Outcome(verdict=Verdict.RETRY, reason=f"{type(error).__name__}: {error}")\n',
        new='        return Outcome(verdict=Verdict.ACK, reason=f"{type(error).__name__}: {error}")\n',
        test=f"{COURIER}::test_a_bug_in_an_exporter_loses_nothing",
    ),
    Mutant(
        name="a bundle whose ack was lost is appended again",
        where="collector:BufferExportWorker._append",
        old="    unappended = [delivery for delivery in matching if version_of(delivery) > position]\n",
        new="    unappended = list(matching)\n",
        test=f"{STORED}::test_bundles_whose_acks_were_lost_are_not_appended_again",
    ),
    Mutant(
        name="the position passes a bundle that is in nobody's hands",
        where="collector:BufferExportWorker._gather",
        old="        while group and self._source.unacked_unleased():\n",
        new="        while False:\n",
        test=f"{STORED}::test_nothing_is_appended_while_an_older_bundle_is_unacked_and_unleased",
    ),
    Mutant(
        name="a file that is delivered again is a second file",
        where="collector:FileExporter._write",
        old="    name = payload.place or mint_ulid(SYSTEM_CLOCK.now_ms(), SYSTEM_RNG)\n",
        new="    name = mint_ulid(SYSTEM_CLOCK.now_ms(), SYSTEM_RNG)\n",
        test=f"{STORED}::test_a_repeated_bundle_replaces_its_file",
    ),
    Mutant(
        name="a missing right on our own disk is taken for a missing token",
        where="collector:refusal_of",
        old="    if isinstance(error, Unauthorized):\n",
        new="    if isinstance(error, errors.PermissionDenied):\n",
        test=f"{OUTCOMES}::test_every_error_has_its_response",
    ),
    Mutant(
        name="who was let in before a failure ends the probe of another",
        where="collector:CircuitBreaker.release",
        old="    if was_probe and self.state is CircuitState.PROBING:\n",
        new="    if self.state is CircuitState.PROBING:\n",
        test=f"{OUTCOMES}::test_a_bundle_sent_before_the_destination_failed_does_not_end_a_probe",
    ),
    Mutant(
        name="the rest of a group is tried although the destination is down",
        where="collector:ExportWorker._deliver_each",
        old="        if place and self._circuit.state is not CircuitState.CLOSED:\n",
        new="        if False:\n",
        test=f"{COURIER}::test_the_rest_of_a_group_is_not_tried_when_the_destination_went_down",
    ),
    Mutant(
        name="a request beyond a cap stops a queue indefinitely",
        where="collector:BufferExportWorker._records",
        old="        except (InvalidInput, LimitExceeded) as error:\n",
        new="        except InvalidInput as error:\n",
        test=f"{STORED}::test_a_request_beyond_the_item_limit_does_not_stop_a_queue",
    ),
    Mutant(
        name="a connection of grpc has as many calls as it likes",
        where="collector:_options",
        old='        ("grpc.max_concurrent_streams", calls_max),\n',
        new="",
        test="tests/unit/collector/test_receivers.py::test_one_grpc_connection_has_a_bounded_number_of_calls",
    ),
    Mutant(
        name="tiny parts are parsed before they are counted",
        where="otlp:parse",
        old="    check_density(data)\n",
        new="",
        test="tests/unit/otlp/test_density.py::test_a_hostile_request_is_refused_before_it_is_parsed",
    ),
    Mutant(
        name="large requests are decoded all at once",
        where="collector:Decoder.run",
        old="    async with self._alone:\n        return await",
        new="    if True:\n        return await",
        test="tests/unit/collector/test_bounds.py::test_large_requests_are_decoded_one_at_a_time",
    ),
    Mutant(
        name="a damaged dead letter is sent",
        where="collector:replay",
        old="            if letter.damage:\n",
        new="            if False:\n",
        test="tests/crash/collector/test_dead_letter_damage.py",
    ),
    Mutant(
        name="an identity that is missing beside segments is not reported",
        where="collector:directory_identity",
        old='        if any("/segments/" in name',
        new='        if any("?" in name',
        test=f"{STORED}::test_a_missing_identity_of_a_directory_with_segments_is_reported",
    ),
)
