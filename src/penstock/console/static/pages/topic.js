// One topic: its retention, its sequence line with lost ranges, its jobs, and its tail.

import { part, query } from "../api.js";
import { chart } from "../chart.js";
import { crumbs, facts, figure, h, legend, show, svg, table } from "../dom.js";
import { brief, bytes, count, day, rate, seconds, several, when } from "../format.js";
import { poll } from "../polling.js";
import { tail } from "./tail.js";

const WIDE = 900;
const EDGE = 4;
const STRETCHES_MAX = 40;
const KINDS = { live: "live-part", deleted: "dead-part", tombstone: "gap-part", evicted: "half-part", expired: "late-part" };
const WHEN_FULL = { old: "the oldest records are removed", reject: "writes are rejected" };

/** Return the retention of a topic as text. */
export function kept(retention) {
  if (!retention) return "–";
  const limits = [retention.ttl_ms ? seconds(retention.ttl_ms / 1000) : null, retention.cap_records ? several(retention.cap_records, "record") : null,
    retention.cap_bytes ? bytes(retention.cap_bytes) : null].filter(Boolean);
  return limits.length ? limits.join(", ") : "all";
}

/** Draw the topic every two seconds. */
export function topic(body, name, { signal, fault }) {
  let now = null;
  const head = h("div", { class: "cards" });
  const line = h("div", { class: "card scroll", tabindex: "0", role: "region", "aria-label": "Sequence line" });
  const queue = h("div", null);
  const speed = chart("Records per second", () => speeds(now), signal);
  const newest = tail(name, signal);
  body.append(crumbs("topics", "All topics", name), head, h("h2", null, "Sequence line"), line, queue, newest, speed);
  poll(() => `topics/${part(name)}`, 2000, (found) => {
    if (now === null) newest.start(found.head);
    now = found;
    show(head, cards(found));
    show(line, sequenceLine(found));
    show(queue, found.queue ? jobs(found.queue) : []);
    speed.draw();
  }, { signal, fault });
}

function speeds(now) {
  const points = now?.history ?? [];
  return { times: points.map((point) => point[0]), series: [{ label: "records/s", values: points.map((point) => point[1]), format: brief }] };
}

function cards(found) {
  const limited = found.retention.cap_records || found.retention.cap_bytes;
  return [
    figure("Records", count(found.records), `${bytes(found.bytes)}, ${rate(found.rate)}`),
    h("div", { class: "card" }, h("h3", null, "Sequences"), facts([["earliest", count(found.earliest)], ["head", count(found.head)], ["last write", found.last_write_ms ? day(found.last_write_ms) : "none"]])),
    h("div", { class: "card" }, h("h3", null, "Kept"), facts([["class", found.class], ["retention", kept(found.retention)], ...(limited ? [["when full", WHEN_FULL[found.retention.discard] ?? found.retention.discard]] : [])])),
    found.relays.length ? h("div", { class: "card" }, h("h3", null, "Relayed"), found.relays.map((relay) => h("p", null, "into the queue ", h("a", { href: `#/buffer/${part(relay.queue)}` }, relay.queue)))) : null,
  ];
}

function describe(stretch) {
  const range = stretch.from === stretch.to ? count(stretch.from) : `${count(stretch.from)} to ${count(stretch.to)}`;
  return `${range}: ${stretch.reason && stretch.reason !== stretch.kind ? (stretch.kind === "live" ? `live, ${stretch.reason}` : stretch.reason) : stretch.kind}`;
}

function sequenceLine(found) {
  if (!found.head) return h("p", { class: "empty" }, "No record yet. The first record gets sequence 1.");
  const room = WIDE - 2 * EDGE;
  const rects = found.line.map((stretch) => svg("rect", {
    class: KINDS[stretch.kind] ?? "dead-part", x: EDGE + room * (stretch.from - 1) / found.head, y: 6, height: 22,
    width: Math.max(2, room * (stretch.to - stretch.from + 1) / found.head),
  }, svg("title", null, describe(stretch))));
  return [
    svg("svg", { class: "picture line", viewBox: `0 0 ${WIDE} 46`, role: "img", "aria-label": found.line.slice(0, STRETCHES_MAX).map(describe).join("; ") }, rects,
      svg("text", { class: "small", x: EDGE, y: 42 }, "1"), svg("text", { class: "small", x: WIDE - EDGE, y: 42, "text-anchor": "end" }, count(found.head))),
    legend(found.line.slice(0, STRETCHES_MAX).map((stretch) => [KINDS[stretch.kind] ?? "dead-part", describe(stretch)])),
    found.line.length > STRETCHES_MAX ? h("p", { class: "quiet" }, `and ${several(found.line.length - STRETCHES_MAX, "more range")}`) : null,
  ];
}

function jobs(queue) {
  return h("section", { class: "card" }, h("h2", null, "Job queue"),
    facts([["ready", count(queue.ready)], ["leased", count(queue.in_flight)], ["dead letters", count(queue.dead_lettered)], ["a lease lasts", seconds(queue.lease_ms === null ? null : queue.lease_ms / 1000)],
      ["deliveries, at most", count(queue.max_deliveries)], ["dead letters go to", queue.dead_letter ? h("a", { href: `#/topics/topic/${part(queue.dead_letter)}` }, queue.dead_letter) : "nowhere: they are dropped"]], "wide"),
    queue.letters.length ? [h("h3", null, "Newest dead letters"), table("Newest dead letters", ["sequence", "time", "data"], queue.letters.map((letter) => [count(letter.seq), when(letter.ts_ms), h("code", null, letter.text ?? "(bytes)")]))] : null);
}
