// Queues: their depth, age, entries, producers, and garbage.

import { part } from "../api.js";
import { chart } from "../chart.js";
import { crumbs, empty, facts, figure, h, show, svg, table } from "../dom.js";
import { ago, brief, bytes, count, day, rate, seconds, several, when } from "../format.js";
import { faults, poll } from "../polling.js";

const WIDE = 900;
const LEFT = 20;
const LANE = 34;
const LANES_MAX = 6;

export async function render(stage, { names, signal }) {
  const fault = faults();
  const body = h("div", null);
  stage.append(h("h1", null, "Buffer"), fault, body);
  if (names[0]) one(body, names[0], { signal, fault });
  else poll(() => "buffers", 3000, (queues) => show(body, listing(queues)), { signal, fault });
}

function listing(queues) {
  if (!queues.length) return empty("No queue is part of this plan. A relay, the collector, a pipeline or a database adds one: see ", h("code", null, "penstock init"), ".");
  return table("Queues", ["queue", "waiting", "manifest", "in", "written by", "read by", "state"], queues.map((queue) => [
    h("a", { href: `#/buffer/${part(queue.name)}` }, queue.name), several(queue.depth_batches, "batch", "batches"), bytes(queue.manifest_bytes), rate(queue.rate_records_s),
    queue.writers.join(", ") || null, queue.readers.join(", ") || null,
    queue.error ? h("span", { class: "error" }, queue.error) : "readable",
  ]));
}

function one(body, name, { signal, fault }) {
  let now = null;
  const figures = h("div", { class: "cards slim" });
  const line = h("div", { class: "card scroll", tabindex: "0", role: "region", "aria-label": "Batches over time" });
  const entries = h("div", null);
  const rest = h("div", { class: "columns" });
  const depth = chart("Batches in the queue", () => column(now, 1, "batches", brief), signal);
  const size = chart("Size of the manifest", () => column(now, 2, "size", bytes), signal);
  body.append(crumbs("buffer", "All queues", name), figures, h("div", { class: "columns" }, depth, size),
    h("h2", null, "Batches over time"), line, rest, h("h2", null, "Batches, newest first"), entries);
  poll(() => `buffers/${part(name)}`, 2000, (found) => {
    now = found;
    show(figures, numbers(found));
    show(line, found.entries.length ? timeline(found) : empty("The queue is empty: all batches were read."));
    show(rest, epochs(found), garbage(found));
    show(entries, found.entries.length ? batches(found) : empty("No batch is waiting."));
    depth.draw();
    size.draw();
  }, { signal, fault });
}

function column(now, place, label, format) {
  const points = now?.history ?? [];
  return { times: points.map((point) => point[0]), series: [{ label, values: points.map((point) => point[place]), format }] };
}

function numbers(found) {
  return [
    figure("Waiting", several(found.depth_batches, "batch", "batches"), found.depth_records === null ? "too many to count their records" : several(found.depth_records, "record")),
    figure("Oldest", found.depth_batches === 0 ? "none" : seconds(found.oldest_age_s), "how long the first batch has waited"),
    figure("Next sequence", count(found.next_sequence), `first in the queue: ${count(found.first_sequence)}`),
    figure("Epoch", count(found.epoch), "rises with every takeover and collection"),
    figure("Manifest", bytes(found.manifest_bytes), found.manifest_path),
  ];
}

// --- the timeline: from the oldest batch to now, with a lane for each producer

const producerOf = (entry) => entry.producer ?? "producer unknown";

