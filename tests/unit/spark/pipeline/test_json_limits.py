"""The JSON limits that are passed to Spark. `tests/spark/test_pipeline.py` tests their effect."""

from __future__ import annotations

from typing import Any

import pytest
from pyspark.sql import functions
from pyspark.sql.types import StructType

from penstock.limits import JSON_NUMBER_DIGITS_MAX, JSON_STORED_DEPTH_MAX
from penstock.spark.pipeline.decode import decode, infer_schema
from penstock.spark.pipeline.spec import DecodeSpec

HIGHER = {"maxNestingDepth": "100000", "maxNumLen": "100000"}


class Stop(Exception):
    """The error that ends a test once it has seen the options."""


class Frame:
    """A frame, session and reader whose methods return itself. `json` ends the test."""

    given: dict[str, Any]

    def __getattr__(self, name: str) -> Frame:
        return self

    def __call__(self, *args: object, **kwargs: Any) -> Frame:
        return self

    def options(self, **options: str) -> Frame:
        self.given = options
        return self

    def json(self, lines: object) -> Frame:
        raise Stop


def test_records_are_decoded_within_the_limits_of_stored_json_whatever_is_configured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given: dict[str, str] = {}

    def from_json(text: object, schema: StructType, options: dict[str, str]) -> None:
        given.update(options)
        raise Stop

    for name in ("col", "lit", "concat"):
        monkeypatch.setattr(functions, name, Frame())
    monkeypatch.setattr(functions, "from_json", from_json)
    frame: Any = Frame()
    with pytest.raises(Stop):
        decode(frame, DecodeSpec(format="json", options=HIGHER), StructType())
    # The object and the list around the record are two levels.
    assert given["maxNestingDepth"] == str(JSON_STORED_DEPTH_MAX + 2)
    assert given["maxNumLen"] == str(JSON_NUMBER_DIGITS_MAX)


def test_a_sample_is_read_within_the_limits_of_stored_json_whatever_is_configured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(functions, "col", Frame())
    spark: Any = Frame()
    with pytest.raises(Stop):
        infer_schema(spark, DecodeSpec(format="json", options=HIGHER), spark)
    assert spark.given["maxNestingDepth"] == str(JSON_STORED_DEPTH_MAX)
    assert spark.given["maxNumLen"] == str(JSON_NUMBER_DIGITS_MAX)
