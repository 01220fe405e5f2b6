"""A slow reference evaluation of PromQL, one step and one series at a time, following the definitions.

It shares only the parser with the engine. Values are plain floats, and windows are plain lists.
"""

from __future__ import annotations

import fractions
import math
import re
import struct
from itertools import pairwise
from typing import Any

import promql_parser as ast

Series = dict[frozenset[tuple[str, str]], list[tuple[int, float]]]
Vector = dict[frozenset[tuple[str, str]], float]
LOOKBACK_MS = 300_000
STALE = 0x7FF0000000000002


class Conflict(Exception):
    """The definitions allow no result."""


def bits(value: float) -> int:
    return int(struct.unpack("<Q", struct.pack("<d", value))[0])


class Reference:
    """The value of an expression at one time."""

    def __init__(self, series: Series, start_ms: int, end_ms: int) -> None:
        self.series = series
        self.start_ms, self.end_ms = start_ms, end_ms

    def value(self, node: Any, t: int) -> Any:
        return getattr(self, "on_" + type(node).__name__)(node, t)

    # Selectors

    def shifted(self, node: Any, t: int) -> int:
        if node.at is not None:
            if node.at.type == ast.AtModifierType.Start:
                t = self.start_ms
            elif node.at.type == ast.AtModifierType.End:
                t = self.end_ms
            else:
                t = round(node.at.at.timestamp() * 1000)
        return t - (0 if node.offset is None else round(node.offset.total_seconds() * 1000))

    def matching(self, node: Any) -> list[frozenset[tuple[str, str]]]:
        tests = [("=", "__name__", node.name)] if node.name else []
        ops = {"Equal": "=", "NotEqual": "!=", "Re": "=~", "NotRe": "!~"}
        tests += [(ops[str(m.op).split(".")[-1]], m.name, m.value) for m in node.matchers.matchers]

        def holds(labels: dict[str, str]) -> bool:
            for op, name, wanted in tests:
                own = labels.get(name, "")
                hit = own == wanted if "~" not in op else re.fullmatch(wanted, own, re.DOTALL) is not None
                if hit == op.startswith("!"):
                    return False
            return True

        return [labels for labels in self.series if holds(dict(labels))]

    def on_VectorSelector(self, node: Any, t: int) -> Vector:
        return {labels: value for labels, (_, value) in self.newest(node, t).items()}

    def newest(self, node: Any, t: int) -> dict[frozenset[tuple[str, str]], tuple[int, float]]:
        t = self.shifted(node, t)
        found = {}
        for labels in self.matching(node):
            seen = [sample for sample in self.series[labels] if t - LOOKBACK_MS < sample[0] <= t]
            if seen and bits(seen[-1][1]) != STALE:
                found[labels] = seen[-1]
        return found

    def window(self, node: Any, t: int) -> tuple[dict[Any, list[tuple[int, float]]], int, int]:
        while isinstance(node, ast.ParenExpr):
            node = node.expr
        width = round(node.range.total_seconds() * 1000)
        found: dict[Any, list[tuple[int, float]]] = {}
        if isinstance(node, ast.SubqueryExpr):
            end = self.shifted(node, t)
            step = 60_000 if node.step is None else round(node.step.total_seconds() * 1000)
            for at in range((end - width) // step * step, end + 1, step):
                if at > end - width:
                    inner = self.value(node.expr, at)
                    for labels, value in (inner if isinstance(inner, dict) else {frozenset(): inner}).items():
                        found.setdefault(labels, []).append((at, value))
            return found, end, width
        end = self.shifted(node.vector_selector, t)
        for labels in self.matching(node.vector_selector):
            seen = [s for s in self.series[labels] if end - width < s[0] <= end and bits(s[1]) != STALE]
            if seen:
                found[labels] = seen
        return found, end, width

    # Plain nodes

    def on_NumberLiteral(self, node: Any, t: int) -> float:
        return float(node.val)

    def on_ParenExpr(self, node: Any, t: int) -> Any:
        return self.value(node.expr, t)

    def on_UnaryExpr(self, node: Any, t: int) -> Any:
        value = self.value(node.expr, t)
        return unnamed({k: -v for k, v in value.items()}) if isinstance(value, dict) else -value

    # Operators

    def on_BinaryExpr(self, node: Any, t: int) -> Any:
        op, left, right = str(node.op), self.value(node.lhs, t), self.value(node.rhs, t)
        as_bool = node.modifier is not None and node.modifier.return_bool
        if not isinstance(left, dict) and not isinstance(right, dict):
            return operate(op, left, right)[0] if op in ARITHMETIC else float(operate(op, left, right)[1])
        if not isinstance(left, dict) or not isinstance(right, dict):
            vector = left if isinstance(left, dict) else right
            result = []
            for labels, value in vector.items():
                a, b = (value, right) if vector is left else (left, value)
                got, keep = operate(op, a, b)
                if op in ARITHMETIC:
                    result.append((drop(labels, "__name__"), got))
                elif as_bool:
                    result.append((drop(labels, "__name__"), float(keep)))
                elif keep:
                    result.append((labels, value))
            return collect(result)
        return self.vectors(node, op, left, right, as_bool)

    def vectors(self, node: Any, op: str, left: Vector, right: Vector, as_bool: bool) -> Vector:
        modifier = node.modifier
        names, on = matched_on(modifier)

        def signature(labels: frozenset[tuple[str, str]]) -> frozenset[tuple[str, str]]:
            return keep_only(labels, *names) if on else drop(labels, "__name__", *names)

        if op in ("and", "or", "unless"):
            return set_operation(op, left, right, signature)
        if not left or not right:
            return {}
        card = modifier.card if modifier is not None else ast.VectorMatchCardinality.OneToOne
        swapped = card == ast.VectorMatchCardinality.OneToMany
        many, one = (right, left) if swapped else (left, right)
        single: dict[Any, Any] = {}
        for labels in one:
            if signature(labels) in single:
                raise Conflict("duplicate")
            single[signature(labels)] = labels
        grouped = card != ast.VectorMatchCardinality.OneToOne
        result: list[tuple[Any, float]] = []
        used = set()
        for labels, value in many.items():
            other = single.get(signature(labels))
            if other is None:
                continue
            a, b = (one[other], value) if swapped else (value, one[other])
            got, keep = operate(op, a, b)
            if op not in ARITHMETIC and not as_bool and not keep:
                continue
            if not grouped and signature(labels) in used:
                raise Conflict("many to one")
            used.add(signature(labels))
            final = labels if op not in ARITHMETIC and not as_bool else drop(labels, "__name__")
            if not grouped:
                final = keep_only(final, *names) if on else drop(final, *names)
            for name in modifier.group_labels or () if modifier is not None else ():
                final = drop(final, name) | {(n, v) for n, v in other if n == name}
            result.append((final, got if op in ARITHMETIC else float(keep) if as_bool else a))
        return collect(result)

    # Aggregations

    def on_AggregateExpr(self, node: Any, t: int) -> Vector:
        op, vector = str(node.op), self.value(node.expr, t)
        by, names = True, []
        if node.modifier is not None:
            by, names = node.modifier.type == ast.AggModifierType.By, list(node.modifier.labels)
        groups: dict[Any, list[Any]] = {}
        for labels, value in vector.items():
            key = keep_only(labels, *names) if by else drop(labels, "__name__", *names)
            groups.setdefault(key, []).append((labels, value))
        if op in ("topk", "bottomk"):
            k = int(self.value(node.param, t))
            sign = -1 if op == "topk" else 1
            chosen: Vector = {}
            for members in groups.values():
                members.sort(
                    key=lambda m: (math.isnan(m[1]), sign * m[1] if m[1] == m[1] else 0, sorted(m[0]))
                )
                chosen |= dict(members[: max(k, 0)])
            return chosen
        if op == "quantile":
            q = self.value(node.param, t)
            return {key: quantile(q, [v for _, v in members]) for key, members in groups.items()}
        return {key: AGGREGATE[op]([v for _, v in members]) for key, members in groups.items()}

    # Functions

    def on_Call(self, node: Any, t: int) -> Any:
        name, args = node.func.name, list(node.args)
        if name in RANGE:
            found, end, width = self.window(args[-1] if name == "quantile_over_time" else args[0], t)
            scalars = {"quantile_over_time": args[:1], "predict_linear": args[1:]}.get(name, [])
            extra = [self.value(arg, t) for arg in scalars]
            if name == "predict_linear":
                extra = [extra[0] + (t - end) / 1000]
            result = []
            for labels, samples in found.items():
                value = RANGE[name](samples, end, width, *extra)
                if value is not None:
                    result.append((labels if name == "last_over_time" else drop(labels, "__name__"), value))
            return collect(result)
        return getattr(self, "call_" + name)(args, t)

    def call_time(self, args: list[Any], t: int) -> float:
        return t / 1000

    def call_vector(self, args: list[Any], t: int) -> Vector:
        return {frozenset(): self.value(args[0], t)}

    def call_scalar(self, args: list[Any], t: int) -> float:
        vector = self.value(args[0], t)
        return next(iter(vector.values())) if len(vector) == 1 else math.nan

    def call_timestamp(self, args: list[Any], t: int) -> Vector:
        if isinstance(args[0], ast.VectorSelector):
            return unnamed({k: at / 1000 for k, (at, _) in self.newest(args[0], t).items()})
        return unnamed(dict.fromkeys(self.value(args[0], t), t / 1000))

    def call_absent(self, args: list[Any], t: int) -> Vector:
        return {} if self.value(args[0], t) else {frozenset(ABSENT_LABELS): 1.0}

    def call_histogram_quantile(self, args: list[Any], t: int) -> Vector:
        q = self.value(args[0], t)
        groups: dict[Any, list[tuple[float, float]]] = {}
        for labels, value in self.value(args[1], t).items():
            le = dict(labels).get("le")
            if le is not None:
                groups.setdefault(drop(labels, "__name__", "le"), []).append((float(le), value))
        return {key: bucket_quantile(q, sorted(buckets)) for key, buckets in groups.items()}

    def call_abs(self, args: list[Any], t: int) -> Vector:
        return unnamed({k: abs(v) for k, v in self.value(args[0], t).items()})

    def call_clamp(self, args: list[Any], t: int) -> Vector:
        low, high = self.value(args[1], t), self.value(args[2], t)
        vector = self.value(args[0], t) if low <= high else {}
        return unnamed({k: v if math.isnan(v) else max(low, min(high, v)) for k, v in vector.items()})

    def call_round(self, args: list[Any], t: int) -> Vector:
        to = self.value(args[1], t) if len(args) > 1 else 1.0

        def rounded(value: float) -> float:
            scaled = value * (1 / to) + 0.5
            return math.floor(scaled) / (1 / to) if math.isfinite(scaled) else scaled

        return unnamed({k: rounded(v) for k, v in self.value(args[0], t).items()})


def matched_on(modifier: Any) -> tuple[list[str], bool]:
    if modifier is None or modifier.matching is None:
        return [], False
    return list(modifier.matching.labels), modifier.matching.type == ast.LabelModifierType.Include


def set_operation(op: str, left: Vector, right: Vector, signature: Any) -> Vector:
    right_keys, left_keys = {signature(k) for k in right}, {signature(k) for k in left}
    if op == "or":
        return left | {k: v for k, v in right.items() if signature(k) not in left_keys}
    return {k: v for k, v in left.items() if (signature(k) in right_keys) == (op == "and")}


# The labels of a missing series in the test queries.
ABSENT_LABELS: set[tuple[str, str]] = set()


def drop(labels: frozenset[tuple[str, str]], *names: str) -> frozenset[tuple[str, str]]:
    return frozenset(pair for pair in labels if pair[0] not in names)


def keep_only(labels: frozenset[tuple[str, str]], *names: str) -> frozenset[tuple[str, str]]:
    return frozenset(pair for pair in labels if pair[0] in names)


def collect(pairs: list[tuple[Any, float]]) -> Vector:
    if len(dict(pairs)) != len(pairs):
        raise Conflict("same labelset")
    return dict(pairs)


def unnamed(vector: Vector) -> Vector:
    return collect([(drop(labels, "__name__"), value) for labels, value in vector.items()])


def power(a: float, b: float) -> float:
    try:
        result = a**b
        return math.nan if isinstance(result, complex) else result
    except ZeroDivisionError:
        return -math.inf if math.copysign(1, a) < 0 and b % 2 == 1 else math.inf
    except OverflowError:
        return -math.inf if a < 0 and b % 2 == 1 else math.inf


def divide(a: float, b: float) -> float:
    if b:
        return a / b
    return math.nan if a == 0 or math.isnan(a) else math.copysign(math.inf, a) * math.copysign(1, b)


def modulo(a: float, b: float) -> float:
    try:
        return math.fmod(a, b)
    except ValueError:
        return math.nan


ARITHMETIC = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": divide,
    "%": modulo,
    "^": power,
}
COMPARISON = {
    "==": lambda a, b: a == b,
    "!=": lambda a, b: a != b,
    ">": lambda a, b: a > b,
    "<": lambda a, b: a < b,
    ">=": lambda a, b: a >= b,
    "<=": lambda a, b: a <= b,
}