function timeline(found) {
  const shown = found.entries.filter((entry) => entry.at_ms !== null);
  if (!shown.length) return empty("The batches have no times.");
  const first = Math.min(...shown.map((entry) => entry.at_ms));
  const last = Math.max(Date.now(), ...shown.map((entry) => entry.at_ms));
  const most = Math.max(1, ...shown.map((entry) => entry.bytes ?? 1));
  const lanes = [...new Set(shown.map(producerOf))].slice(0, LANES_MAX);
  const high = 30 + lanes.length * LANE;
  const x = (ms) => LEFT + (WIDE - 2 * LEFT) * (ms - first) / Math.max(1, last - first);
  const y = (entry) => 28 + LANE * Math.min(LANES_MAX - 1, Math.max(0, lanes.indexOf(producerOf(entry))));
  return svg("svg", { class: "picture line", viewBox: `0 0 ${WIDE} ${high}`, role: "img", "aria-label": `${several(shown.length, "batch", "batches")} since ${when(first)}; the table below lists them` },
    lanes.map((name, place) => [
      svg("line", { class: "edge", x1: LEFT, y1: 28 + LANE * place, x2: WIDE - LEFT, y2: 28 + LANE * place }),
      svg("text", { class: "small", x: LEFT, y: 13 + LANE * place }, name)]),
    shown.map((entry) => svg("circle", { class: entry.records === null ? "half-part" : "live-part", cx: x(entry.at_ms), cy: y(entry), r: 3 + 7 * Math.sqrt((entry.bytes ?? 1) / most), "fill-opacity": 0.65 },
      svg("title", null, `sequence ${entry.sequence}: ${several(entry.records, "record")}, ${bytes(entry.bytes)}, ${seconds(entry.age_s)} old, ${producerOf(entry)}`))),
    svg("text", { class: "small", x: LEFT, y: high - 3 }, `${when(first)}, ${seconds((last - first) / 1000)} ago`),
    svg("text", { class: "small", x: WIDE - LEFT, y: high - 3, "text-anchor": "end" }, "now"));
}

// --- epochs, conflicts, garbage

function epochs(found) {
  const lost = Object.entries(found.conflicts.by_part);
  return h("section", { class: "card" }, h("h2", null, "Epochs, fencing and lost writes"),
    facts([...lost.map(([name, value]) => [`${name} lost`, `${count(value)} conditional writes (CAS)`]),
      ...(found.conflicts.unknown.length ? [["conflicts not reported by", found.conflicts.unknown.join(", ")]] : [])]),
    found.epochs.length ? table("Observed epochs", ["epoch", "seen since"], found.epochs.slice(-12).reverse().map((each) => [count(each.epoch), day(each.seen_at_ms)])) : empty("No epoch observed yet."));
}

function garbage(found) {
  const gc = found.gc;
  return h("section", { class: "card" }, h("h2", null, "Garbage"),
    gc.error ? h("p", { class: "error" }, gc.error) : null,
    gc.shards === null ? empty("Not read yet.") : gc.shards.map((shard) => facts([
      ["objects", `${count(shard.data_objects)}, ${bytes(shard.data_bytes)}`],
      ["unreferenced", `${count(shard.unreferenced_objects)}, ${bytes(shard.unreferenced_bytes)}`],
      ["may be deleted now", count(shard.collectable_objects)], ["dead letters", count(shard.dead_letters)],
      ["floor", shard.floor_ms ? day(shard.floor_ms) : "none yet"], ["as of", gc.as_of_ms ? ago(gc.as_of_ms) : null]])));
}

function batches(found) {
  return table("Batches", ["sequence", "records", "size", "age", "producer", "metadata", "object"], found.entries.map((entry) => [
    h("a", { href: `#/trace?buffer=${part(found.name)}&shard=${entry.shard ?? 0}&sequence=${entry.sequence}`, title: "Trace this batch" }, found.shards ? `${entry.shard}:${entry.sequence}` : count(entry.sequence)),
    count(entry.records), bytes(entry.bytes), seconds(entry.age_s), entry.producer,
    entry.metadata.length ? h("code", null, entry.metadata.map((item) => item.text ?? "(bytes)").join(" · ") + (entry.metadata_count > entry.metadata.length ? ` … ${entry.metadata_count}` : "")) : null,
    h("code", null, entry.location)]));
}
