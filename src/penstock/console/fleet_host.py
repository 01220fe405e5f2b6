"""The fleet as the console sees it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from penstock.console import seam
from penstock.console.books import LateBooks, open_books
from penstock.console.command import run_penstock
from penstock.objects import StoreConfig
from penstock.up import (
    FleetEvent,
    FleetMap,
    FleetView,
    LogLine,
    PartKind,
    PartState,
    PartStatus,
    PipelinePlace,
    QueuePlace,
    pipeline_environment,
    reachable,
)

__all__ = ["FleetHost"]

_LINES: Final = 500
_STATES: Final = {
    # A part that drains still runs, and takes nothing more.
    PartState.STOPPING: seam.PartState.NOT_READY,
}


class FleetHost:
    """Implements `seam.Host` over a fleet."""

    def __init__(self, fleet: FleetView) -> None:
        self._fleet = fleet
        places = fleet.map
        self._queues = tuple(_queue(place) for place in places.queues)
        self._environment = pipeline_environment(places.data_dir)
        self._pipelines = tuple(_pipeline(place, self._environment) for place in places.pipelines)

    def close(self) -> None:
        """Close the books that were opened."""
        for place in self._pipelines:
            place.books.close()

    def parts(self) -> Sequence[seam.Part]:
        """See `seam.Host.parts`."""
        return [_part(status) for status in self._fleet.parts()]

    def plan(self) -> seam.Plan:
        """See `seam.Host.plan`."""
        places = self._fleet.map
        urls = {status.name: _url(status) for status in self._fleet.parts()}
        return seam.Plan(
            topics=_topics(places, urls),
            queues=self._queues,
            relays=tuple(
                seam.RelayPlace(part=relay.part, topic=relay.topic, queue=relay.queue, app=relay.app)
                for relay in places.relays
            ),
            collector=_collector(places, self._fleet.parts()),
            quivers=tuple(
                seam.QuiverPlace(
                    name=place.name, part=place.part, path=place.path, budget_bytes=place.budget_bytes
                )
                for place in places.quivers
            ),
            pipelines=self._pipelines,
            databases=tuple(
                seam.DatabasePlace(
                    name=place.name,
                    kind=place.kind.value,
                    part=place.part,
                    url=urls.get(place.part),
                    key=place.key.reveal() if place.key else None,
                    queue=place.queue,
                )
                for place in places.databases
            ),
        )

    def log(self) -> Sequence[seam.LogLine]:
        """See `seam.Host.log`."""
        return [_line(line) for line in self._fleet.log(limit=_LINES)]

    def subscribe(self, tell: Callable[[seam.Change], None]) -> Callable[[], None]:
        """See `seam.Host.subscribe`."""

        def pass_on(event: FleetEvent) -> None:
            tell(_line(event) if isinstance(event, LogLine) else _part(event))

        return self._fleet.subscribe(pass_on)

    def run(self, arguments: Sequence[str], tell: Callable[[str], None]) -> Awaitable[seam.CommandOutcome]:
        """See `seam.Host.run`."""
        return run_penstock(arguments, tell, self._environment)


def _url(status: PartStatus) -> str | None:
    return None if status.address is None else f"http://{reachable(status.address)}"


def _part(status: PartStatus) -> seam.Part:
    return seam.Part(
        name=status.name,
        kind=status.kind.value,
        state=_STATES.get(status.state) or seam.PartState(status.state.value),
        since_ms=status.since_ms,
        pid=status.pid,
        restarts=status.restarts,
        last_error=status.last_error,
        address=_url(status),
        disabled_why=status.disabled_why,
    )


def _line(line: LogLine) -> seam.LogLine:
    return seam.LogLine(at_ms=line.at_ms, part=line.part, level=line.level.name.lower(), text=line.text)


def _topics(places: FleetMap, urls: dict[str, str | None]) -> seam.TopicsPlace | None:
    if places.topics is None:
        return None
    key = places.topics.key.reveal() if places.topics.key else None
    return seam.TopicsPlace(part=places.topics.part, url=urls.get(places.topics.part), key=key)


def _collector(places: FleetMap, parts: Sequence[PartStatus]) -> seam.CollectorPlace | None:
    found = [
        part for part in parts if part.kind is PartKind.COLLECTOR and part.state is not PartState.DISABLED
    ]
    if not found:
        return None
    name = found[0].name
    return seam.CollectorPlace(
        part=name,
        admin_url=_url(found[0]),
        quivers=tuple(place.name for place in places.quivers),
        queues=tuple(place.name for place in places.queues if name in place.producers),
    )


def _queue(place: QueuePlace) -> seam.QueuePlace:
    address = place.store if "://" in place.store else Path(place.store).absolute().as_uri()
    return seam.QueuePlace(
        name=place.name,
        store=StoreConfig(url=address, options=place.store_options),
        manifest_path=place.manifest_path,
        data_path_prefix=place.data_path_prefix,
    )


def _pipeline(place: PipelinePlace, environ: Mapping[str, str]) -> seam.PipelinePlace:
    """With its books, which a file that cannot be read now may have later."""
    return seam.PipelinePlace(
        name=place.name,
        part=place.part,
        file=place.file,
        queue=place.queue,
        books=LateBooks(lambda: open_books(Path(place.file), environ)),
    )
