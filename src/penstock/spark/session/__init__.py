"""A Spark session: its Java process, its formats, and explanations of its failures."""

from __future__ import annotations

from penstock.spark.session.failures import explain
from penstock.spark.session.java import JavaHome, ensure_java, find_java
from penstock.spark.session.java_process import Ending, forget_java, java_ending, lost
from penstock.spark.session.session import build_session, check_spark, register

__all__ = [
    "Ending",
    "JavaHome",
    "build_session",
    "check_spark",
    "ensure_java",
    "explain",
    "find_java",
    "forget_java",
    "java_ending",
    "lost",
    "register",
]
