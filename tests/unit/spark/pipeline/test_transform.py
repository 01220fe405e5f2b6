"""The relation of a transform's rows to records, derived from Spark's plan."""

from __future__ import annotations

import pytest

from penstock.errors import ConfigError
from penstock.spark.pipeline.sink_spec import DeltaSinkSpec, MergeSpec, SinkSpec
from penstock.spark.pipeline.transform import Shape, check_shape, shape_of_plan

FILTER = """Project [user#1, n#2L]
+- Filter (n#2L > cast(1 as bigint))
   +- SubqueryAlias input
      +- View (`input`, [user#1, n#2L])
         +- CollectMetrics 6e0f, [count(1) AS rows#9L], 3
            +- LogicalRDD [user#1, n#2L], true"""
PLANS = {
    "filter": (FILTER, Shape.ONE_TO_ONE),
    "sorted": (f"Sort [n#2L ASC NULLS FIRST], true\n{FILTER}", Shape.ONE_TO_ONE),
    "exploded": (f"Generate explode(xs#3), false, [x#4]\n{FILTER}", Shape.SPREAD),
    "joined": (f"Join Inner\n:- Range (0, 3)\n{FILTER}", Shape.SPREAD),
    "grouped": (f"Aggregate [user#1], [user#1, count(1)]\n{FILTER}", Shape.GROUPED),
    "distinct": (f"Distinct\n{FILTER}", Shape.GROUPED),
    "windowed": (f"Window [row_number()]\n{FILTER}", Shape.GROUPED),
    "limited": (f"GlobalLimit 3\n+- LocalLimit 3\n{FILTER}", Shape.CUT),
    "limited group": (f"GlobalLimit 3\n+- Aggregate [user#1]\n{FILTER}", Shape.CUT),
    "of the future": (f"SomethingNew [n#2L]\n{FILTER}", Shape.GROUPED),
}


@pytest.mark.parametrize("case", sorted(PLANS))
def test_the_shape_follows_from_the_operators_of_a_plan(case: str) -> None:
    plan, shape = PLANS[case]
    assert shape_of_plan(plan) is shape


def test_partial_groups_are_refused_unless_merged_or_accepted() -> None:
    plain = DeltaSinkSpec(path="t")
    merged = DeltaSinkSpec(path="t", merge=MergeSpec(keys=("user",), add=("n",)))
    with pytest.raises(ConfigError, match="partial results"):
        check_shape("totals", SinkSpec(delta=plain), Shape.GROUPED)
    check_shape("totals", SinkSpec(delta=merged), Shape.GROUPED)
    check_shape("totals", SinkSpec(delta=plain, per_batch=True), Shape.GROUPED)
    with pytest.raises(ConfigError, match="LIMIT"):
        check_shape("totals", SinkSpec(delta=plain, per_batch=True), Shape.CUT)
