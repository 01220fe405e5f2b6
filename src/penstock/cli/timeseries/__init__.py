"""`penstock timeseries …`: a database of time series."""

from __future__ import annotations

__all__ = []
