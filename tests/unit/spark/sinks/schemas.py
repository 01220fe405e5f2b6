"""Columns in SQL notation, parsed without Spark."""

from __future__ import annotations

import re

from pyspark.sql import types as T

__all__ = ["schema_of"]

_TYPES: dict[str, T.DataType] = {
    "array<double>": T.ArrayType(T.DoubleType()),
    "array<float>": T.ArrayType(T.FloatType()),
    "bigint": T.LongType(),
    "boolean": T.BooleanType(),
    "double": T.DoubleType(),
    "int": T.IntegerType(),
    "map<string,string>": T.MapType(T.StringType(), T.StringType()),
    "string": T.StringType(),
    "timestamp": T.TimestampType(),
}


def schema_of(words: str) -> T.StructType:
    """Return the schema for `name type, name type`. Names with spaces are in backticks."""
    found = re.findall(r"(?:`([^`]+)`|(\w+)) ([a-z]+(?:<[a-z,]+>)?)(?:, |$)", words)
    return T.StructType([T.StructField(quoted or plain, _TYPES[kind]) for quoted, plain, kind in found])