def operate(op: str, a: float, b: float) -> tuple[float, bool]:
    return (ARITHMETIC[op](a, b), True) if op in ARITHMETIC else (a, COMPARISON[op](a, b))


def exact_sum(values: list[float]) -> float:
    if all(map(math.isfinite, values)):
        return float(sum(map(fractions.Fraction, values), fractions.Fraction()))
    return sum(values)


def mean(values: list[float]) -> float:
    return exact_sum(values) / len(values)


def variance(values: list[float]) -> float:
    middle = mean(values)
    return mean([(value - middle) ** 2 for value in values])


def least(values: list[float]) -> float:
    numbers = [value for value in values if value == value]
    return min(numbers) if numbers else math.nan


def most(values: list[float]) -> float:
    numbers = [value for value in values if value == value]
    return max(numbers) if numbers else math.nan


def quantile(q: float, values: list[float]) -> float:
    if math.isnan(q) or not values:
        return math.nan
    if q < 0 or q > 1:
        return math.copysign(math.inf, q - 0.5)
    ordered = sorted(values, key=lambda value: (value == value, value if value == value else 0))
    rank = q * (len(ordered) - 1)
    low = math.floor(rank)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] * (1 - (rank - low)) + ordered[high] * (rank - low)


AGGREGATE = {
    "sum": exact_sum,
    "avg": mean,
    "min": least,
    "max": most,
    "count": lambda values: float(len(values)),
    "group": lambda values: 1.0,
    "stddev": lambda values: math.sqrt(variance(values)),
    "stdvar": variance,
}


