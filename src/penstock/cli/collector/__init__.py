"""`penstock collector …`: run the OTLP collector, and look at what destinations refused."""

from __future__ import annotations

__all__ = []
