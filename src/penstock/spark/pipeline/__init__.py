"""Pipelines: a YAML file that says where records come from, what becomes of them, and where they go."""

from __future__ import annotations

from penstock.spark.pipeline.pipeline import Pipeline, PipelineStatus, RunningPipeline
from penstock.spark.pipeline.spec import PipelineSpec, load_spec

__all__ = ["Pipeline", "PipelineSpec", "PipelineStatus", "RunningPipeline", "load_spec"]
