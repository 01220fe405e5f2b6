"""Where a record is and has been, step by step, from what was found. Pure: it words the evidence.

A step is `here` if the record is in it now, `passed` if it went through, `gone` if it was there and is not
any more, `unknown` if that cannot be told; the text says why.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypeAlias

from penstock.console.books import Letter, SinkCommit
from penstock.console.payload import text_fields
from penstock.topics import Page

if TYPE_CHECKING:
    from penstock.spark import BatchLine

Stage: TypeAlias = Literal[
    "topic", "log", "relay", "buffer", "batch", "pipeline", "microbatch", "table", "database", "dead_letter"
]
State: TypeAlias = Literal["here", "passed", "gone", "unknown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One station of the journey."""

    stage: Stage
    state: State
    text: str
    at_ms: int | None = None
    detail: Mapping[str, object] = field(default_factory=dict)


def topic_step(topic: str, seq: int, page: Page) -> Step:
    """A record of a topic, by the page behind the one before it."""
    detail: dict[str, object] = {"topic": topic, "seq": seq, "head": page.head_seq}
    records = page.records()
    if records and records[0].seq == seq:
        found = records[0]
        detail |= {"tag": found.tag, "node": found.node, **text_fields(bytes(found.data))}
        return Step(
            stage="topic",
            state="here",
            at_ms=found.ts_ms,
            text=f"record {seq} is in the topic {topic}",
            detail=detail,
        )
    if seq > page.head_seq:
        text = f"{topic} ends at {page.head_seq}: nobody has written record {seq} yet"
        return Step(stage="topic", state="unknown", text=text, detail=detail)
    gone = page.tombstone
    if gone is not None and gone.gap_from <= seq <= gone.gap_to:
        why = {"cap": "evicted by the topic's cap", "ttl": "expired by age"}.get(gone.reason, gone.reason)
        return Step(stage="topic", state="gone", text=f"record {seq} was {why}", detail=detail)
    return Step(
        stage="topic",
        state="gone",
        text=f"record {seq} was deleted (in a queue: acknowledged), or no record ever got this number",
        detail=detail,
    )


def relay_step(topic: str, seq: int, queue: str, app: str, position: int | None) -> Step:
    """Whether a relay has moved a record on."""
    detail: dict[str, object] = {"app": app, "queue": queue, "position": position}
    if position is not None and seq <= position:
        text = f"relayed into the queue {queue}, which has {topic} up to {position}"
        return Step(stage="relay", state="passed", text=text, detail=detail)
    reached = "nothing" if position is None else f"only up to {position}"
    text = f"not relayed yet: the queue {queue} has {reached} of {topic}"
    return Step(stage="relay", state="unknown", text=text, detail=detail)


def micro_batch_step(pipeline: str, line: BatchLine | None, reached: Mapping[int, int] | None) -> Step:
    """The micro-batch that read a sequence; `reached` is how far the pipeline is."""
    if line is None:
        if reached is None:
            text = f"the pipeline {pipeline} has no micro-batch yet"
        else:
            text = f"no micro-batch of {pipeline} has read it yet"
        detail: dict[str, object] = {"pipeline": pipeline, "reached": reached}
        return Step(stage="microbatch", state="unknown", text=text, detail=detail)
    return Step(
        stage="microbatch",
        state="passed",
        at_ms=line.at_ms,
        text=f"read by micro-batch {line.batch} of {pipeline}, with {line.read} records",
        detail={
            "pipeline": pipeline,
            "batch": line.batch,
            "from": line.start,
            "to": line.end,
            "records": line.read,
            "dead": line.dead,
            "rows": line.rows,
        },
    )


def table_step(commit: SinkCommit, letter: Letter | None) -> Step:
    """What a sink has of a micro-batch; a record that became a dead letter is not in it."""
    detail: dict[str, object] = {
        "sink": commit.sink,
        "kind": commit.kind,
        "place": commit.place,
        "version": commit.version,
        "rows": commit.rows,
    }
    if commit.has_it is None:
        return Step(stage="table", state="unknown", text=commit.text, detail=detail)
    if not commit.has_it:
        return Step(stage="table", state="unknown", text=commit.text, detail=detail)
    where = f"{commit.sink} ({commit.kind})"
    if letter is not None:
        text = f"{where} has this micro-batch; the record itself went to the dead letters"
        return Step(stage="table", state="passed", at_ms=commit.at_ms, text=text, detail=detail)
    version = "" if commit.version is None else f", in version {commit.version} of the table"
    text = f"{where} has this micro-batch{version}"
    return Step(stage="table", state="here", at_ms=commit.at_ms, text=text, detail=detail)


def letter_step(letter: Letter) -> Step:
    """A record that could not be decoded."""
    again = ", and was put back into the queue by a redrive" if letter.redriven else ""
    detail: dict[str, object] = {
        "reason": letter.reason,
        "redriven": letter.redriven,
        **text_fields(letter.value or b""),
    }
    text = f"a dead letter: {letter.reason}{again}"
    return Step(stage="dead_letter", state="here", at_ms=letter.at_ms, text=text, detail=detail)


def database_step(
    name: str, sequence: int, through: int | None, *, is_known: bool, error: str | None
) -> Step:
    """Whether a database has a sequence of its queue."""
    detail: dict[str, object] = {"database": name, "durable_through": through}
    if not is_known:
        text = f"{name} does not tell how far it is: {error or 'it is not running'}"
        return Step(stage="database", state="unknown", text=text, detail=detail)
    if through is not None and sequence <= through:
        text = f"durable in {name}, which has its queue up to {through}"
        return Step(stage="database", state="here", text=text, detail=detail)
    reached = "nothing" if through is None else f"its queue up to {through}"
    return Step(stage="database", state="unknown", text=f"not in {name} yet: it has {reached}", detail=detail)


def verdict(steps: Sequence[Step]) -> tuple[bool, str]:
    """Whether anything was found, and where the record is now, in a sentence."""
    seen = [step for step in steps if step.state != "unknown"]
    if not seen:
        return False, steps[-1].text if steps else "nothing of the plan knows it"
    here = [step for step in seen if step.state == "here"]
    return True, (here or seen)[-1].text
