"""A metrics registry: counters, gauges and histograms, exported as Prometheus text or as plain values.

Names use dots (`buffer.batches_flushed`). The Prometheus text replaces them with underscores and adds
no suffix. Requesting a metric again returns the same one, so packages need not pass metrics around.
On a hot path, bind the labels once: `writes = counter.labels(role="producer")`, then `writes.inc()`. A metric
without labels has one child, which `inc`, `set` and `observe` use directly.
"""

from __future__ import annotations

import bisect
import math
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import ClassVar, Final, Generic, Literal, NoReturn, TypeAlias, TypeVar

from penstock.errors import InvalidInput

__all__ = [
    "DEFAULT_REGISTRY",
    "SECONDS_BUCKETS",
    "Counter",
    "CounterChild",
    "Gauge",
    "GaugeChild",
    "Histogram",
    "HistogramChild",
    "HistogramValue",
    "Kind",
    "Registry",
    "Sample",
]

Kind: TypeAlias = Literal["counter", "gauge", "histogram"]
HistogramValue: TypeAlias = dict[str, float | dict[str, float]]
"""A histogram as plain values: `count`, `sum` and the cumulative `buckets` by upper bound."""

Sample: TypeAlias = dict[str, dict[str, str] | float | HistogramValue]
"""One labelled value in a snapshot: `labels` and `value`."""

SECONDS_BUCKETS: Final = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
    60.0,
)
"""From a local fsync to a very slow upload."""

_NAME: Final = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*(?:\.[a-zA-Z_][a-zA-Z0-9_]*)*")
_LABEL: Final = re.compile(r"(?!__)[a-zA-Z_][a-zA-Z0-9_]*")
_LINE_ESCAPES: Final = str.maketrans({"\\": r"\\", "\n": r"\n"})
_LABEL_ESCAPES: Final = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})

_Pairs: TypeAlias = tuple[tuple[str, str], ...]


class CounterChild:
    """One labelled value that only increases."""

    __slots__ = ("_lock", "_value")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._value: float = 0

    def inc(self, amount: float = 1) -> None:
        """Add `amount`. Raise `InvalidInput` if it is negative."""
        if not amount >= 0:
            raise InvalidInput(f"a counter cannot grow by {amount!r}")
        with self._lock:
            self._value += amount

    def read(self) -> float:
        return self._value

    def lines(self, name: str, pairs: _Pairs) -> Iterator[str]:
        yield _line(name, pairs, self._value)


class GaugeChild:
    """One labelled value that can increase and decrease."""

    __slots__ = ("_lock", "_value")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._value: float = 0

    def set(self, value: float) -> None:
        with self._lock:
            self._value = value

    def inc(self, amount: float = 1) -> None:
        """Add `amount`, which may be negative."""
        with self._lock:
            self._value += amount

    def read(self) -> float:
        return self._value

    def lines(self, name: str, pairs: _Pairs) -> Iterator[str]:
        yield _line(name, pairs, self._value)


