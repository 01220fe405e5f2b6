"""HTTP/1.1 and cleartext HTTP/2 on one port, as a transport for any application.

An `Application` turns a `Request` into a `Response`; a `Listener` carries both over TCP with bounded memory:
heads, bodies, connections, streams and what waits to be sent all have a cap.
"""

from __future__ import annotations

from penstock.http.limits import HttpLimits
from penstock.http.listener import Listener
from penstock.http.message import Application, Fault, Request, Response
from penstock.http.routes import Match, Router
from penstock.http.sites import Sites

__all__ = [
    "Application",
    "Fault",
    "HttpLimits",
    "Listener",
    "Match",
    "Request",
    "Response",
    "Router",
    "Sites",
]
