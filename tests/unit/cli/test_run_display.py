"""Figures of a run: totals, and their display for people and programs."""

from __future__ import annotations

import io
import json
import sys

import pytest

from penstock.cli.run.display import (
    JsonLines,
    PlainLines,
    Rate,
    Screen,
    Totals,
    View,
    batch_event,
    choose_display,
    line,
    panel,
)
from penstock.spark.pipeline.ledger import BatchLine
from penstock.spark.pipeline.pipeline import PipelineStatus


def done(batch: int, read: int = 10, **more: int) -> BatchLine:
    delivered = read - more.get("dead", 0) - more.get("skipped", 0)
    return BatchLine(
        batch=batch,
        start={0: batch},
        end={0: batch + 1},
        read=read,
        rows={"delta": delivered},
        one_to_one={"delta": True},
        at_ms=0,
        **more,
    )


def view(totals: Totals | None = None) -> View:
    return View(
        name="clicks",
        phase="running",
        elapsed_s=61,
        totals=totals or Totals().plus(done(7, 1000, dead=2, gaps=1)),
        rows_per_s=1234.5,
        status=PipelineStatus(active=True, busy=True, batch_s=0.25, backlog_batches=12, lag_s=3.25),
        last_error="the store is slow",
    )


def test_totals_add_up_micro_batches() -> None:
    totals = Totals().plus(done(0, dead=1)).plus(done(1, skipped=2)).plus(done(2, gaps=1))
    assert (totals.batches, totals.read, totals.dead, totals.skipped, totals.gaps) == (3, 30, 1, 2, 1)
    assert totals.rows == {"delta": 27}


def test_a_repeated_micro_batch_counts_once() -> None:
    totals = Totals().plus(done(0)).plus(done(1, dead=1)).plus(done(1, dead=1))
    assert (totals.batches, totals.read, totals.dead, totals.rows) == (2, 20, 1, {"delta": 19})


def test_the_rate_covers_the_last_seconds() -> None:
    rate = Rate(window_s=10)
    assert rate.at(0, 0) == 0
    assert rate.at(5, 50) == 10
    assert rate.at(20, 50) == 0
    assert rate.at(22, 70) == 20 / 17


def test_the_panel_shows_every_figure() -> None:
    text = panel(view())
    for word in ("clicks: running", "7 in 250ms", "1,234 records/s", "12 batches", "3.2s", "1,000 records"):
        assert word in text
    for word in ("998 rows", "dead", "gaps", "last error  the store is slow"):
        assert word in text
    assert "skipped" not in text
    short = line(view())
    assert "\n" not in short
    assert "dead 2" in short
    assert "backlog 12 batches" in short


def test_before_the_first_status_no_figure_is_invented() -> None:
    text = panel(View(name="clicks", phase="starting Spark", elapsed_s=1))
    assert "starting Spark" in text
    assert "backlog                -" in text


def test_programs_get_a_line_per_event(capsys: pytest.CaptureFixture[str]) -> None:
    with JsonLines() as display:
        display.say("started", "clicks is running", view())
        display.show(view())  # too early for another line
        display.batch(done(7, 1000, dead=2))
    started, batch = (json.loads(text) for text in capsys.readouterr().out.splitlines())
    assert (started["event"], started["pipeline"], started["backlog_batches"]) == ("started", "clicks", 12)
    assert (batch["event"], batch["batch"], batch["end"]) == ("batch", 7, {"0": 8})
    assert batch_event(done(7, 1000, dead=2))["dropped"] == {"delta": 0}


def test_a_failure_is_reported_once_to_people(capsys: pytest.CaptureFixture[str]) -> None:
    assert isinstance(choose_display(as_json=False), PlainLines)
    with PlainLines() as display:
        display.say("failed", "the error itself is reported elsewhere", view())
        display.say("stopping", "finishing micro-batch 8, at most 60s", view())
    assert capsys.readouterr().err == "finishing micro-batch 8, at most 60s\n"


def test_a_terminal_keeps_the_state_current_and_lets_events_scroll_by(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    display = choose_display(as_json=False)
    assert isinstance(display, Screen)
    with display:
        display.show(view())
        display.say("stopping", "finishing micro-batch 8, at most 60s", view())
        display.say("failed", "the error itself is reported elsewhere", view())
    text = terminal.getvalue()
    assert "finishing micro-batch 8, at most 60s" in text
    assert "clicks: running" in text
    assert "reported elsewhere" not in text
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1  # the cursor comes back


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True
