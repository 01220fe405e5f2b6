"""The SQL of a pipeline, which runs over one micro-batch at a time, and the consequences for its rows."""

from __future__ import annotations

import enum
import re
from typing import TYPE_CHECKING, Final

from penstock.errors import ConfigError
from penstock.spark.pipeline.sink_spec import SinkSpec
from penstock.spark.pipeline.spec import PipelineSpec

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

INPUT: Final = "input"
TRANSFORMED: Final = "transformed"

_ONE_TO_ONE: Final = frozenset(
    {
        "Project",
        "Filter",
        "SubqueryAlias",
        "View",
        "CollectMetrics",
        "WithCTE",
        "CTERelationDef",
        "CTERelationRef",
    }
)
_SOURCES: Final = frozenset(
    {"LocalRelation", "LogicalRDD", "Relation", "RelationV2", "StreamingRelationV2", "InMemoryRelation",
     "DataSourceV2Relation", "Range", "LogicalQueryStage", "StreamingDataSourceV2ScanRelation"}
)  # fmt: skip
_SPREADING: Final = frozenset({"Generate", "MapInArrow", "Union", "Join", "LateralJoin", "Expand"})
_CUTTING: Final = frozenset({"GlobalLimit", "LocalLimit", "Offset", "Sample", "Tail"})
_OPERATOR: Final = re.compile(r"^[\s:|+\-]*'?([A-Z][A-Za-z0-9]*)", re.MULTILINE)


class Shape(enum.Enum):
    """The relation of a transform's rows to the records that it read."""

    ONE_TO_ONE = "one to one"
    """Each row is one record. A filter dropped the records without a row."""
    SPREAD = "spread"
    """A record may become several rows."""
    GROUPED = "grouped"
    """A row may combine several records of one micro-batch."""
    CUT = "cut"
    """Records are dropped by count, so different runs drop different records."""


def shape_of_plan(plan: str) -> Shape:
    """Return the shape of an analysed plan, derived from its operators.

    An operator that is not known to keep rows separate counts as grouping.
    """
    operators = set(_OPERATOR.findall(plan))
    if operators & _CUTTING:
        return Shape.CUT
    unknown = operators - _ONE_TO_ONE - _SOURCES - _SPREADING
    if unknown - {"Sort"}:
        return Shape.GROUPED
    return Shape.SPREAD if operators & _SPREADING else Shape.ONE_TO_ONE


def check_shape(name: str, sink: SinkSpec, shape: Shape) -> None:
    """Raise `ConfigError` for a sink that would store partial groups, or different rows in each run."""
    if shape is Shape.CUT:
        raise ConfigError(
            f"sink {name}: its transform has a LIMIT, OFFSET or sample, which would drop different records "
            "when a micro-batch is repeated; filter by a condition instead"
        )
    if shape is Shape.GROUPED and sink.timeseries is not None and not sink.per_batch:
        raise ConfigError(
            f"sink {name}: its transform groups rows, and a pipeline sees one micro-batch at a time: if two "
            "micro-batches give points of one series and time, the later point replaces the earlier. Group "
            "in a separate stream with a watermark and write that to penstock-timeseries, or set "
            "per_batch: true if no two micro-batches give points of one series and time"
        )
    if shape is Shape.GROUPED and sink.merge is None and not sink.per_batch:
        raise ConfigError(
            f"sink {name}: its transform groups rows, and a pipeline sees one micro-batch at a time, so the "
            "table would contain partial results. Add merge: {keys: [...], add: [...]} to a delta sink to "
            "keep one row per group, or per_batch: true if you want a row per group and micro-batch"
        )


def apply_transform(good: DataFrame, spec: PipelineSpec, sink: SinkSpec) -> DataFrame:
    """Return the rows of one sink.

    `good` is the decoded frame without bad records. Raise Spark's own errors.
    """
    spark = good.sparkSession
    visible = good.drop("_reason")
    visible.createOrReplaceTempView(INPUT)
    if spec.transform is not None:
        main = spark.sql(spec.transform)
    else:
        main = visible.drop("_ingestion_time", "_metadata", "_value")
    if sink.transform is None:
        return main
    main.createOrReplaceTempView(TRANSFORMED)
    return spark.sql(sink.transform)


def analysed_plan(frame: DataFrame) -> str:
    """Return Spark's analysed plan as text."""
    jdf = getattr(frame, "_jdf", None)
    if jdf is not None:
        return str(jdf.queryExecution().analyzed().toString())
    import contextlib
    import io

    with contextlib.redirect_stdout(io.StringIO()) as text:
        frame.explain(extended=True)
    analysed = text.getvalue().partition("== Analyzed Logical Plan ==")[2]
    return analysed.partition("== Optimized")[0]
