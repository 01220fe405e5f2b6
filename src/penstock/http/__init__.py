"""HTTP/1.1 and cleartext HTTP/2 on one port, as a transport for any application.

An `Application` turns a `Request` into a `Response`; a `Listener` carries both over TCP with bounded memory:
heads, bodies, connections, streams and what waits to be sent all have a cap.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.lazy import lazy_exports

if TYPE_CHECKING:
    from penstock.http.flight import Flight
    from penstock.http.limits import HttpLimits
    from penstock.http.listener import Listener
    from penstock.http.live import Sink, TunnelSink
    from penstock.http.message import JSON, Application, Fault, HeaderList, Request, Response
    from penstock.http.process import run, settle, tune
    from penstock.http.routes import Match, Router
    from penstock.http.sites import Sites, allowed_hosts

__all__ = [
    "JSON",
    "Application",
    "Fault",
    "Flight",
    "HeaderList",
    "HttpLimits",
    "Listener",
    "Match",
    "Request",
    "Response",
    "Router",
    "Sink",
    "Sites",
    "TunnelSink",
    "allowed_hosts",
    "run",
    "settle",
    "tune",
]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "flight": "Flight",
            "limits": "HttpLimits",
            "listener": "Listener",
            "live": "Sink TunnelSink",
            "message": "JSON Application Fault HeaderList Request Response",
            "process": "run settle tune",
            "routes": "Match Router",
            "sites": "Sites allowed_hosts",
        },
    )
