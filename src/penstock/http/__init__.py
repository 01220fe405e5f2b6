"""HTTP/1.1 and cleartext HTTP/2 on one port, as a transport for any application.

An `Application` turns a `Request` into a `Response`. A `Listener` serves it over TCP with bounded memory:
heads, bodies, connections, streams and unsent output all have a limit. `App` is the application with routes,
keys and limits that every port of Penstock uses.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.lazy import lazy_exports

if TYPE_CHECKING:
    from penstock.http.app import (
        App,
        Authenticate,
        Call,
        Cap,
        Deliver,
        Errors,
        Policy,
        Route,
        Routes,
        body_limit,
        missed,
    )
    from penstock.http.auth import ANYONE, NOBODY, Keyring, Principal, Scope, no_key, sites_of
    from penstock.http.connection import RequestTask
    from penstock.http.errors import (
        Forbidden,
        MethodNotAllowed,
        NotAcceptable,
        PayloadTooLarge,
        Refusal,
        TransportFault,
        Unauthorized,
        UnknownPath,
        UnsupportedMediaType,
    )
    from penstock.http.limits import HttpLimits
    from penstock.http.listener import Listener, run, settle, tune
    from penstock.http.message import (
        JSON,
        Application,
        Fault,
        HeaderList,
        Request,
        Response,
        StreamWriter,
        UpgradeWriter,
    )
    from penstock.http.sites import Sites, allowed_hosts

__all__ = [
    "ANYONE",
    "JSON",
    "NOBODY",
    "App",
    "Application",
    "Authenticate",
    "Call",
    "Cap",
    "Deliver",
    "Errors",
    "Fault",
    "Forbidden",
    "HeaderList",
    "HttpLimits",
    "Keyring",
    "Listener",
    "MethodNotAllowed",
    "NotAcceptable",
    "PayloadTooLarge",
    "Policy",
    "Principal",
    "Refusal",
    "Request",
    "RequestTask",
    "Response",
    "Route",
    "Routes",
    "Scope",
    "Sites",
    "StreamWriter",
    "TransportFault",
    "Unauthorized",
    "UnknownPath",
    "UnsupportedMediaType",
    "UpgradeWriter",
    "allowed_hosts",
    "body_limit",
    "missed",
    "no_key",
    "run",
    "settle",
    "sites_of",
    "tune",
]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "app": "App Authenticate Call Cap Deliver Errors Policy Route Routes body_limit missed",
            "auth": "ANYONE NOBODY Keyring Principal Scope no_key sites_of",
            "errors": (
                "Forbidden MethodNotAllowed NotAcceptable PayloadTooLarge Refusal TransportFault "
                "Unauthorized UnknownPath UnsupportedMediaType"
            ),
            "connection": "RequestTask",
            "limits": "HttpLimits",
            "listener": "Listener run settle tune",
            "message": "JSON Application Fault HeaderList Request Response StreamWriter UpgradeWriter",
            "sites": "Sites allowed_hosts",
        },
    )