class HistogramChild:
    """One labelled distribution."""

    __slots__ = ("_bounds", "_counts", "_lock", "_sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._lock = threading.Lock()
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        slot = bisect.bisect_left(self._bounds, value)
        with self._lock:
            self._counts[slot] += times
            self._sum += value * times

    def count(self) -> int:
        with self._lock:
            return sum(self._counts)

    def read(self) -> HistogramValue:
        total, cumulative = self._totals()
        return {"count": cumulative[-1][1], "sum": total, "buckets": dict(cumulative)}

    def lines(self, name: str, pairs: _Pairs) -> Iterator[str]:
        total, cumulative = self._totals()
        for bound, count in cumulative:
            yield _line(f"{name}_bucket", (*pairs, ("le", bound)), count)
        yield _line(f"{name}_sum", pairs, total)
        yield _line(f"{name}_count", pairs, cumulative[-1][1])

    def _totals(self) -> tuple[float, list[tuple[str, int]]]:
        with self._lock:
            total, counts = self._sum, self._counts.copy()
        cumulative = []
        seen = 0
        for bound, count in zip((*self._bounds, math.inf), counts, strict=True):
            seen += count
            cumulative.append((_number(bound), seen))
        return total, cumulative


_Child = TypeVar("_Child", CounterChild, GaugeChild, HistogramChild)


class _Family(Generic[_Child]):
    """All labelled children of one name."""

    kind: ClassVar[Kind]

    def __init__(
        self, name: str, help: str, label_names: tuple[str, ...], make: Callable[[], _Child]
    ) -> None:
        self.name = name
        self.help = help
        self.label_names = label_names
        self._label_set = frozenset(label_names)
        self._make: Callable[[], _Child] = make
        self._lock = threading.Lock()
        self._children: dict[tuple[str, ...], _Child] = {}
        # A metric without labels exists, with the value 0, as soon as it is declared.
        self._sole: _Child | None = None if label_names else self.labels()

    def labels(self, **labels: str) -> _Child:
        """Return the child with exactly these labels. Raise `InvalidInput` for missing or unknown labels."""
        key = self._key(labels)
        child = self._children.get(key)
        if child is None:
            with self._lock:
                child = self._children.setdefault(key, self._make())
        return child

    def peek(self, **labels: str) -> _Child | None:
        """Return the child with exactly these labels, or None if nothing was recorded for them."""
        return self._children.get(self._key(labels))

    def _key(self, labels: dict[str, str]) -> tuple[str, ...]:
        if labels.keys() != self._label_set:
            raise InvalidInput(
                f"metric {self.name!r} takes the labels {list(self.label_names)}, not {list(labels)}"
            )
        return tuple([str(labels[name]) for name in self.label_names])

    def children(self) -> list[tuple[_Pairs, _Child]]:
        """Return every child with its labels, sorted by label values."""
        with self._lock:
            items = sorted(self._children.items(), key=lambda item: item[0])
        return [(tuple(zip(self.label_names, key, strict=True)), child) for key, child in items]

    def text(self) -> Iterator[str]:
        """Yield this metric's lines in the Prometheus text format."""
        name = self.name.replace(".", "_")
        yield f"# HELP {name} {self.help.translate(_LINE_ESCAPES)}"
        yield f"# TYPE {name} {self.kind}"
        for pairs, child in self.children():
            yield from child.lines(name, pairs)

    def samples(self) -> list[Sample]:
        return [{"labels": dict(pairs), "value": child.read()} for pairs, child in self.children()]


class Counter(_Family[CounterChild]):
    """A total that only increases."""

    kind = "counter"

    def inc(self, amount: float = 1, **labels: str) -> None:
        """Add `amount` to the child with these labels."""
        sole = self._sole
        (self.labels(**labels) if labels or sole is None else sole).inc(amount)


class Gauge(_Family[GaugeChild]):
    """A value that can increase and decrease."""

    kind = "gauge"

    def set(self, value: float, **labels: str) -> None:
        sole = self._sole
        (self.labels(**labels) if labels or sole is None else sole).set(value)

    def inc(self, amount: float = 1, **labels: str) -> None:
        """Add `amount`, which may be negative, to the child with these labels."""
        sole = self._sole
        (self.labels(**labels) if labels or sole is None else sole).inc(amount)


class Histogram(_Family[HistogramChild]):
    """A distribution over fixed buckets."""

    kind = "histogram"

    def __init__(self, name: str, help: str, label_names: tuple[str, ...], bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        super().__init__(name, help, label_names, lambda: HistogramChild(bounds))

    def observe(self, value: float, **labels: str) -> None:
        sole = self._sole
        (self.labels(**labels) if labels or sole is None else sole).observe(value)


_Metric: TypeAlias = Counter | Gauge | Histogram


class Registry:
    """Metrics by name. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._metrics: dict[str, _Metric] = {}
        self._text_names: dict[str, str] = {}

    def counter(self, name: str, help: str, labels: Sequence[str] = ()) -> Counter:
        """Return the counter `name`, created on first use. Raise `InvalidInput` for a mismatch."""
        label_names = _checked(name, labels)
        metric = self._add(name, label_names, lambda: Counter(name, help, label_names, CounterChild))
        return metric if isinstance(metric, Counter) else _mismatch(metric, "counter")

    def gauge(self, name: str, help: str, labels: Sequence[str] = ()) -> Gauge:
        """Return the gauge `name`, created on first use. Raise `InvalidInput` for a mismatch."""
        label_names = _checked(name, labels)
        metric = self._add(name, label_names, lambda: Gauge(name, help, label_names, GaugeChild))
        return metric if isinstance(metric, Gauge) else _mismatch(metric, "gauge")

    def histogram(
        self, name: str, help: str, labels: Sequence[str] = (), buckets: Iterable[float] = SECONDS_BUCKETS
    ) -> Histogram:
        """Return the histogram `name`, created on first use. Raise `InvalidInput` for a mismatch."""
        label_names = _checked(name, labels)
        bounds = _checked_bounds(name, label_names, buckets)
        metric = self._add(name, label_names, lambda: Histogram(name, help, label_names, bounds))
        if not isinstance(metric, Histogram):
            return _mismatch(metric, "histogram")
        if metric.bounds != bounds:
            raise InvalidInput(
                f"metric {name!r} already exists with the buckets {metric.bounds}, not {bounds}"
            )
        return metric

    def prometheus_text(self) -> str:
        """Return every metric in the Prometheus text format 0.0.4, sorted by name."""
        return "".join(f"{line}\n" for metric in self._sorted() for line in metric.text())

    def snapshot(self) -> dict[str, list[Sample]]:
        """Return every metric as plain JSON values: each name with a list of labels and values."""
        return {metric.name: metric.samples() for metric in self._sorted()}

    def kinds(self) -> dict[str, Kind]:
        """Return the kind of each metric, by name."""
        return {metric.name: metric.kind for metric in self._sorted()}

    def value(self, name: str, **labels: str) -> float:
        """Return the value of a counter or gauge, or the count of a histogram; 0 for unseen labels.

        Raise `InvalidInput` if no metric has that name.
        """
        metric = self._metrics.get(name)
        if metric is None:
            raise InvalidInput(f"no metric is named {name!r}")
        child = metric.peek(**labels)
        if child is None:
            return 0
        return child.count() if isinstance(child, HistogramChild) else child.read()

    def _add(self, name: str, label_names: tuple[str, ...], make: Callable[[], _Metric]) -> _Metric:
        with self._lock:
            metric = self._metrics.get(name)
            if metric is None:
                text_name = name.replace(".", "_")
                other = self._text_names.setdefault(text_name, name)
                if other != name:
                    raise InvalidInput(f"metrics {other!r} and {name!r} would both be called {text_name!r}")
                metric = self._metrics[name] = make()
        if metric.label_names != label_names:
            existing = list(metric.label_names)
            raise InvalidInput(
                f"metric {name!r} already exists with the labels {existing}, not {list(label_names)}"
            )
        return metric

    def _sorted(self) -> list[_Metric]:
        with self._lock:
            return [metric for _, metric in sorted(self._metrics.items())]


def _mismatch(metric: _Metric, kind: Kind) -> NoReturn:
    raise InvalidInput(f"metric {metric.name!r} already exists as a {metric.kind}, not a {kind}")


def _checked(name: str, labels: Sequence[str]) -> tuple[str, ...]:
    if not _NAME.fullmatch(name):
        raise InvalidInput(
            f"{name!r} is not a metric name: write words joined by dots, such as 'buffer.acks'"
        )
    for label in labels:
        if not _LABEL.fullmatch(label):
            raise InvalidInput(f"{label!r} is not a label name of metric {name!r}")
    if len(set(labels)) != len(labels):
        raise InvalidInput(f"metric {name!r} names a label twice: {list(labels)}")
    return tuple(labels)


def _checked_bounds(name: str, labels: tuple[str, ...], buckets: Iterable[float]) -> tuple[float, ...]:
    bounds = tuple(float(bound) for bound in buckets if bound != math.inf)
    if "le" in labels:
        raise InvalidInput(f"histogram {name!r} cannot have a label 'le': its buckets use it")
    if not bounds or not all(low < high for low, high in zip(bounds, (*bounds[1:], math.inf), strict=True)):
        raise InvalidInput(f"histogram {name!r} needs finite buckets in rising order, not {bounds}")
    return bounds


def _line(name: str, pairs: _Pairs, value: float) -> str:
    if not pairs:
        return f"{name} {_number(value)}"
    labels = ",".join(f'{label}="{text.translate(_LABEL_ESCAPES)}"' for label, text in pairs)
    return f"{name}{{{labels}}} {_number(value)}"


def _number(value: float) -> str:
    if isinstance(value, int):
        return str(value)
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return "NaN" if math.isnan(value) else repr(float(value))


DEFAULT_REGISTRY: Final = Registry()
"""The registry of this process, for callers that do not pass their own."""
