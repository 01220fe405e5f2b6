"""One of two equal worlds: a server, its console and its writers, controlled through standard input.

    python console_world.py DIR TOPICS CORE

Each order is a line of JSON: the start time, whether the console is watched, and the duration.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from console_stage import Host, Page, cpu_s, with_topics
from topics_load import Connection, HttpAnswer, drive
from topics_server import Server, bodies, opened, texts, write_requests

BATCH = 100
WRITERS = 4
_CAP_BYTES = 64 << 20
"""Record cap of the written topic, so that the server's state is the same in all turns."""


def main(root: Path, topics: int) -> None:
    with Server(root) as server, Host(with_topics(server, topics)) as host:
        server.ask("PUT", "/v0/topics/ingest", {"cap_bytes": _CAP_BYTES})
        requests = write_requests("ingest", bodies(texts(WRITERS * BATCH * 2), BATCH))
        page = Page(host.port)
        with opened([Connection(server.port, requests, HttpAnswer()) for _ in range(WRITERS)]) as writers:
            print(json.dumps({"pid": server.pid}), flush=True)
            for line in sys.stdin:
                order = json.loads(line)
                time.sleep(max(0.0, order["begin"] - time.monotonic()))
                before = cpu_s(server.pid), cpu_s(host.pid)
                if order["watched"]:
                    page.open()
                load = drive(writers, order["begin"] + order["seconds"] - time.monotonic())
                after = cpu_s(server.pid), cpu_s(host.pid)
                page.close()
                found = {
                    "records": load.requests * BATCH,
                    "seconds": load.seconds,
                    "server_s": after[0] - before[0],
                    "console_s": after[1] - before[1],
                }
                print(json.dumps(found), flush=True)


if __name__ == "__main__":
    os.sched_setaffinity(0, {int(sys.argv[3])})  # child processes stay on this core
    main(Path(sys.argv[1]), int(sys.argv[2]))
