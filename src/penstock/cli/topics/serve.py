"""`penstock topics serve`: the event-log server in the foreground."""

from __future__ import annotations

import asyncio
import logging
import os
import sys

import click

from penstock.cli.failure import ExitCode
from penstock.errors import Unsupported

__all__ = ["serve"]

_LOG = logging.getLogger(__name__)

_ENVIRONMENT = """\b
Environment (the defaults are for one machine):
  TOPICS_HOST, TOPICS_PORT        127.0.0.1 and 4000; port 0 takes a free one
  TOPICS_PORT_FILE                where to write host:port once it listens
  TOPICS_DATA_DIR                 ./topics-data
  TOPICS_COLD_DIR                 a directory or a store URL for old segments
  TOPICS_API_KEYS                 key[:scopes[:prefixes]],…
  TOPICS_PROBE_AUTH               1 asks for a key on health and ready, too
  TOPICS_ALLOW_INSECURE_NO_AUTH   1 lets others in without a key
  TOPICS_ALLOWED_HOSTS            without keys: further names of this server, and
                                  of pages that may use it, by commas; * for any
  TOPICS_WAL_SHARDS, TOPICS_SEGMENT_MAX_EVENTS, …_BYTES, …_AGE_MS,
  TOPICS_HOT_RETAIN_SEGMENTS, …_BYTES, TOPICS_MAX_BODY_BYTES, TOPICS_MAX_TOPICS,
  TOPICS_MAX_ROUTERS, TOPICS_MAX_WATCH_SESSIONS, TOPICS_MAX_SSE_CONNECTIONS,
  TOPICS_MAX_SSE_CONNECTIONS_PER_KEY, TOPICS_MAX_INFLIGHT_PER_KEY,
  TOPICS_MAX_TOTAL_BYTES, TOPICS_LOG
"""


@click.command(epilog=_ENVIRONMENT)
def serve() -> int:
    """Serve topics over HTTP until SIGTERM or Ctrl-C.

    The port answers at once; until the log is replayed, requests get 503. A stop lets what is under way
    finish, for ten seconds at most, and ends with exit code 0.
    """
    try:
        from penstock.http import run, settle
        from penstock.servers import ServerSettings, serve_topics, unknown_variables
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        raise Unsupported(
            f"the server needs the package {package}: pip install 'penstock[topics]'"
        ) from error
    from penstock.topics import Engine

    settings = ServerSettings.from_env(os.environ)
    logging.basicConfig(
        level=settings.log_level.upper(), format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr
    )
    for sentence in unknown_variables(os.environ):
        _LOG.warning("%s", sentence)

    async def main(stop: asyncio.Event) -> None:
        await serve_topics(settings, Engine(settings.engine), stop, on_bound=_say_where, on_ready=settle)

    run(main)
    return ExitCode.OK


def _say_where(host: str, port: int) -> None:
    name = f"[{host}]" if ":" in host else host
    _LOG.info("listening on http://%s:%d", name, port)
