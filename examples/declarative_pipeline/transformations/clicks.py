"""Load a queue of clicks into a streaming table, and compute the clicks of each user from it."""

from __future__ import annotations

from pyspark import pipelines as dp
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from penstock.spark import register

spark = SparkSession.active()
register(spark)


@dp.table
def clicks() -> DataFrame:
    """Return each record of the queue once, with its position in the queue."""
    records = (
        spark.readStream.format("penstock-buffer")
        .option("store", spark.conf.get("clicks.store"))
        .option("columns", "shard,sequence,index,value")
        .load()
    )
    click = F.from_json(F.col("value").cast("string"), "user string, url string")
    return records.select("shard", "sequence", "index", click.alias("click")).select(
        "shard", "sequence", "index", "click.*"
    )


@dp.materialized_view
def clicks_per_user() -> DataFrame:
    """Count the clicks of each user, from the whole table in every run."""
    return spark.read.table("clicks").groupBy("user").agg(F.count("*").alias("clicks"))
