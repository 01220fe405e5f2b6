// Databases: their watermarks, a form for PromQL with a chart, and a form for vector search.

import { part, post } from "../api.js";
import { chart } from "../chart.js";
import { badge, empty, facts, h, show, svg, table } from "../dom.js";
import { brief, bytes, count, rate, seconds, several } from "../format.js";
import { faults, poll } from "../polling.js";

const STEPS = 240;
const SERIES_MAX = 12;
const SPANS = [["15 minutes", 900], ["1 hour", 3600], ["6 hours", 21600], ["24 hours", 86400]];
const MARKS = [["applied", "live-part"], ["flushed", "half-part"], ["durable", "dead-part"]];

export async function render(stage, { signal, search }) {
  const fault = faults();
  const list = h("div", null);
  const boxes = h("div", null);
  stage.append(h("h1", null, "Databases"), fault, list, boxes);
  let known = "";
  poll(() => "databases", 2000, (found) => {
    show(list, found.length ? h("div", { class: "cards" }, found.map(card)) : empty("No database is part of this plan. ", h("code", null, "pip install 'penstock[timeseries,vector]'"), " installs them, and ", h("code", null, "penstock up"), " starts them."));
    const names = found.map((one) => one.name).join();
    if (names !== known) {
      known = names;
      boxes.replaceChildren(...found.map((one) => (one.kind === "timeseries" ? promql(one, signal, search) : nearest(one, signal))));
    }
  }, { signal, fault });
}

function card(one) {
  const down = one.state === "failed" || one.state === "stopped";
  const feed = one.feed;
  return h("div", { class: down ? "card bad" : "card" }, h("h3", null, one.name, " ", badge(one.state ?? "unknown")),
    h("p", { class: "quiet" }, one.kind === "vector" ? "vectors" : "time series"), watermarks(one.watermarks),
    facts([["not flushed", one.kind === "vector" ? several(one.pending_bytes, "vector") : bytes(one.pending_bytes)], ["flushes", count(one.flushes)],
      ...(feed ? [["fed from", h("a", { href: `#/buffer/${part(feed.queue)}` }, feed.queue)], ["up to batch", count(feed.sequence)], ["waiting", feed.backlog === null ? null : several(feed.backlog, "batch", "batches")], ["lag", seconds(feed.lag_s)],
        ["read", several(feed.records, "record")], ["rate", rate(feed.rate_records_s)], ["refused", count(feed.refused)]] : []),
      ["address", one.url]]),
    one.error ? h("p", { class: "error" }, one.error) : null);
}

/** Draw the three watermarks as bars: the applied, flushed and durable part of all writes. */
function watermarks(marks) {
  if (!marks) return empty("Its watermarks are unknown.");
  const most = Math.max(1, ...MARKS.map(([name]) => marks[name] ?? 0));
  return svg("svg", { class: "marks", viewBox: "0 0 260 66", role: "img", "aria-label": MARKS.map(([name]) => `${name} ${count(marks[name])}`).join(", ") },
    MARKS.map(([name, kind], place) => [
      svg("text", { x: 0, y: 15 + place * 22 }, name),
      svg("rect", { class: "track", x: 62, y: 4 + place * 22, width: 130, height: 14, rx: 3 }),
      svg("rect", { class: kind, x: 62, y: 4 + place * 22, width: 130 * (marks[name] ?? 0) / most, height: 14, rx: 3 }),
      svg("text", { x: 200, y: 15 + place * 22 }, count(marks[name]))]));
}

// --- PromQL

