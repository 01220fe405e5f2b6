"""Long random conversations, with stops and crashes in between, against a model that is a plain list.

A failure reports its seed; the same seed gives the same conversation.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tests.contract.topics_server import Api, serving

TURNS = 160
RESERVED_MAX = 1000
"""How far a crash may move the head of a disk topic."""


@dataclass(slots=True)
class Model:
    """One topic as described by the contract, without time."""

    config: dict[str, Any]
    head: int = 0
    floor: int = 1
    live: dict[int, dict[str, Any]] = field(default_factory=dict)

    @property
    def earliest(self) -> int:
        return min(self.live, default=self.head + 1)

    def size(self) -> int:
        return sum(map(accounted, self.live.values()))

    def accepts(self, records: list[dict[str, Any]]) -> str | None:
        """Return the error code of a refusal, or None."""
        if self.config["discard"] != "reject":
            return None
        caps = self.config["cap_records"], self.config["cap_bytes"]
        new = len(records), sum(map(accounted, records))
        if any(cap and more > cap for cap, more in zip(caps, new, strict=True)):
            return "record_too_large"
        now = len(self.live), self.size()
        full = any(cap and have + more > cap for cap, have, more in zip(caps, now, new, strict=True))
        return "topic_full" if full else None

    def append(self, records: list[dict[str, Any]]) -> list[int]:
        seqs = list(range(self.head + 1, self.head + 1 + len(records)))
        self.live.update(zip(seqs, records, strict=True))
        self.head += len(records)
        self.retain()
        return seqs

    def retain(self) -> None:
        if self.config["discard"] != "old":
            return
        cap_records, cap_bytes = self.config["cap_records"], self.config["cap_bytes"]
        while self.live and (
            (cap_records and len(self.live) > cap_records) or (cap_bytes and self.size() > cap_bytes)
        ):
            lost = self.earliest
            del self.live[lost]
            self.floor = max(self.floor, lost + 1)

    def delete(self, before_seq: int | None, match: str | None) -> int:
        gone = [
            seq
            for seq, record in self.live.items()
            if (before_seq is None or seq < before_seq)
            and (match is None or matches(match, record.get("tag")))
        ]
        for seq in gone:
            del self.live[seq]
        return len(gone)

    def diff(self, from_seq: int, limit: int, node: str | None, size_max: int) -> dict[str, Any]:
        stone = self.tombstone(from_seq)
        cursor = self.earliest - 1 if stone is not None else from_seq
        delivered: list[int] = []
        size = 0
        while cursor < self.head and len(delivered) < limit:
            record = self.live.get(cursor + 1)
            if record is not None and (node is None or record.get("node") != node):
                if delivered and size + accounted(record) > size_max:
                    break
                size += accounted(record)
                delivered.append(cursor + 1)
            cursor += 1
        return {
            "seqs": delivered,
            "next_from_seq": cursor,
            "head_seq": self.head,
            "earliest_seq": self.earliest,
            "caught_up": cursor == self.head,
            "lag": self.head - cursor,
            "tombstone": stone,
        }

    def tombstone(self, from_seq: int) -> dict[str, Any] | None:
        if from_seq > self.head:
            gap = {"gap_from": 1, "gap_to": self.head, "missed_estimate": max(self.head, 1)}
            return {**gap, "reason": "recreated", "earliest_seq": self.earliest, "head_seq": self.head}
        if from_seq + 1 >= self.floor:
            return None
        gap = {
            "gap_from": from_seq + 1,
            "gap_to": self.floor - 1,
            "missed_estimate": self.floor - from_seq - 1,
        }
        return {**gap, "reason": "cap", "earliest_seq": self.floor, "head_seq": self.head}


def accounted(record: dict[str, Any]) -> int:
    texts = [json.dumps(record[name], separators=(",", ":")) for name in ("data", "meta") if name in record]
    return sum(map(len, texts))


def matches(match: str, tag: str | None) -> bool:
    if tag is None:
        return False
    return tag.startswith(match[:-1]) if match.endswith("*") else tag == match


class Conversation:
    """Sends the same requests to the server and the model."""

    def __init__(self, api: Api, rng: random.Random, topics: dict[str, Model]) -> None:
        self.api = api
        self.rng = rng
        self.topics = topics

    def turn(self) -> None:
        name = self.rng.choice(["a", "b", "c", "d"])
        moves = [self.write] * 8 + [self.diff] * 6 + [self.delete] * 3 + [self.put, self.state]
        if self.rng.random() < 0.02:
            moves = [self.remove]
        self.rng.choice(moves)(name)

    def put(self, name: str) -> None:
        rng = self.rng
        config = {
            "durability": rng.choice(["disk", "fsync"]),
            "cap_records": rng.choice([0, 0, 3, 20]),
            "cap_bytes": rng.choice([0, 0, 60, 600]),
            "discard": rng.choice(["old", "old", "reject"]),
        }
        model = self.topics.get(name)
        self.api.put(name, status=201 if model is None else 200, **config)
        if model is None:
            self.topics[name] = Model(config)
        else:
            model.config = config
            model.retain()

    def write(self, name: str) -> None:
        records = [self.record() for _ in range(self.rng.choice([1, 1, 2, 5, 40]))]
        model = self.topics.get(name)
        if model is None:
            config = {"durability": "disk", "cap_records": 0, "cap_bytes": 0, "discard": "old"}
            model = self.topics[name] = Model(config)
        refusal = model.accepts(records)
        if refusal is None:
            assert self.api.write_records(name, records)["seqs"] == model.append(records)
        else:
            status = 422 if refusal == "topic_full" else 400
            assert self.api.write_records(name, records, status=status)["error"]["code"] == refusal

    def record(self) -> dict[str, Any]:
        rng = self.rng
        record: dict[str, Any] = {
            "data": rng.choice([rng.randrange(1000), "x" * rng.randrange(40), {"m": 1}])
        }
        if rng.random() < 0.5:
            record["tag"] = rng.choice(["a", "ab", "b", "c*"])
        if rng.random() < 0.3:
            record["node"] = rng.choice(["me", "you"])
        if rng.random() < 0.2:
            record["meta"] = {"k": rng.randrange(10)}
        return record

    def delete(self, name: str) -> None:
        rng, model = self.rng, self.topics.get(name)
        if model is None:
            self.api.delete(name, before_seq=1, status=404)
            return
        before_seq = rng.choice([None, rng.randrange(model.head + 3), model.earliest + rng.randrange(4)])
        match = (
            rng.choice(["a", "a*", "b", "c*", "*", "none"])
            if before_seq is None or rng.random() < 0.4
            else None
        )
        selectors = {"before_seq": before_seq, "match": match}
        answer = self.api.delete(name, **selectors)
        assert answer["deleted"] == model.delete(before_seq, match), selectors
        self.compare_numbers(answer, model)

    def diff(self, name: str) -> None:
        rng, model = self.rng, self.topics.get(name)
        if model is None:
            self.api.diff(name, status=404)
            return
        from_seq = rng.choice([0, rng.randrange(model.head + 2), max(0, model.head - 5), model.head + 3])
        limit, node = rng.choice([1, 3, 256, 1000]), rng.choice([None, "me"])
        size_max = rng.choice([30, 200, 2**20])
        asked = {"from_seq": from_seq, "limit": limit, "node": node, "max_batch_bytes": size_max}
        page = self.api.diff(name, include_tags=True, **asked)
        expected = model.diff(from_seq, limit, node, size_max)
        assert [record["$seq"] for record in page["records"]] == expected.pop("seqs"), asked
        assert {field: page[field] for field in expected} == expected, asked
        for record in page["records"]:
            told = {name.removeprefix("$"): record[name] for name in record if name not in ("$seq", "$ts")}
            assert told == model.live[record["$seq"]]

    def state(self, name: str) -> None:
        model = self.topics.get(name)
        if model is None:
            self.api.state(name, status=404)
        else:
            self.compare_numbers(self.api.state(name), model)

    def compare_numbers(self, told: dict[str, Any], model: Model) -> None:
        now = (told["head_seq"], told["earliest_seq"], told["count"], told["bytes"])
        assert now == (model.head, model.earliest, len(model.live), model.size())

    def remove(self, name: str) -> None:
        assert self.api.remove(name)["deleted"] is (self.topics.pop(name, None) is not None)

    def meet_again(self, *, after_a_crash: bool) -> None:
        """Compare after a restart: a crash may only have moved the head of a disk topic."""
        for name, model in self.topics.items():
            state = self.api.state(name)
            if after_a_crash:
                assert model.head <= state["head_seq"] <= model.head + RESERVED_MAX
                model.head = state["head_seq"]
            self.compare_numbers(state, model)
            self.diff(name)


@pytest.mark.parametrize("seed", range(2))
def test_a_conversation_follows_the_model(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    topics: dict[str, Model] = {}
    settings = {"TOPICS_SEGMENT_MAX_EVENTS": "25", "TOPICS_WAL_SHARDS": "1"}
    if seed % 2:
        settings |= {"TOPICS_COLD_DIR": str(tmp_path / "cold"), "TOPICS_HOT_RETAIN_SEGMENTS": "1"}
    after_a_crash = False
    for _ in range(4):
        with serving(tmp_path / "data", **settings) as server:
            talk = Conversation(server.api(rng.choice(["h1", "h2"])), rng, topics)
            talk.meet_again(after_a_crash=after_a_crash)
            for _ in range(TURNS):
                talk.turn()
            after_a_crash = rng.random() < 0.5
            if after_a_crash:
                server.kill()
            else:
                assert server.stop() == 0
