"""Plans the parts to run, and the map of the fleet, from the file of `penstock up`. Pure."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterable, Mapping
from typing import Final

from penstock.buffer import ConsumerConfig
from penstock.config import Secret, Setting
from penstock.errors import ConfigError
from penstock.units import duration_text
from penstock.up.parts import DATA_DIR_VARIABLE, TOPICS_URL, Layout, PartPlan, Plan, Probe, address_of
from penstock.up.settings import CollectorPart, PipelinePart, QueueSettings, RelayPart, UpSettings
from penstock.up.status import (
    DatabasePlace,
    FleetMap,
    PartKind,
    PipelinePlace,
    QueuePlace,
    RelayPlace,
    TopicsPlace,
)

_SIGNALS: Final = ("metrics", "traces", "logs")
_PLAIN: Final = re.compile(r"[^A-Za-z0-9._-]+")
_LOOPBACK: Final = "127.0.0.1"
_EVERYWHERE: Final = frozenset({"", "0.0.0.0", "::"})  # noqa: S104 - these are looked for
_MARGIN_S: Final = 10.0
"""How long before it would be killed a stopping pipeline abandons its running micro-batch."""


def plan_of(settings: UpSettings, *, base: str, key: Secret) -> Plan:
    """Return the plan for a file in the directory `base`. Its `faults` are contradictions between parts.

    `key` is a new secret: servers with keys accept it as well, and the parts that call them use it.
    """
    layout = Layout(base=base, data_dir=_under(base, settings.data_dir))
    return _Planner(settings, layout, key).plan()


def _under(base: str, path: str) -> str:
    return os.path.normpath(os.path.join(base, os.path.expanduser(path)))


class _Planner:
    def __init__(self, settings: UpSettings, layout: Layout, key: Secret) -> None:
        self._settings = settings
        self._layout = layout
        self._key = key
        self._queues: dict[str, QueuePlace] = {}
        self._names: set[str] = set()
        self._faults: list[str] = []

    def plan(self) -> Plan:
        settings = self._settings
        collector_file, collector_text = self._collector_source()
        for name in settings.queues:
            self._queue(name)
        collector = self._collector(collector_file)
        topics = self._topics()
        relays, relay_places = self._relays(has_topics=topics is not None)
        pipelines = [self._pipeline(one) for one in settings.pipelines]
        databases = [found for found in (self._timeseries(), self._vector()) if found is not None]
        chosen = [*([collector] if collector else []), *([topics[0]] if topics else []), *relays]
        parts = (*chosen, *(part for part, _ in pipelines), *(part for part, _ in databases))
        return Plan(
            settings=settings,
            layout=self._layout,
            parts=parts,
            map=FleetMap(
                data_dir=self._layout.data_dir,
                queues=tuple(self._queues.values()),
                topics=topics[1] if topics else None,
                relays=tuple(relay_places),
                pipelines=tuple(place for _, place in pipelines),
                databases=tuple(place for _, place in databases),
            ),
            collector_file=collector_file,
            collector_text=collector_text,
            faults=tuple(self._faults),
            secrets=frozenset([self._key.reveal(), *_secrets_of(settings)]),
        )

    def _queue(self, name: str, *, producer: str | None = None, consumer: str | None = None) -> QueuePlace:
        """Return a queue by name; add a producer or consumer to it."""
        known = self._queues.get(name)
        if known is None:
            own = self._settings.queues.get(name) or self._own_queue(name)
            known = QueuePlace(
                name=name,
                store=self._layout.store(own.store, "queues"),
                manifest_path=own.manifest_path or f"{name}/manifest",
                data_path_prefix=own.data_path_prefix or name,
            )
            self._check_queue(known)
        known = dataclasses.replace(
            known,
            producers=(*known.producers, *([producer] if producer else [])),
            consumers=(*known.consumers, *([consumer] if consumer else [])),
        )
        self._queues[name] = known
        return known

    def _check_queue(self, place: QueuePlace) -> None:
        try:
            ConsumerConfig(
                store=place.store,
                manifest_path=place.manifest_path,
                data_path_prefix=place.data_path_prefix,
            )
        except ConfigError as error:
            self._faults.append(f"queue {place.name!r}: {error}")

    def _own_queue(self, name: str) -> QueueSettings:
        """Return the default location of a queue that the file does not describe."""
        collector = self._settings.collector
        is_signal = name in _SIGNALS and collector is not None and collector.enabled and collector.is_default
        return QueueSettings(store=collector.store if collector is not None and is_signal else "")

    def _name(self, text: str) -> str:
        name = _PLAIN.sub("-", text)
        if name in self._names:
            self._faults.append(f"two parts are called {name}: give one of them another name (name)")
        self._names.add(name)
        return name

    def _collector_source(self) -> tuple[str | None, Mapping[str, Setting] | None]:
        collector = self._settings.collector
        if collector is None or not collector.enabled:
            return None, None
        if collector.file is not None:
            return self._layout.path(collector.file), None
        if collector.is_default:
            self._faults += [
                f"queues.{name}: collector.store sets the place of this queue; set that instead"
                for name in _SIGNALS
                if name in self._settings.queues
            ]
        file = self._layout.run_file("collector.yaml")
        return file, collector.config or collector_mapping(collector, self._settings, self._layout)

    def _collector(self, file: str | None) -> PartPlan | None:
        collector = self._settings.collector
        if file is None or collector is None:
            return None
        name = self._name("collector")
        host = collector.host or self._settings.host
        ports = {}
        if collector.is_default:
            for signal in _SIGNALS:
                self._queue(signal, producer=name)
            for key in ("grpc_port", "http_port"):
                ports[f"collector.{key}"] = (host, int(getattr(collector, key)))
            ports["collector.admin_port"] = ("127.0.0.1", collector.admin_port)
        return PartPlan(
            name=name,
            kind=PartKind.COLLECTOR,
            arguments=("collector", "run", file, "--json"),
            address=f"127.0.0.1:{collector.admin_port}" if collector.is_default else None,
            ports=ports,
            probe=Probe(path="/ready") if collector.is_default and collector.admin_port else None,
            file=collector.file and file,
            grace_s=self._settings.stop_timeout_s,
        )

    def _topics(self) -> tuple[PartPlan, TopicsPlace] | None:
        topics, layout = self._settings.topics, self._layout
        if topics is None or not topics.enabled:
            return None
        name = self._name("topics")
        host = topics.host or self._settings.host
        data_dir = layout.path(topics.data_dir) if topics.data_dir else layout.inner("topics")
        port_file = layout.run_file("topics.address")
        environment = {
            "TOPICS_HOST": host,
            "TOPICS_PORT": str(topics.port),
            "TOPICS_PORT_FILE": port_file,
            "TOPICS_DATA_DIR": data_dir,
            **self._keys("TOPICS_API_KEYS", topics.keys),
        }
        if self._settings.allow_no_keys:
            environment["TOPICS_ALLOW_INSECURE_NO_AUTH"] = "1"
        if self._settings.allowed_hosts:
            environment["TOPICS_ALLOWED_HOSTS"] = ",".join(self._settings.allowed_hosts)
        key = self._key if topics.keys else None
        part = PartPlan(
            name=name,
            kind=PartKind.TOPICS,
            arguments=("topics", "serve"),
            environment=environment,
            port_file=port_file,
            ports={"topics.port": (host, topics.port)},
            probe=Probe(path="/v0/ready", key=key),
            grace_s=self._settings.stop_timeout_s,
        )
        return part, TopicsPlace(part=name, data_dir=data_dir, key=key)

    def _keys(self, variable: str, keys: Secret | None) -> dict[str, str]:
        """Return the keys of a server, including the key of the fleet's own parts."""
        return {variable: f"{keys.reveal()},{self._key.reveal()}"} if keys else {}

    def _relays(self, *, has_topics: bool) -> tuple[list[PartPlan], list[RelayPlace]]:
        relays = self._settings.relays
        if relays and not has_topics:
            self._faults.append("relays: they read from the topics server, but topics is not in the file")
        parts, places = [], []
        for relay in relays:
            part, place = self._relay(relay)
            parts.append(part)
            places.append(place)
        return parts, places

    def _relay(self, relay: RelayPart) -> tuple[PartPlan, RelayPlace]:
        name = self._name(f"relay-{relay.name or relay.topic}")
        queue = self._queue(relay.queue, producer=name)
        arguments = ["topics", "relay", relay.topic, queue.store]
        arguments += ["--manifest", queue.manifest_path, "--prefix", queue.data_path_prefix]
        arguments += ["--url", TOPICS_URL, "--value", relay.value, "--on-gap", relay.on_gap]
        arguments += ["--after", relay.after, "--flush-interval", duration_text(relay.flush_interval)]
        arguments += ["--retry-for", "60s", "--events", *(["--create"] if relay.create else [])]
        arguments += ["--app", relay.app] if relay.app else []
        topics = self._settings.topics
        part = PartPlan(
            name=name,
            kind=PartKind.RELAY,
            arguments=tuple(arguments),
            environment={"TOPICS_API_KEY": self._key.reveal()} if topics and topics.keys else {},
            needs_topics=True,
            grace_s=self._settings.stop_timeout_s,
        )
        app = relay.app or f"relay:{relay.topic}"
        return part, RelayPlace(part=name, topic=relay.topic, queue=relay.queue, app=app)

    def _pipeline(self, pipeline: PipelinePart) -> tuple[PartPlan, PipelinePlace]:
        file = self._layout.path(pipeline.file)
        stem = os.path.splitext(os.path.basename(file))[0]
        name = self._name(f"pipeline-{pipeline.name or stem}")
        stop_s = max(1.0, self._settings.stop_timeout_s - _MARGIN_S)
        arguments = ["run", file, "--json", "--stop-timeout", f"{stop_s:g}s"]
        arguments += ["--master", pipeline.master] if pipeline.master else []
        arguments += ["--remote", pipeline.remote] if pipeline.remote else []
        for key, value in pipeline.conf.items():
            arguments += ["--conf", f"{key}={value}"]
        part = PartPlan(
            name=name,
            kind=PartKind.PIPELINE,
            arguments=tuple(arguments),
            environment={DATA_DIR_VARIABLE: self._layout.data_dir},
            file=file,
            grace_s=self._settings.stop_timeout_s,
        )
        return part, PipelinePlace(name=pipeline.name or stem, part=name, file=file)

    def _timeseries(self) -> tuple[PartPlan, DatabasePlace] | None:
        own = self._settings.timeseries
        if own is None or not own.enabled:
            return None
        more = ["--retention", duration_text(own.retention)] if own.retention is not None else []
        return self._database(
            PartKind.TIMESERIES,
            host=own.host,
            port=own.port,
            store=own.store,
            queue=own.queue,
            keys=own.keys,
            more=[*more, *self._config(own.config)],
        )

    def _vector(self) -> tuple[PartPlan, DatabasePlace] | None:
        own = self._settings.vector
        if own is None or not own.enabled:
            return None
        more = ["--dimensions", str(own.dimensions)] if own.dimensions is not None else []
        more += ["--metric", own.metric] if own.metric else []
        for text in own.fields:
            more += ["--field", text]
        return self._database(
            PartKind.VECTOR,
            host=own.host,
            port=own.port,
            store=own.store,
            queue=own.queue,
            keys=own.keys,
            more=[*more, *self._config(own.config)],
        )

    def _config(self, file: str | None) -> list[str]:
        return [] if file is None else ["--config", self._layout.path(file)]

    def _database(
        self,
        kind: PartKind,
        *,
        host: str | None,
        port: int,
        store: str,
        queue: str | None,
        keys: Secret | None,
        more: list[str],
    ) -> tuple[PartPlan, DatabasePlace]:
        name = self._name(kind.value)
        where = self._layout.store(store, kind.value)
        listen = host or self._settings.host
        port_file = self._layout.run_file(f"{name}.address")
        arguments = [kind.value, "serve", where, "--host", listen, "--port", str(port)]
        arguments += ["--port-file", port_file, "--json", *more]
        if queue is not None:
            place = self._queue(queue, consumer=name)
            arguments += ["--buffer", place.store, "--manifest", place.manifest_path]
        if self._settings.allow_no_keys:
            arguments.append("--allow-no-keys")
        for allowed in self._settings.allowed_hosts:
            arguments += ["--allow-host", allowed]
        part = PartPlan(
            name=name,
            kind=kind,
            arguments=tuple(arguments),
            environment=self._keys(f"{kind.value.upper()}_API_KEYS", keys),
            port_file=port_file,
            ports={f"{name}.port": (listen, port)},
            probe=Probe(path="/-/ready"),
            grace_s=self._settings.stop_timeout_s,
        )
        key = self._key if keys else None
        return part, DatabasePlace(name=name, part=name, kind=kind, store=where, queue=queue, key=key)


