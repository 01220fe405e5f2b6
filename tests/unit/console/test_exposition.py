"""Parsing `/metrics`: unescaped labels, and values without timestamps and exemplars."""

from __future__ import annotations

import pytest

from penstock.console.http_poller import Exposition


def test_sums_are_of_one_metric_and_of_labels_that_fit() -> None:
    found = Exposition('a{x="1",y="2"} 3\na{x="1"} 4\nab 5\n# TYPE a counter\na{x="2"} nan\n')
    assert found.total("a") == 7
    assert found.total("a", y="2") == 3
    assert found.by("a", "x") == {"1": 7}
    assert found.total("absent") is None


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        (r"a\\b", "a\\b"),
        (r"say \"x\"", 'say "x"'),
        (r"two\nlines", "two\nlines"),
        (r"\\n", "\\n"),
        ("a } b", "a } b"),
    ],
)
def test_labels_are_returned_without_their_escapes(written: str, meant: str) -> None:
    found = Exposition(f'a{{x="{written}",y="1"}} 2')
    assert found.by("a", "x") == {meant: 2}
    assert found.total("a", x=meant, y="1") == 2


@pytest.mark.parametrize(
    "line",
    [
        'a{x="1"} 3 # {trace_id="t"} 9 1700000000',
        'a 3 # {trace_id="t"} 9',
        'a{x="1"} 3 1700000000',
        'a{x="1 # {"} 3',
    ],
)
def test_times_and_exemplars_are_not_read(line: str) -> None:
    found = Exposition(line)
    assert found.total("a") == 3
    assert found.by("a", "trace_id") == {"": 3}
