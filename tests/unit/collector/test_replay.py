"""Replay of dead letters: accepted ones are removed and the others stay."""

from __future__ import annotations

from pathlib import Path

from click.testing import CliRunner
from tests.collector_doubles import MemoryStore

from penstock.cli.collector import dead_letters
from penstock.collector.consumers import ArrowConsumer
from penstock.collector.dead_letters import DeadLetters, replay
from penstock.collector.exporters import make_otlp_exporter
from penstock.collector.limiter import ReceiverLimiter
from penstock.collector.outcome import Outcome, delivered, refused, unreachable
from penstock.collector.payload import Payload, RawPayload
from penstock.collector.receiver_http import HttpReceiver
from penstock.collector.settings import Address, OtlpExporterSettings
from penstock.metrics import Registry
from penstock.otlp.schema import Signal
from penstock.testing.otlp_kit import telemetry

DATA = telemetry(Signal.LOGS, items=3)


class Answering:
    def __init__(self, *answers: Outcome) -> None:
        self._answers = list(answers)

    async def start(self) -> None: ...

    async def send(self, payload: Payload) -> Outcome:
        assert payload.otlp() == DATA
        return self._answers.pop(0)

    async def close(self) -> None: ...


def kept(path: Path, count: int) -> DeadLetters:
    store = DeadLetters(str(path))
    for _ in range(count):
        store.keep("out", RawPayload(DATA, Signal.LOGS), "no", 1)
    return store


async def test_accepted_letters_are_removed_and_refused_ones_stay(tmp_path: Path) -> None:
    store = kept(tmp_path, 3)
    done = await replay(store.letters(), store, Answering(delivered(), refused("no"), delivered()))
    assert [one.is_taken for one in done] == [True, False, True]
    assert [letter.path for letter in store.letters()] == [done[1].letter.path]
    assert len(list((tmp_path / "out").iterdir())) == 2, "the request and its note"


async def test_an_unreachable_destination_is_tried_once(tmp_path: Path) -> None:
    store = kept(tmp_path, 3)
    done = await replay(store.letters(), store, Answering(unreachable("away")))
    assert len(done) == 1
    assert len(list(store.letters())) == 3


async def test_a_collector_accepts_replayed_letters(tmp_path: Path) -> None:
    letters, store = kept(tmp_path, 1), MemoryStore()
    receiver = HttpReceiver(
        ReceiverLimiter("in", ArrowConsumer(store), registry=Registry()), request_bytes_max=1 << 20
    )
    address = await receiver.bind(Address("127.0.0.1", 0))
    exporter = make_otlp_exporter(OtlpExporterSettings(http_endpoint=f"http://{address}"))
    await replay(letters.letters(), letters, exporter)
    await receiver.drain(1)
    assert [bundle.batch.num_rows for bundle in store.stored] == [3]
    assert list(letters.letters()) == []


def test_the_command_reports_letters_that_were_not_accepted(tmp_path: Path) -> None:
    kept(tmp_path, 2)
    arguments = [str(tmp_path), "--replay", "http://127.0.0.1:9"]
    ran = CliRunner().invoke(dead_letters, arguments, standalone_mode=False)
    assert ran.return_value == 1, ran.output
    assert "0 of 2 were accepted" in ran.output
    assert "127.0.0.1:9" in ran.output
