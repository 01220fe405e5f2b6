"""Pipelines: a YAML file describes the source of the records, their processing, and their sinks."""

from __future__ import annotations

from penstock.spark.pipeline.pipeline import Pipeline, PipelineStatus, RunningPipeline
from penstock.spark.pipeline.spec import PipelineSpec, load_spec

__all__ = ["Pipeline", "PipelineSpec", "PipelineStatus", "RunningPipeline", "load_spec"]
