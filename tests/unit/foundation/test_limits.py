from __future__ import annotations

from penstock import limits


def test_a_cap_fits_the_field_that_stores_it() -> None:
    for name in ("RECORD_BYTES_MAX", "BATCH_RECORDS_MAX", "METADATA_BYTES_MAX"):
        getattr(limits, name).to_bytes(4, "little")
    limits.LOCATION_BYTES_MAX.to_bytes(2, "little")


def test_every_cap_has_a_reason_and_a_positive_value() -> None:
    for name in limits.__all__:
        assert getattr(limits, name) > 0