def collector_mapping(collector: CollectorPart, settings: UpSettings, layout: Layout) -> dict[str, Setting]:
    """Return the file of a collector that buffers on disk and exports each signal to its own queue."""
    host = collector.host or settings.host
    store = layout.store(collector.store, "queues")
    return {
        "nodes": {
            "otlp": {
                "kind": "receiver",
                "plugin_urn": "urn:otel:otlp:receiver",
                "out_ports": {"out_port": {"destinations": ["keep"]}},
                "config": {
                    "listening_addr": address_of(host, collector.grpc_port),
                    "http_listening_addr": address_of(host, collector.http_port),
                    "tokens": [token.reveal() for token in collector.tokens],
                    "allow_insecure": settings.allow_no_keys,
                    "allowed_hosts": list(settings.allowed_hosts),
                },
            },
            "keep": {
                "kind": "processor",
                "plugin_urn": "urn:otap:processor:persistence",
                "out_ports": {"out_port": {"destinations": ["queues"]}},
                "config": {
                    "path": layout.inner("quiver"),
                    "otlp_handling": "pass_through",
                    "segment": {"max_open_duration": "1s"},
                },
            },
            "queues": {
                "kind": "exporter",
                "plugin_urn": "urn:otel:buffer:exporter",
                "config": {
                    "store": store if "://" in store else f"file://{store}",
                    "manifest_path": "{signal}/manifest",
                    "data_path_prefix": "{signal}",
                    "format": "otlp",
                },
            },
        },
        "telemetry": {"metrics_addr": f"127.0.0.1:{collector.admin_port}"},
        "dead_letters": layout.inner("dead_letters"),
        "drain_timeout": f"{max(1.0, settings.stop_timeout_s / 2):g}s",
    }


