"""Exporters that send nothing anywhere: `debug`, `noop`, and `flaky` for tests of everything around them."""

from __future__ import annotations

import logging
import random

from penstock.collector.outcome import Outcome, Verdict, delivered, refused
from penstock.collector.payload import Payload
from penstock.collector.ports import Exporter
from penstock.collector.settings import DebugSettings, FlakySettings
from penstock.errors import PenstockError

__all__ = ["DebugExporter", "FlakyExporter", "NoopExporter"]

_LOG = logging.getLogger(__name__)
_ROWS_SHOWN = 3


class NoopExporter:
    """Takes everything."""

    async def start(self) -> None: ...

    async def send(self, payload: Payload) -> Outcome:
        return delivered()

    async def close(self) -> None: ...


class DebugExporter(NoopExporter):
    """A line in the log for each bundle, and with `detailed` its first rows."""

    def __init__(self, name: str, settings: DebugSettings) -> None:
        self._name = name
        self._is_detailed = settings.verbosity == "detailed"

    async def send(self, payload: Payload) -> Outcome:
        place = payload.place or "not stored"
        if not self._is_detailed:
            _LOG.info("%s: %s, %s", self._name, payload.signal.value, place)
            return delivered()
        try:
            batch = payload.batch()
        except PenstockError as error:
            return refused(str(error))
        rows = batch.slice(0, _ROWS_SHOWN).to_pylist()
        _LOG.info("%s: %s, %s, %d rows, first %s", self._name, payload.signal.value, place, len(batch), rows)
        return delivered()


class FlakyExporter:
    """Fails by a seed, and hands the rest to the exporter behind it."""

    def __init__(self, settings: FlakySettings, behind: Exporter) -> None:
        self._settings = settings
        self._behind = behind
        self._rng = random.Random(settings.seed)
        self._hint_s = settings.retry_after_s

    async def start(self) -> None:
        await self._behind.start()

    async def send(self, payload: Payload) -> Outcome:
        draw = self._rng.random()
        if draw < self._settings.reject_rate:
            return refused("flaky: refused on purpose")
        if draw < self._settings.reject_rate + self._settings.failure_rate:
            return Outcome(
                verdict=Verdict.RETRY, reason="flaky: failed on purpose", retry_after_s=self._hint_s
            )
        return await self._behind.send(payload)

    async def close(self) -> None:
        await self._behind.close()
