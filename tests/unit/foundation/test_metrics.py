from __future__ import annotations

import json
import threading

import pytest
from prometheus_client.parser import text_string_to_metric_families

from penstock.errors import InvalidInput
from penstock.metrics import Registry


def parsed(registry: Registry) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    families = text_string_to_metric_families(registry.prometheus_text())
    return {(s.name, frozenset(s.labels.items())): s.value for family in families for s in family.samples}


def test_a_parser_of_the_format_reads_every_value_back() -> None:
    registry = Registry()
    registry.counter("buffer.acks", "Acknowledged batches.").inc(3)
    registry.gauge("buffer.queue_length", "Entries in the manifest.").set(-1.5)
    writes = registry.counter("buffer.manifest_writes", "Attempts.", ["role"])
    writes.inc(role="producer")
    writes.inc(2, role="consumer")
    histogram = registry.histogram("buffer.flush_duration_seconds", "Time.", buckets=(0.1, 1))
    for seconds in (0.05, 0.1, 0.5, 7.0):
        histogram.observe(seconds)

    values = parsed(registry)

    # A parser of this format may return a counter with the suffix `_total`, which the text does not have.
    assert "_total" not in registry.prometheus_text()
    assert "buffer_acks 3\n" in registry.prometheus_text()
    assert values["buffer_queue_length", frozenset()] == -1.5
    assert 'buffer_manifest_writes{role="consumer"} 2\n' in registry.prometheus_text()
    buckets = {
        bound: values["buffer_flush_duration_seconds_bucket", frozenset({("le", bound)})]
        for bound in ("0.1", "1.0", "+Inf")
    }
    assert buckets == {"0.1": 2, "1.0": 3, "+Inf": 4}
    assert values["buffer_flush_duration_seconds_count", frozenset()] == 4
    assert values["buffer_flush_duration_seconds_sum", frozenset()] == pytest.approx(7.65)


@pytest.mark.parametrize("text", ['say "hi"', "back\\slash", "two\nlines", "\\n", 'mixed \\"\n', "naïve ☃"])
def test_label_values_and_help_survive_escaping(text: str) -> None:
    registry = Registry()
    registry.gauge("room.thing", text, ["name"]).set(1, name=text)
    (family,) = text_string_to_metric_families(registry.prometheus_text())
    assert family.documentation == text
    assert [sample.labels for sample in family.samples] == [{"name": text}]


def test_special_numbers_are_written_as_the_format_requires() -> None:
    registry = Registry()
    gauge = registry.gauge("g", "", ["k"])
    gauge.set(float("inf"), k="a")
    gauge.set(float("-inf"), k="b")
    gauge.set(float("nan"), k="c")
    assert [line.split()[-1] for line in registry.prometheus_text().splitlines()[2:]] == [
        "+Inf",
        "-Inf",
        "NaN",
    ]


def test_the_same_name_is_the_same_metric() -> None:
    registry = Registry()
    assert registry.counter("a.b", "x", ["k"]) is registry.counter("a.b", "y", ["k"])
    assert registry.histogram("h", "") is registry.histogram("h", "")


def test_a_name_cannot_change_its_meaning() -> None:
    registry = Registry()
    registry.counter("a.b", "", ["k"])
    registry.histogram("h", "")
    with pytest.raises(InvalidInput, match="already exists as a counter"):
        registry.gauge("a.b", "", ["k"])
    with pytest.raises(InvalidInput, match="already exists with the labels"):
        registry.counter("a.b", "")
    with pytest.raises(InvalidInput, match="already exists with the buckets"):
        registry.histogram("h", "", buckets=(1.0,))
    with pytest.raises(InvalidInput, match="would both be called"):
        registry.counter("a_b", "")


@pytest.mark.parametrize("name", ["", "a-b", "a..b", ".a", "1a", "a b", "a\n"])
def test_a_name_the_text_cannot_carry_is_refused(name: str) -> None:
    with pytest.raises(InvalidInput, match="is not a metric name"):
        Registry().counter(name, "")


@pytest.mark.parametrize("labels", [["a-b"], ["__a"], ["a", "a"]])
def test_wrong_label_names_are_refused(labels: list[str]) -> None:
    with pytest.raises(InvalidInput):
        Registry().counter("a", "", labels)


def test_wrong_labels_are_refused_when_used() -> None:
    counter = Registry().counter("a", "", ["role"])
    for labels in ({}, {"rol": "x"}, {"role": "x", "more": "y"}):
        with pytest.raises(InvalidInput, match="takes the labels"):
            counter.inc(1, **labels)


@pytest.mark.parametrize("buckets", [(), (2.0, 1.0), (1.0, 1.0), (float("nan"),)])
def test_buckets_must_rise(buckets: tuple[float, ...]) -> None:
    with pytest.raises(InvalidInput, match="rising order"):
        Registry().histogram("h", "", buckets=buckets)


def test_a_histogram_keeps_its_own_label() -> None:
    with pytest.raises(InvalidInput, match="'le'"):
        Registry().histogram("h", "", ["le"])


def test_a_counter_only_grows() -> None:
    counter = Registry().counter("c", "").labels()
    for amount in (-1, float("nan")):
        with pytest.raises(InvalidInput, match="cannot grow"):
            counter.inc(amount)
    assert counter.read() == 0


def test_value_reads_without_creating_a_sample() -> None:
    registry = Registry()
    registry.counter("c", "", ["role"])
    assert registry.value("c", role="producer") == 0
    assert registry.snapshot()["c"] == []
    registry.histogram("h", "").observe(1)
    assert registry.value("h") == 1
    with pytest.raises(InvalidInput, match="no metric is named"):
        registry.value("nothing")


def test_a_snapshot_is_json() -> None:
    registry = Registry()
    registry.counter("b", "").inc()
    registry.histogram("a", "", buckets=(1.0,)).observe(0.5)
    assert json.loads(json.dumps(registry.snapshot())) == {
        "a": [{"labels": {}, "value": {"count": 1, "sum": 0.5, "buckets": {"1.0": 1, "+Inf": 1}}}],
        "b": [{"labels": {}, "value": 1}],
    }


def test_no_increment_is_lost_between_threads() -> None:
    registry = Registry()
    counter = registry.counter("c", "", ["k"])
    histogram = registry.histogram("h", "")

    def work() -> None:
        for _ in range(2000):
            counter.inc(k="x")
            histogram.observe(0.1)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert registry.value("c", k="x") == 16000
    assert registry.value("h") == 16000


def test_bound_labels_are_one_child() -> None:
    counter = Registry().counter("c", "", ["role"])
    assert counter.labels(role="producer") is counter.labels(role="producer")
