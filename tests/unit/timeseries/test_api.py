"""The Prometheus HTTP API without HTTP."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.unit.timeseries.promql_doubles import ENGINE, load

from penstock.errors import (
    Corrupt,
    Fenced,
    InvalidInput,
    NotFound,
    OutcomeUnknown,
    PenstockError,
    Unavailable,
    Unsupported,
)
from penstock.timeseries import Labels, Metadata, MetricType
from penstock.timeseries.api import (
    error_answer,
    federation_answer,
    instant_request,
    labels_request,
    metadata_answer,
    metadata_request,
    names_answer,
    parse_step,
    parse_time,
    query_answer,
    range_request,
    reads_any_name,
    series_answer,
    series_request,
)
from penstock.timeseries.model import json_texts, plain_text
from penstock.timeseries.promql import (
    BadRange,
    ExecutionError,
    ParseError,
    QueryTimeout,
    ResultSeries,
    TooManySamples,
    UnsupportedQuery,
)

NOW_MS = 1_700_000_000_000


@pytest.mark.parametrize(
    ("text", "time_ms"),
    [
        ("1435781451.781", 1_435_781_451_781),
        ("0", 0),
        ("1e3", 1_000_000),
        ("-1.5", -1500),
        ("2015-07-01T20:10:51.781Z", 1_435_781_451_781),
        ("2015-07-01T20:10:51Z", 1_435_781_451_000),
        ("2015-07-01T22:10:51.7819999+02:00", 1_435_781_451_781),
        ("1969-12-31T23:59:59.5Z", -500),
    ],
)
def test_a_time_is_seconds_or_rfc_3339(text: str, time_ms: int) -> None:
    assert parse_time(text) == time_ms


@pytest.mark.parametrize(
    "text",
    [
        "",
        "now",
        "NaN",
        "Inf",
        "1e300",
        "2015-07-01",
        "2015-07-01T20:10:51",
        "2015-13-01T00:00:00Z",
        "1_0",
        "٣",
    ],
)
def test_anything_else_is_not_a_time(text: str) -> None:
    with pytest.raises(InvalidInput):
        parse_time(text)


@pytest.mark.parametrize(
    ("text", "step_ms"),
    [
        ("15", 15_000),
        ("0.5", 500),
        ("1m", 60_000),
        ("1h30m", 5_400_000),
        ("100ms", 100),
        ("1y2w3d4s5ms", 33_004_804_005),
    ],
)
def test_a_step_is_seconds_or_a_duration(text: str, step_ms: int) -> None:
    assert parse_step(text) == step_ms


@pytest.mark.parametrize("text", ["x", "1x", "1e300", "", "1m 2s", "1s1m", "1.5m", "999999999999y"])
def test_anything_else_is_not_a_step(text: str) -> None:
    with pytest.raises(InvalidInput):
        parse_step(text)


def test_an_instant_query_is_now_unless_it_says_when() -> None:
    assert instant_request({"query": ["up"]}, NOW_MS).at_ms == NOW_MS
    request = instant_request({"query": ["up"], "time": ["5"], "timeout": ["10s"]}, NOW_MS)
    assert (request.query, request.at_ms, request.timeout_s) == ("up", 5000, 10)


def test_a_range_query_needs_all_four() -> None:
    whole = {"query": ["up"], "start": ["0"], "end": ["60"], "step": ["15s"]}
    request = range_request(whole)
    assert (request.start_ms, request.end_ms, request.step_ms) == (0, 60_000, 15_000)
    for missing in whole:
        with pytest.raises(InvalidInput, match=f'"{missing}"'):
            range_request({name: value for name, value in whole.items() if name != missing})
    for name, value in {"end": "-1", "step": "0", "start": "x"}.items():
        with pytest.raises(InvalidInput, match=f'"{name}"'):
            range_request(whole | {name: [value]})


def test_series_need_a_selector_and_labels_do_not() -> None:
    with pytest.raises(InvalidInput, match=r"match\[\]"):
        series_request({})
    request = series_request({"match[]": ['up{a="b"}', "down"], "start": ["1"], "limit": ["5"]})
    assert [len(matchers) for matchers in request.selectors] == [2, 1]
    assert (request.start_ms, request.end_ms, request.limit) == (1000, None, 5)
    assert labels_request({}).selectors == ()
    with pytest.raises(InvalidInput, match=r'"match\[\]": parse error'):
        labels_request({"match[]": ["sum("]})
    with pytest.raises(InvalidInput, match="limit"):
        labels_request({"limit": ["-1"]})


def test_metadata_may_be_of_one_metric() -> None:
    request = metadata_request({"metric": ["up"], "limit": ["0"], "limit_per_metric": ["2"]})
    assert (request.metric, request.limit, request.limit_per_metric) == ("up", None, 2)


def answered(query: str, **times: int) -> dict[str, Any]:
    source = load({'up{job="a"}': "1 0.5 NaN"}, step_ms=1500)
    prepared = ENGINE.range(query, **times) if times else ENGINE.instant(query, 1500)
    answer = query_answer(prepared.evaluate(source))
    assert answer.status == 200
    body: dict[str, Any] = json.loads(answer.body)
    assert body["status"] == "success"
    data: dict[str, Any] = body["data"]
    return data


def test_the_four_kinds_of_results() -> None:
    labels = {"__name__": "up", "job": "a"}
    assert answered("up") == {
        "resultType": "vector",
        "result": [{"metric": labels, "value": [1.5, "0.5"]}],
    }
    assert answered("up", start_ms=0, end_ms=3000, step_ms=1500) == {
        "resultType": "matrix",
        "result": [{"metric": labels, "values": [[0, "1"], [1.5, "0.5"], [3, "NaN"]]}],
    }
    assert answered("up[2s]")["resultType"] == "matrix"
    assert answered("1 / 0") == {"resultType": "scalar", "result": [1.5, "+Inf"]}
    assert answered('"a\\"b"') == {"resultType": "string", "result": [1.5, 'a"b']}
    assert answered("missing") == {"resultType": "vector", "result": []}


@pytest.mark.parametrize(
    ("value", "text", "label"),
    [
        (1.0, "1", "1"),
        (-0.0, "-0", "-0"),
        (0.1, "0.1", "0.1"),
        (1e20, "100000000000000000000", "100000000000000000000"),
        (1e21, "1e+21", "1000000000000000000000"),
        (123456789012345680.0, "123456789012345680", "123456789012345680"),
        (1e-6, "0.000001", "0.000001"),
        (1.5e-7, "1.5e-07", "0.00000015"),
        (-2.5e22, "-2.5e+22", "-25000000000000000000000"),
        (float("inf"), "+Inf", "+Inf"),
        (float("-inf"), "-Inf", "-Inf"),
        (float("nan"), "NaN", "NaN"),
    ],
)
def test_numbers_print_as_prometheus_prints_them(value: float, text: str, label: str) -> None:
    assert json_texts(np.array([value])) == [text]
    assert plain_text(value) == label


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (ParseError("x"), 400, "bad_data"),
        (InvalidInput("x"), 400, "bad_data"),
        (BadRange("x"), 400, "bad_data"),
        (ExecutionError("x"), 422, "execution"),
        (UnsupportedQuery("x"), 422, "execution"),
        (Unsupported("x"), 422, "execution"),
        (TooManySamples("x"), 422, "execution"),
        (QueryTimeout("x"), 422, "timeout"),
        (NotFound("x"), 404, "not_found"),
        (Unavailable("x"), 503, "unavailable"),
        (Fenced("x"), 503, "unavailable"),
        (OutcomeUnknown("x"), 503, "unavailable"),
        (Corrupt("x"), 500, "internal"),
    ],
)
def test_the_status_of_an_error_says_who_must_act(error: PenstockError, status: int, kind: str) -> None:
    answer = error_answer(error)
    assert answer.status == status
    assert json.loads(answer.body) == {"status": "error", "errorType": kind, "error": str(error)}


def test_names_and_series_come_sorted_and_once() -> None:
    assert json.loads(names_answer(["b", "a", "b"]).body) == {"status": "success", "data": ["a", "b"]}
    labels = [Labels.of({"b": "1"}), Labels.of({"a": "1"}), Labels.of({"b": "1"})]
    assert json.loads(series_answer(labels).body)["data"] == [{"a": "1"}, {"b": "1"}]


def test_a_limit_adds_a_warning() -> None:
    body = json.loads(names_answer(["b", "a"], limit=1).body)
    assert body["data"] == ["a"]
    assert "truncated" in body["warnings"][0]


def test_metadata_by_metric() -> None:
    counter = Metadata(metric_type=MetricType.SUM, monotonic=True, unit="s", description="Time.")
    gauge = Metadata(metric_type=MetricType.GAUGE)
    body = json.loads(
        metadata_answer({"b": [gauge], "a": [counter, counter, gauge]}, limit_per_metric=1).body
    )
    assert body["data"] == {
        "a": [{"type": "counter", "unit": "s", "help": "Time."}],
        "b": [{"type": "gauge", "unit": "", "help": ""}],
    }


def test_federation_is_text_that_prometheus_client_reads() -> None:
    source = load({'up{job="a\\"b\\n"}': "1", "up": "2.5", "down": "NaN"})
    result = ENGINE.instant('{__name__=~".+"}', 30_000).evaluate(source)
    text = federation_answer(result.series).body.decode()
    assert text.startswith("# TYPE down untyped\ndown NaN 30000\n# TYPE up untyped\nup 2.5 30000\n")
    families = list(text_string_to_metric_families(text))
    assert [(sample.labels, sample.value) for sample in families[1].samples] == [
        ({}, 2.5),
        ({"job": 'a"b\n'}, 1.0),
    ]


ODD_NAMES = [
    Labels.of({"__name__": "a.b", "c": "1"}),
    Labels.of({"__name__": "up", "a label": 'x"y\n'}),
    Labels.of({"__name__": "up 1\ninjected 2\n# "}),
    Labels.of({"__name__": "up", 'n="1"} 1\ninjected{n': "1"}),
    Labels.of({"__name__": "up", "job": "a"}),
]


def newest(labels: Labels) -> ResultSeries:
    return ResultSeries(labels, np.array([30_000]), np.array([1.0]))


def test_names_that_are_not_plain_are_left_out_of_the_plain_text_and_counted() -> None:
    answer = federation_answer(map(newest, ODD_NAMES))
    assert answer.content_type == "text/plain; version=0.0.4; charset=utf-8"
    assert answer.body.decode() == (
        '# TYPE up untyped\nup{job="a"} 1 30000\n# 4 series are not shown: accept escaping=allow-utf-8\n'
    )


def test_a_scraper_that_reads_any_name_gets_quoted_names_without_injected_lines() -> None:
    answer = federation_answer(map(newest, ODD_NAMES), any_name=True)
    assert "escaping=allow-utf-8" in answer.content_type
    text = answer.body.decode()
    assert not any(line.startswith("injected") for line in text.splitlines())
    assert '{"a.b",c="1"} 1 30000\n' in text
    assert 'up{"a label"="x\\"y\\n"} 1 30000\n' in text
    found = [
        Labels.of({"__name__": sample.name, **sample.labels})
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    ]
    assert sorted(found) == sorted(ODD_NAMES)


@pytest.mark.parametrize(
    ("accept", "reads"),
    [
        ("", False),
        ("*/*", False),
        ("text/plain;version=0.0.4;q=0.3,*/*;q=0.1", False),
        ("application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6", False),
        ("application/x;q=0.9, text/plain; version=1.0.0; escaping=allow-utf-8; q=0.4,*/*", True),
    ],
)
def test_a_scraper_says_whether_it_reads_any_name(accept: str, reads: bool) -> None:
    assert reads_any_name(accept) is reads


@pytest.mark.parametrize("text", ["up offset 5m", "up @ 5", "up @ start()", "up[5m]", "sum(up)", "1"])
def test_a_series_selector_takes_no_modifier(text: str) -> None:
    with pytest.raises(InvalidInput, match=r'parameter "match\[\]": parse error'):
        series_request({"match[]": [text]})


def test_one_more_than_the_limit_is_read_to_know_of_more() -> None:
    assert series_request({"match[]": ["up"], "limit": ["5"]}).read_max == 6
    assert series_request({"match[]": ["up"], "limit": ["0"]}).read_max is None


def test_selectors_are_bounded_together() -> None:
    with pytest.raises(InvalidInput, match="longer than 65,536 characters"):
        labels_request({"match[]": ["up" * 1000] * 33})
