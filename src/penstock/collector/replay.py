"""Dead letters sent again, each removed when it was taken."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass

from penstock.collector.dead_letters import DeadLetter, DeadLetters
from penstock.collector.outcome import Outcome, Verdict, refused
from penstock.collector.payload import RawPayload
from penstock.collector.seam import Exporter
from penstock.otlp.schema import Signal

__all__ = ["Replayed", "replay"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """What became of one letter."""

    letter: DeadLetter
    outcome: Outcome

    @property
    def is_taken(self) -> bool:
        return self.outcome.verdict is Verdict.ACK


async def replay(letters: Iterable[DeadLetter], store: DeadLetters, exporter: Exporter) -> list[Replayed]:
    """Send each once, oldest place first. Stops at the first that finds the destination out of reach.

    What is not taken stays where it is, and so does one that is damaged, which is not sent.
    A crash after one was taken and before it is removed sends it again.
    """
    done: list[Replayed] = []
    await exporter.start()
    try:
        for letter in letters:
            if letter.damage:
                done.append(Replayed(letter=letter, outcome=refused(letter.damage)))
                continue
            data = await asyncio.to_thread(store.request, letter)
            outcome = await exporter.send(RawPayload(data, Signal(letter.signal)))
            done.append(Replayed(letter=letter, outcome=outcome))
            if outcome.verdict is Verdict.ACK:
                await asyncio.to_thread(store.remove, letter)
            elif outcome.is_down:
                break
    finally:
        await exporter.close()
    return done
