"""Penstock: durable ingestion through object storage and Spark.

The package itself imports nothing. Import each engine from its own subpackage, for example
`from penstock.buffer import Producer`.
"""

from __future__ import annotations

__all__ = ["__version__"]

__version__ = "0.1.0"