def extrapolated(samples: Any, end: int, width: int, counter: bool, per_second: bool) -> float | None:
    if len(samples) < 2:
        return None
    change = samples[-1][1] - samples[0][1]
    if counter:
        for (_, before), (_, value) in pairwise(samples):
            if value < before:
                change += before
    sampled = (samples[-1][0] - samples[0][0]) / 1000
    average = sampled / (len(samples) - 1)
    to_start, to_end = (samples[0][0] - (end - width)) / 1000, (end - samples[-1][0]) / 1000
    if to_start >= average * 1.1:
        to_start = average / 2
    if counter and change > 0 and samples[0][1] >= 0:
        to_start = min(to_start, sampled * (samples[0][1] / change))
    if to_end >= average * 1.1:
        to_end = average / 2
    factor = (sampled + to_start + to_end) / sampled
    return change * (factor / (width / 1000) if per_second else factor)


def of_the_last_two(samples: Any, counter: bool) -> float | None:
    if len(samples) < 2:
        return None
    (t0, v0), (t1, v1) = samples[-2:]
    if not counter:
        return float(v1 - v0)
    return float((v1 if v1 < v0 else v1 - v0) / ((t1 - t0) / 1000))


def line(samples: Any, end: int) -> tuple[float, float] | None:
    if len(samples) < 2:
        return None
    x, y = [(at - end) / 1000 for at, _ in samples], [value for _, value in samples]
    if all(value == y[0] for value in y):
        return (0.0, y[0]) if math.isfinite(y[0]) else (math.nan, math.nan)
    middle_x, middle_y = mean(x), mean(y)
    slope = exact_sum([(a - middle_x) * (b - middle_y) for a, b in zip(x, y, strict=True)])
    slope /= exact_sum([(a - middle_x) ** 2 for a in x])
    return slope, middle_y - slope * middle_x


