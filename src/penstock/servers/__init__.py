"""The HTTP servers: topics (`/v0`), time series and vectors, over the transport of `penstock.http`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.lazy import lazy_exports

if TYPE_CHECKING:
    from penstock.servers.errors import STATUS, told
    from penstock.servers.process import serve_topics
    from penstock.servers.scheduling import shorten_slice
    from penstock.servers.settings import ServerSettings, check_reach, is_loopback, unknown_variables
    from penstock.servers.timeseries.routes import serve_timeseries
    from penstock.servers.timeseries.settings import Acknowledge, TimeSeriesSettings
    from penstock.servers.topics.answers import read_cursor
    from penstock.servers.topics.sse import HEADERS, RETRY, event
    from penstock.servers.vector.routes import serve_vector
    from penstock.servers.vector.settings import VectorSettings

__all__ = [
    "HEADERS",
    "RETRY",
    "STATUS",
    "Acknowledge",
    "ServerSettings",
    "TimeSeriesSettings",
    "VectorSettings",
    "check_reach",
    "event",
    "is_loopback",
    "read_cursor",
    "serve_timeseries",
    "serve_topics",
    "serve_vector",
    "shorten_slice",
    "told",
    "unknown_variables",
]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "errors": "STATUS told",
            "process": "serve_topics",
            "scheduling": "shorten_slice",
            "settings": "ServerSettings check_reach is_loopback unknown_variables",
            "timeseries.routes": "serve_timeseries",
            "timeseries.settings": "Acknowledge TimeSeriesSettings",
            "topics.answers": "read_cursor",
            "topics.sse": "HEADERS RETRY event",
            "vector.routes": "serve_vector",
            "vector.settings": "VectorSettings",
        },
    )