function promql(one, signal, search) {
  const text = h("textarea", { id: `q-${one.name}`, spellcheck: "false", placeholder: "rate(requests_total[5m])" });
  text.value = search.get("query") ?? "";
  const span = h("select", { id: `s-${one.name}` }, SPANS.map(([label, value]) => h("option", { value: String(value), selected: value === 3600 }, label)));
  const out = h("div", { role: "status" });
  let drawn = { times: [], series: [] };
  const plot = chart("Result", () => drawn, signal, { height: 240, kind: "plain" });
  plot.hidden = true;
  const run = async (event) => {
    event?.preventDefault();
    show(out, h("p", { class: "quiet" }, "Running …"));
    const end = Math.floor(Date.now() / 1000);
    const start = end - Number(span.value);
    try {
      const answer = await post(`databases/${part(one.name)}/query`, { query: text.value, start, end, step: Math.max(1, Math.round((end - start) / STEPS)) }, signal);
      if (answer.status !== "success") throw new Error(answer.error ?? "the database refused");
      drawn = matrix(answer.data.result);
      plot.hidden = !drawn.times.length;
      plot.draw();
      show(out, answer.data.result.length ? h("p", { class: "quiet" }, `${count(answer.data.result.length)} series${answer.data.result.length > SERIES_MAX ? `, the first ${SERIES_MAX} drawn` : ""}`) : empty("No series matches in this time."),
        (answer.warnings ?? []).map((warning) => h("p", { class: "error" }, warning)), last(answer.data.result));
    } catch (error) {
      plot.hidden = true;
      if (!signal.aborted) show(out, h("p", { class: "error" }, error.message));
    }
  };
  text.addEventListener("keydown", (event) => { if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) run(event); });
  if (text.value) run();
  return h("section", { class: "card" }, h("h2", null, `PromQL on ${one.name}`), h("form", { onsubmit: run }, h("label", { for: text.id }, "Query (Ctrl+Enter to run)"), text,
    h("div", { class: "row" }, h("div", { class: "slim" }, h("label", { for: span.id }, "Over the last"), span), h("button", { class: "primary" }, "Ask"))), plot, out);
}

function name(metric) {
  const { __name__: own = "", ...labels } = metric;
  const pairs = Object.entries(labels).map(([key, value]) => `${key}="${value}"`);
  return pairs.length ? `${own}{${pairs.join(", ")}}` : own || "{}";
}

function matrix(result) {
  const times = [...new Set(result.flatMap((one) => one.values.map(([at]) => at)))].sort((a, b) => a - b);
  return { times: times.map((at) => at * 1000), series: result.slice(0, SERIES_MAX).map((one) => {
    const by = new Map(one.values.map(([at, value]) => [at, Number(value)]));
    return { label: name(one.metric), values: times.map((at) => { const value = by.get(at); return Number.isFinite(value) ? value : null; }), format: brief };
  }) };
}

function last(result) {
  return result.length ? table("Last values", ["series", "last value"], result.slice(0, 50).map((one) => [h("code", null, name(one.metric)), one.values.at(-1)?.[1]])) : null;
}

// --- vectors

function nearest(one, signal) {
  const vector = h("textarea", { id: `v-${one.name}`, spellcheck: "false", placeholder: "[0.1, 0.2, …]" });
  const filter = h("input", { id: `f-${one.name}`, placeholder: '{"eq": {"field": "lang", "value": "en"}}' });
  const most = h("input", { id: `k-${one.name}`, type: "number", min: "1", max: "100", value: "10" });
  const out = h("div", { role: "status" });
  const run = async (event) => {
    event.preventDefault();
    show(out, h("p", { class: "quiet" }, "Searching …"));
    try {
      const body = { vector: JSON.parse(vector.value), k: Number(most.value) };
      if (filter.value.trim()) body.filter = JSON.parse(filter.value);
      const answer = await post(`databases/${part(one.name)}/search`, body, signal);
      if (answer.status !== undefined && answer.status !== "success") throw new Error(answer.message ?? "the database refused");
      show(out, answer.results.length ? table("Nearest vectors", ["score", "id", "attributes"], answer.results.map((hit) => [hit.score.toPrecision(5), hit.vector.id, h("code", null, attributes(hit.vector.attributes))])) : empty("No result: no vector matches the filter, or there are none yet."));
    } catch (error) {
      if (!signal.aborted) show(out, h("p", { class: "error" }, error instanceof SyntaxError ? `vector and filter must be JSON: ${error.message}` : error.message));
    }
  };
  return h("section", { class: "card" }, h("h2", null, `Nearest vectors in ${one.name}`), h("form", { onsubmit: run },
    h("label", { for: vector.id }, "Vector, as JSON"), vector,
    h("div", { class: "row" }, h("div", null, h("label", { for: filter.id }, "Filter, as JSON (optional)"), filter), h("div", { class: "slim" }, h("label", { for: most.id }, "How many"), most), h("button", { class: "primary" }, "Search"))), out);
}

function attributes(found) {
  return Object.entries(found ?? {}).map(([key, value]) => (Array.isArray(value) ? `${key}: ${value.length} numbers` : `${key}: ${JSON.stringify(value)}`)).join(", ");
}
