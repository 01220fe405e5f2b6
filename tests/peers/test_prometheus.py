"""A real Prometheus beside a real server: the same bytes, the same questions, the same answers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.peers.comparison import difference
from tests.peers.composed import composed
from tests.peers.differences import DIFFERENT, REFUSED_OTHERWISE, REQUESTED
from tests.peers.expressions import MATRICES, NOISY, ORDERED, QUERIES
from tests.peers.generated import AT_S, END_S, START_S, series
from tests.peers.peer import Peer
from tests.peers.refusals import BAD, BAD_RANGES, IMPOSSIBLE

from penstock.timeseries.model import is_stale

pytestmark = pytest.mark.prometheus
Both = tuple[Peer, Peer]

COMPOSED = 50
"""Queries of each seed."""
NOISE = 1e-12
RANGE = {"start": START_S + 7, "end": END_S + 607, "step": 60}
"""From before the first sample to after the lookback of the last."""
WHOLE = {"start": START_S, "end": END_S}


def at_one_moment(both: Both, query: str) -> str | None:
    theirs, ours = (peer.get("query", query=query, time=AT_S) for peer in both)
    return difference(theirs, ours, ordered=query in ORDERED, noise=noise_of(query))


def over_time(both: Both, query: str) -> str | None:
    theirs, ours = (peer.get("query_range", query=query, **RANGE) for peer in both)
    return difference(theirs, ours, ordered=True, noise=noise_of(query))


def _only_for_the_version_of_the_lists(both: Both) -> None:
    version = both[0].get("status/buildinfo").data["version"]
    if not version.startswith("2.42."):
        pytest.skip(f"the differences are those of Prometheus 2.42, and this is {version}")


def noise_of(query: str) -> float:
    return NOISE if any(name in query for name in NOISY) else 0.0


@pytest.mark.parametrize("query", [query for query in (*QUERIES, *ORDERED) if query not in DIFFERENT])
def test_a_query_is_answered_as_by_prometheus(both: Both, query: str) -> None:
    assert at_one_moment(both, query) is None
    assert over_time(both, query) is None


@pytest.mark.parametrize("seed", range(10))
def test_queries_made_by_chance_are_answered_as_by_prometheus(both: Both, seed: int) -> None:
    found = {
        query: at_one_moment(both, query) or over_time(both, query) for query in composed(COMPOSED, seed)
    }
    assert {query: told for query, told in found.items() if told} == {}


@pytest.mark.parametrize("query", MATRICES)
def test_samples_of_a_range_are_those_of_prometheus(both: Both, query: str) -> None:
    assert at_one_moment(both, query) is None


@pytest.mark.parametrize("query", DIFFERENT)
def test_a_difference_that_has_a_reason_is_still_there(both: Both, query: str) -> None:
    _only_for_the_version_of_the_lists(both)
    assert at_one_moment(both, query) or over_time(both, query)


def test_values_are_written_as_prometheus_writes_them(both: Both) -> None:
    for query in ("special", "texts", "temperature", "special * 1e-3", "special ^ 3"):
        told = [peer.get("query_range", query=query, **RANGE).data["result"] for peer in both]
        assert told[0] == told[1]


def test_every_sample_arrived_as_it_was_sent(both: Both) -> None:
    sent = {
        tuple(sorted(one.labels.items())): [
            (at_ms, str(value)) for at_ms, value in one.samples if not is_stale(np.array([value]))[0]
        ]
        for one in series()
    }
    query = f"{{__name__=~'.+'}}[{END_S - START_S}s]"
    for peer in both:
        found = {
            tuple(sorted(one["metric"].items())): [
                (round(at_s * 1000), str(float(text))) for at_s, text in one["values"]
            ]
            for one in peer.get("query", query=query, time=END_S).data["result"]
        }
        assert found == sent


@pytest.mark.parametrize("query", BAD)
def test_a_text_that_is_no_query_is_refused_alike(both: Both, query: str) -> None:
    theirs, ours = (peer.get("query", query=query, time=AT_S) for peer in both)
    assert (theirs.status, theirs.body["errorType"]) == (400, "bad_data")
    assert difference(theirs, ours, ordered=False) is None


@pytest.mark.parametrize("query", REFUSED_OTHERWISE)
def test_a_refusal_that_differs_for_a_reason_still_does(both: Both, query: str) -> None:
    _only_for_the_version_of_the_lists(both)
    theirs, ours = (peer.get("query", query=query, time=AT_S) for peer in both)
    assert difference(theirs, ours, ordered=False)


@pytest.mark.parametrize("query", IMPOSSIBLE)
def test_a_query_that_the_data_do_not_allow_is_refused_alike(both: Both, query: str) -> None:
    theirs, ours = (peer.get("query", query=query, time=AT_S) for peer in both)
    assert (theirs.status, theirs.body["errorType"]) == (422, "execution")
    assert difference(theirs, ours, ordered=False) is None
    theirs, ours = (peer.get("query_range", query=query, **RANGE) for peer in both)
    assert difference(theirs, ours, ordered=False) is None


@pytest.mark.parametrize("parameters", BAD_RANGES, ids=str)
def test_a_range_that_cannot_be_is_refused_alike(both: Both, parameters: dict[str, str | float]) -> None:
    theirs, ours = (peer.get("query_range", **parameters) for peer in both)
    assert theirs.status == 400
    assert difference(theirs, ours, ordered=False) is None


@pytest.mark.parametrize(
    "changed",
    [
        {"step": "15s"},
        {"step": "1m30s"},
        {"step": "0.25"},
        {"step": "1y"},
        {"end": START_S + 11_000 * 15},
        {"start": "2023-11-14T23:20:07Z", "end": "2023-11-15T00:21:07.25+00:00"},
        {"start": START_S + 0.001, "end": START_S + 60.001},
        {"timeout": "5s"},
    ],
    ids=str,
)
def test_times_and_steps_are_read_alike(both: Both, changed: dict[str, Any]) -> None:
    asked = {"query": "sum(texts)", "start": START_S, "end": START_S + 60, "step": 15} | changed
    for method in (Peer.get, Peer.post):
        theirs, ours = (method(peer, "query_range", **asked) for peer in both)
        assert theirs.status == 200
        assert difference(theirs, ours, ordered=True) is None


@pytest.mark.parametrize("time", ["abc", "1e400", "-5", "1e3", "2023-11-14T23:20:07Z", AT_S + 0.1239])
def test_a_moment_is_read_alike(both: Both, time: str | float) -> None:
    theirs, ours = (peer.get("query", query="temperature or vector(1)", time=time) for peer in both)
    assert difference(theirs, ours, ordered=False) is None


SELECTORS: tuple[list[str], ...] = (
    ["temperature"],
    ["temperature", '{zone!=""}', 'temperature{job="api"}'],
    ['{__name__=~"latency.*", le!~"0.*"}'],
    ["nothing_of_that_name"],
    ["ending"],
)


@pytest.mark.parametrize("selectors", SELECTORS, ids=str)
def test_series_names_and_values_are_listed_alike(both: Both, selectors: list[str]) -> None:
    asked = {"match[]": selectors, **WHOLE}
    for path in ("series", "labels", "label/job/values", "label/__name__/values", "label/le/values"):
        theirs, ours = (peer.get(path, **asked).data for peer in both)
        assert theirs == ours, path
    for path in ("series", "labels"):
        theirs, ours = (peer.post(path, **asked).data for peer in both)
        assert theirs == ours, path


@pytest.mark.parametrize("name", ["__name__", "job", "text", "le", "nosuch"])
def test_all_values_of_a_label_are_listed_alike(both: Both, name: str) -> None:
    theirs, ours = (peer.get(f"label/{name}/values", **WHOLE).data for peer in both)
    assert theirs == ours


def test_all_names_of_labels_are_listed_alike(both: Both) -> None:
    theirs, ours = (peer.get("labels").data for peer in both)
    assert theirs == ours


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"match[]": "{}"},
        {"match[]": ""},
        {"match[]": "sum(x)"},
        {"match[]": "x[5m]"},
        {"match[]": "x offset 5m"},
        {"match[]": "x{"},
        {"match[]": '{a=~".*"}'},
        {"match[]": "x", "start": "abc"},
    ],
    ids=str,
)
def test_a_list_of_series_that_cannot_be_is_refused_alike(both: Both, asked: dict[str, str]) -> None:
    theirs, ours = (peer.get("series", **asked) for peer in both)
    assert (theirs.status, theirs.body["errorType"]) == (400, "bad_data")
    assert (ours.status, ours.body["errorType"]) == (400, "bad_data")


@pytest.mark.parametrize(("reason", "path", "asked"), REQUESTED)
def test_a_request_that_is_answered_otherwise_for_a_reason_still_is(
    both: Both, reason: str, path: str, asked: dict[str, str | float]
) -> None:
    _only_for_the_version_of_the_lists(both)
    theirs, ours = (peer.get(path, **asked) for peer in both)
    assert theirs.status != ours.status, reason


def test_both_say_which_version_they_are(both: Both) -> None:
    for peer in both:
        assert peer.get("status/buildinfo").data["version"]
