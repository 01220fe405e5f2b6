"""Every call in the source that decodes JSON is known, with the reason why deep JSON cannot break it."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path
from typing import Final

import penstock

ROOT: Final = Path(penstock.__file__).parent
CALLS: Final = frozenset(
    {"json.load", "json.loads", "json.JSONDecoder", "msgspec.json.decode", "msgspec.json.Decoder"}
)
NAMES: Final = frozenset({"load", "loads", "JSONDecoder", "decode", "Decoder"})
CHECKED: Final = "the text passes the check of `penstock.jsontext` first"
CAUGHT: Final = "text of any depth: RecursionError is caught, or `unreadable` is asked first"
ANSWER: Final = "answers of a server without values of users"
OWN: Final = "text that Penstock or Spark wrote itself, of a fixed shape, without values of users"
KNOWN: Final[dict[str, tuple[int, str]]] = {
    "buffer/fsck.py": (1, CAUGHT),
    "buffer/sharded.py": (1, OWN),
    "buffer/side_objects.py": (1, OWN),
    "buffer/transactions.py": (1, OWN),
    "cli/topics/read.py": (1, CAUGHT),
    "cli/topics/write.py": (3, CHECKED),
    "collector/dead_letters.py": (1, OWN),
    "console/access.py": (1, OWN),
    "console/console.py": (1, CHECKED),
    "console/databases_panel.py": (2, CHECKED),
    "console/redrive.py": (2, CHECKED),
    "console/relayed.py": (1, CAUGHT),
    "otlp/json_form.py": (1, CHECKED),
    "quiver/offsets/external.py": (1, OWN),
    "quiver/segments/metadata.py": (3, OWN),
    "servers/topics/answers.py": (1, CAUGHT),
    "servers/topics/bodies.py": (10, CHECKED),
    "servers/topics/routers.py": (1, CHECKED),
    "servers/topics/sse.py": (1, CAUGHT),
    "servers/topics/websocket.py": (1, OWN),
    "servers/topics/websocket_messages.py": (2, CHECKED),
    "services/feed.py": (1, CAUGHT),
    "services/relay.py": (1, CAUGHT),
    "services/relay_batch.py": (3, CAUGHT),
    "spark/pipeline/checkpoint.py": (2, OWN),
    "spark/pipeline/ledger.py": (3, OWN),
    "spark/pipeline/redrive.py": (2, OWN),
    "spark/sources/offsets.py": (1, OWN),
    "spark/sources/topic_client.py": (1, CAUGHT),
    "spark/tables/compact.py": (3, OWN),
    "spark/tables/delta.py": (1, OWN),
    "spark/tables/delta_commits.py": (1, OWN),
    "spark/tables/parquet.py": (2, OWN),
    "topics/client/connection.py": (1, ANSWER),
    "topics/client/errors.py": (1, CAUGHT),
    "topics/client/models.py": (11, CAUGHT),
    "topics/client/queues.py": (4, CAUGHT),
    "topics/client/routers.py": (3, ANSWER),
    "topics/client/watch.py": (5, CAUGHT),
    "topics/log/payload.py": (3, CAUGHT),
    "topics/checkpoints/recovery.py": (1, OWN),
    "topics/model.py": (4, CAUGHT),
    "topics/queues/dead_letters.py": (1, CAUGHT),
    "topics/routers/copy_frame.py": (1, CAUGHT),
    "topics/routers/table.py": (1, CAUGHT),
    "topics/checkpoints/cold_tier.py": (1, OWN),
    "topics/tools/backup.py": (1, OWN),
    "up/log.py": (1, CAUGHT),
    "vector/api.py": (3, CHECKED),
}


def _decodes(text: str) -> int:
    """Return how often a module decodes JSON or creates a decoder."""
    tree = ast.parse(text)
    found = [
        node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) in CALLS
    ]
    brought = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        and node.module in ("json", "msgspec.json")
        and NAMES & {name.name for name in node.names}
    ]
    return len(found) + len(brought)


def test_every_call_that_decodes_json_is_known_and_justified() -> None:
    """A new call uses `penstock.jsontext`, or is listed with the reason why it need not."""
    found = Counter(
        {
            path.relative_to(ROOT).as_posix(): _decodes(path.read_text())
            for path in sorted(ROOT.rglob("*.py"))
            if path != ROOT / "jsontext.py"
        }
    )
    assert +found == {name: count for name, (count, _) in KNOWN.items()}


def test_each_way_to_decode_json_is_detected() -> None:
    assert _decodes("json.loads(a)\nmsgspec.json.decode(b)\nx = msgspec.json.Decoder(int)") == 3
    assert _decodes("from json import loads\nfrom msgspec.json import Decoder as D") == 2
    assert _decodes("msgspec.json.encode(a)\njson.dumps(b)") == 0
