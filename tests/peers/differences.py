"""Where Penstock answers otherwise than Prometheus 2.42 on purpose: each query and text, with its reason."""

from __future__ import annotations

from tests.peers.expressions import CALENDAR
from tests.peers.generated import AT_S, END_S, START_S

__all__ = ["DIFFERENT", "REFUSED_OTHERWISE", "REQUESTED"]

_NEW_EXTRAPOLATION = "Prometheus 3 extends a counter at its start by at most half a distance between samples"
_OVERFLOW = "beyond the largest float the order of the steps decides"
_GO_LOG = "the logarithm of Prometheus is wrong for subnormal numbers"
_NO_DATE = "there is no date for it: here the answer is NaN, there that of the smallest 64-bit integer"
_NAMED_ATAN2 = "Prometheus 3 drops the name, as with any other arithmetic"
_NO_NEWLINE = "in Prometheus 3 a dot matches a new line"
_CLOSED_LEFT = "in Prometheus 2 a range is closed at the left, here as in Prometheus 3 open"

DIFFERENT = {
    "rate(young_total[5m])": _NEW_EXTRAPOLATION,
    "increase(young_total[5m])": _NEW_EXTRAPOLATION,
    "temperature[1m:10s] @ 1700002010": _CLOSED_LEFT,
    "count_over_time(capacity[2m:1s])": _CLOSED_LEFT,
    "count_over_time(capacity[29s629ms] @ 1700004032)": _CLOSED_LEFT,
    "capacity @ 1700006072.371": "the same of the lookback of five minutes",
    'texts{text=~"new.line"}': _NO_NEWLINE,
    "rate(special[4m])": _OVERFLOW,
    "deriv(special[4m])": _OVERFLOW,
    "stddev_over_time(special[4m])": _OVERFLOW,
    "stdvar_over_time(special[4m])": _OVERFLOW,
    "rad(special)": _OVERFLOW,
    "stddev by (kind) (special)": "since Prometheus 3 NaN and infinities have no deviation, also when alone",
    "ln(special)": _GO_LOG,
    "log10(special)": _GO_LOG,
    **{f"{function}(special)": _NO_DATE for function in CALENDAR},
    "temperature atan2 3": _NAMED_ATAN2,
    "20 atan2 temperature": _NAMED_ATAN2,
    "special atan2 2": _NAMED_ATAN2,
    "special atan2 NaN": _NAMED_ATAN2,
    "temperature atan2 (temperature offset 5m)": _NAMED_ATAN2,
    '("a text")': "Prometheus 2 fails on a text in brackets",
    "temperature @ -5": "the parser reads a time before 1970 as zero, so it is refused",
    "holt_winters(temperature[5m], 0.5, 0.5)": "not here: double_exponential_smoothing in Prometheus 3",
    "histogram_count(temperature)": "not here: of native histograms",
    "histogram_sum(temperature)": "not here: of native histograms",
    "histogram_fraction(0, 1, temperature)": "not here: of native histograms",
    'label_join(temperature, "a-b", "", "job")': "since Prometheus 3 any text is a name",
    'label_replace(temperature, "1a", "b", "job", "api")': "since Prometheus 3 any text is a name",
    'count_values("a-b", temperature)': "since Prometheus 3 any text is a name",
    "first_over_time(temperature[5m])": "newer than Prometheus 2.42",
    "mad_over_time(temperature[5m])": "newer than Prometheus 2.42",
    'sort_by_label(temperature, "job")': "newer than Prometheus 2.42",
    'sort_by_label_desc(temperature, "job")': "newer than Prometheus 2.42",
}
"""Queries that are answered otherwise on purpose, each with its reason."""

REFUSED_OTHERWISE = {
    "x offset 5": "in Prometheus 3 a number is a duration in seconds",
    "x[5]": "in Prometheus 3 a number is a duration in seconds",
    "5m": "in Prometheus 3 a duration is a number of seconds",
    'sum by ("a b") (x)': "in Prometheus 3 any text is a name",
}
"""Texts that are refused otherwise on purpose, each with its reason."""

_BACKWARDS = {"start": END_S, "end": START_S}
_LONG = {"query": "sum(count_over_time(requests_total[1h:10ms]))", "time": AT_S, "timeout": "1ms"}
REQUESTED: tuple[tuple[str, str, dict[str, str | float]], ...] = (
    ("here a range that ends before it starts is refused", "series", {"match[]": "x", **_BACKWARDS}),
    ("here a range that ends before it starts is refused", "labels", {**_BACKWARDS}),
    ("since Prometheus 3 any text is a name", "label/a-b/values", {}),
    ("here there is no such time", "query", {"query": "1", "time": "NaN"}),
    ("here the status of a timeout is 422, as of any query that cannot be answered", "query", _LONG),
    ("not here: of scraping, rules and the storage within Prometheus", "targets", {}),
    ("not here: of scraping, rules and the storage within Prometheus", "rules", {}),
    ("not here: of scraping, rules and the storage within Prometheus", "status/tsdb", {}),
)
"""Requests that are answered otherwise on purpose: the reason, the path and the parameters."""
