// Pipelines: micro-batches, checkpoint, sinks and balance. Dead letters have a separate module.

import { part } from "../api.js";
import { account } from "../account.js";
import { chart } from "../chart.js";
import { badge, crumbs, empty, facts, h, show, table } from "../dom.js";
import { ago, brief, count, day, rate, seconds, several } from "../format.js";
import { faults, poll } from "../polling.js";
import { letters } from "./letters.js";

export async function render(stage, { names, signal }) {
  const fault = faults();
  const body = h("div", null);
  stage.append(h("h1", null, "Pipelines"), fault, body);
  if (names[0]) one(body, names[0], { signal, fault });
  else poll(() => "pipelines", 3000, (found) => show(body, listing(found)), { signal, fault });
}

const backlog = (found) => (found.backlog === null ? null : several(found.backlog, "batch", "batches"));

function listing(found) {
  if (!found.length) return empty("No pipeline is part of this plan. ", h("code", null, "penstock init"), " writes a working one, and ", h("code", null, "pip install 'penstock[spark]'"), " installs what it needs.");
  return table("Pipelines", ["pipeline", "state", "reads", "last micro-batch", "rate", "waiting", "lag", "last error"], found.map((row) => [
    h("a", { href: `#/pipelines/${part(row.name)}` }, row.name), badge(row.state ?? "unknown"), queueLink(row.queue), row.last_batch === null ? "none yet" : `${count(row.last_batch)}, ${ago(row.last_at_ms)}`,
    rate(row.rate_records_s), backlog(row), seconds(row.lag_s), row.error ?? row.last_error ? h("span", { class: "error" }, row.error ?? row.last_error) : null]));
}

function one(body, name, { signal, fault }) {
  let now = null;
  const head = h("div", null);
  const rows = h("div", null);
  const took = chart("Duration of micro-batches", () => column(now, "duration_ms", "duration", (ms) => seconds(ms / 1000)), signal, { none: "No micro-batch has a duration yet." });
  const fast = chart("Records per second in micro-batches", () => column(now, "rows_per_s", "records/s", brief), signal, { none: "No micro-batch has a duration yet." });
  const dead = letters(name, () => now?.queue, signal);
  body.append(crumbs("pipelines", "All pipelines", name), head, h("div", { class: "columns" }, took, fast), dead, h("h2", null, "Micro-batches, newest first"), rows);
  poll(() => `pipelines/${part(name)}`, 2500, (found) => {
    now = found;
    show(head, summary(found));
    show(rows, found.batches.length ? batches(found) : empty("None yet: the first appears when the pipeline runs and its queue has records."));
    dead.follow(found.batches);
    took.draw();
    fast.draw();
  }, { signal, fault });
}

function column(now, field, label, format) {
  const lines = now?.batches ?? [];
  return { times: lines.map((line) => line.at_ms), series: [{ label, values: lines.map((line) => line[field]), format }] };
}

const queueLink = (name) => (name ? h("a", { href: `#/buffer/${part(name)}` }, name) : null);

function summary(found) {
  return [
    found.error ? h("p", { class: "error" }, found.error) : null,
    h("div", { class: "cards" },
      h("div", { class: "card" }, h("h3", null, "Query ", badge(found.state ?? "unknown")),
        facts([["reads", queueLink(found.queue)], ["rate", rate(found.rate_records_s)], ["waiting", backlog(found)], ["lag", seconds(found.lag_s)], ["file", h("code", null, found.file)]]),
        found.last_error ? h("p", { class: "error" }, found.last_error) : null),
      h("div", { class: "card" }, h("h3", null, "Checkpoint"), checkpoint(found.checkpoint)),
      h("div", { class: "card" }, h("h3", null, "Sinks"), found.sinks.length ? found.sinks.map(sink) : empty("Unknown."))),
    found.balance.map(account),
  ];
}

function checkpoint(found) {
  if (!found) return empty("It has never run.");
  const point = found.position && Object.entries(found.position);
  return facts([["planned", count(found.planned)], ["done", count(found.done)],
    ["next sequence", point ? point.map(([shard, at]) => (point.length > 1 ? `${shard}: ${count(at)}` : count(at))).join(", ") : null], ["folder", h("code", null, found.path)]]);
}

function sink(found) {
  return h("p", null, h("strong", null, found.name), " ", found.error ? h("span", { class: "error" }, found.error) : `${found.kind}, has micro-batch ${count(found.last)}`, h("br"), h("code", null, found.place));
}

function batches(found) {
  return table("Micro-batches", ["number", "delivered", "took", "records", "rows", "records/s", "dead letters", "from", "to"], [...found.batches].reverse().map((line) => [
    h("a", { href: `#/trace?pipeline=${part(found.name)}&batch=${line.id}`, title: "Trace this micro-batch" }, count(line.id)), day(line.at_ms), line.duration_ms === null ? null : seconds(line.duration_ms / 1000), count(line.records_in),
    Object.entries(line.rows).map(([name, rows]) => `${name}: ${count(rows)}`).join(", "), brief(line.rows_per_s), count(line.dead_letters), range(line.from), range(line.to)]));
}

function range(offsets) {
  const found = Object.entries(offsets);
  return found.length === 1 ? String(found[0][1]) : found.map(([shard, at]) => `${shard}: ${at}`).join(", ");
}
