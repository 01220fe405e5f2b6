"""The Prometheus HTTP API without HTTP: it converts parameters to requests, and results to responses.

A server parses a form or a query string, calls a `*_request` function, does the work, and sends the `Answer`.
It converts errors with `error_answer`.
"""

from __future__ import annotations

from penstock.timeseries.api.answers import (
    Answer,
    error_answer,
    federation_answer,
    metadata_answer,
    names_answer,
    query_answer,
    reads_any_name,
    series_answer,
)
from penstock.timeseries.api.requests import (
    InstantRequest,
    MetadataRequest,
    Parameters,
    RangeRequest,
    SeriesRequest,
    instant_request,
    labels_request,
    metadata_request,
    parse_step,
    parse_time,
    range_request,
    series_request,
)

__all__ = [
    "Answer",
    "InstantRequest",
    "MetadataRequest",
    "Parameters",
    "RangeRequest",
    "SeriesRequest",
    "error_answer",
    "federation_answer",
    "instant_request",
    "labels_request",
    "metadata_answer",
    "metadata_request",
    "names_answer",
    "parse_step",
    "parse_time",
    "query_answer",
    "range_request",
    "reads_any_name",
    "series_answer",
    "series_request",
]