def neighbours(samples: Any) -> list[tuple[float, float]]:
    return [(a[1], b[1]) for a, b in pairwise(samples)]


RANGE: dict[str, Any] = {
    "rate": lambda s, e, w: extrapolated(s, e, w, True, True),
    "increase": lambda s, e, w: extrapolated(s, e, w, True, False),
    "delta": lambda s, e, w: extrapolated(s, e, w, False, False),
    "irate": lambda s, e, w: of_the_last_two(s, True),
    "idelta": lambda s, e, w: of_the_last_two(s, False),
    "sum_over_time": lambda s, e, w: exact_sum([v for _, v in s]),
    "avg_over_time": lambda s, e, w: mean([v for _, v in s]),
    "min_over_time": lambda s, e, w: least([v for _, v in s]),
    "max_over_time": lambda s, e, w: most([v for _, v in s]),
    "count_over_time": lambda s, e, w: float(len(s)),
    "last_over_time": lambda s, e, w: s[-1][1],
    "present_over_time": lambda s, e, w: 1.0,
    "stddev_over_time": lambda s, e, w: math.sqrt(variance([v for _, v in s])),
    "stdvar_over_time": lambda s, e, w: variance([v for _, v in s]),
    "quantile_over_time": lambda s, e, w, q: quantile(q, [v for _, v in s]),
    "changes": lambda s, e, w: float(
        sum(a != b and not (math.isnan(a) and math.isnan(b)) for a, b in neighbours(s))
    ),
    "resets": lambda s, e, w: float(sum(b < a for a, b in neighbours(s))),
    "deriv": lambda s, e, w: None if len(s) < 2 else line(s, e)[0],  # type: ignore[index]
    "predict_linear": lambda s, e, w, ahead: (
        None if len(s) < 2 else line(s, e)[1] + line(s, e)[0] * ahead  # type: ignore[index]
    ),
}


def bucket_quantile(q: float, buckets: list[tuple[float, float]]) -> float:
    if math.isnan(q):
        return math.nan
    if q < 0 or q > 1:
        return math.copysign(math.inf, q - 0.5)
    if buckets[-1][0] != math.inf or len(buckets) < 2:
        return math.nan
    counts: list[float] = []
    for _, count in buckets:
        counts.append(max(count, counts[-1]) if counts else count)
    if counts[-1] == 0:
        return math.nan
    rank = q * counts[-1]
    number = next(i for i, count in enumerate(counts) if count >= rank)
    if number == len(buckets) - 1:
        return buckets[-2][0]
    upper = buckets[number][0]
    if number == 0:
        return upper if upper <= 0 else upper * (rank / counts[0])
    lower, below = buckets[number - 1][0], counts[number - 1]
    return lower + (upper - lower) * ((rank - below) / (counts[number] - below))