def _secrets_of(settings: UpSettings) -> list[str]:
    """Return all keys and tokens in the file."""
    servers = (settings.topics, settings.timeseries, settings.vector, settings.console)
    keys = [server.keys.reveal() for server in servers if server is not None and server.keys]
    tokens = [token.reveal() for token in settings.collector.tokens] if settings.collector else []
    entries = [entry.strip().partition(":")[0] for text in keys for entry in text.split(",")]
    return [secret for secret in [*entries, *tokens] if secret]


def wanted_ports(settings: UpSettings, running: Iterable[PartPlan]) -> dict[str, tuple[str, int]]:
    """Return the host and port of every listener, by the setting."""
    console = {"console.port": (settings.console.host or settings.host, settings.console.port)}
    return console | {key: place for part in running for key, place in part.ports.items()}


def port_faults(settings: UpSettings, running: Iterable[PartPlan]) -> list[str]:
    """Return an error for each port used twice. A part on all addresses uses its port on each of them."""
    wanted = list(wanted_ports(settings, running).items())
    return [
        f"{first} and {second} are both {place[1]}: change one of them"
        for number, (second, place) in enumerate(wanted)
        for first, other in wanted[:number]
        if place[1] and place[1] == other[1] and _overlap(place[0], other[0])
    ]


def _overlap(one: str, other: str) -> bool:
    hosts = {_LOOPBACK if host == "localhost" else host for host in (one, other)}
    return len(hosts) == 1 or not _EVERYWHERE.isdisjoint(hosts)
