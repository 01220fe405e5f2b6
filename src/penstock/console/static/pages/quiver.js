// Quiver: segments on a line, the progress and gaps of each subscriber, and the disk space.

import { part } from "../api.js";
import { badge, crumbs, empty, facts, figure, h, legend, show, svg, table } from "../dom.js";
import { bytes, count, seconds, several } from "../format.js";
import { faults, poll } from "../polling.js";

const WIDE = 900;
const EDGE = 4;
const DRAWN_MAX = 600;
const LISTED_MAX = 300;
const STATES = { done: "dead-part", partly: "half-part", pending: "live-part" };
const MEANING = [["live-part", "pending segment"], ["half-part", "resolved by some subscribers, or in part"], ["dead-part", "resolved"], ["gap-part", "gap: later ones are resolved"]];

export async function render(stage, { names, signal }) {
  const fault = faults();
  const body = h("div", null);
  stage.append(h("h1", null, "Quiver"), fault, body);
  if (!names[0]) { poll(() => "quivers", 3000, (found) => show(body, listing(found)), { signal, fault }); return; }
  const inside = h("div", null);
  body.append(crumbs("quiver", "All Quivers", names[0]), inside);
  poll(() => `quivers/${part(names[0])}`, 3000, (found) => show(inside, one(found)), { signal, fault });
}

function listing(found) {
  if (!found.length) return empty("No Quiver is part of this plan: it comes with the collector, ", h("code", null, "pip install 'penstock[collector]'"), ".");
  return table("Quiver directories", ["name", "segments", "items", "subscribers", "on disk", "budget", "state"], found.map((row) => [
    h("a", { href: `#/quiver/${part(row.name)}` }, row.name), count(row.segment_count), count(row.items), count(row.subscriber_count), bytes(row.budget.disk_bytes),
    row.budget.budget_bytes ? bytes(row.budget.budget_bytes) : "no limit", row.error ? h("span", { class: "error" }, row.error) : "readable"]));
}

function one(found) {
  return [
    found.error ? h("p", { class: "error" }, found.error) : null,
    h("div", { class: "cards" },
      figure("Segments", count(found.segment_count), several(found.items, "item")),
      room(found.budget),
      h("div", { class: "card" }, h("h3", null, "Directory"), h("code", null, found.path))),
    found.damaged.length ? h("div", { class: "card bad" }, h("h2", null, "Quarantined as damaged"), found.damaged.map((text) => h("p", { class: "error" }, typeof text === "string" ? text : JSON.stringify(text)))) : null,
    h("h2", null, "Subscribers"),
    found.metrics_error ? h("p", { class: "quiet" }, `The number of bundles in flight is unknown: ${found.metrics_error}`) : null,
    found.subscribers.length ? [legend(MEANING), found.subscribers.map((each) => subscriber(each, found))] : empty("There are no subscribers, so no data is retained."),
    h("h2", null, "Segments, newest first"),
    found.segments.length ? segments(found) : empty("No segment yet: one is written once there are enough records, or after a time limit."),
  ];
}

function room(budget) {
  const share = budget.budget_bytes && budget.disk_bytes !== null ? budget.disk_bytes / budget.budget_bytes : null;
  const percent = share === null ? null : `${Math.round(share * 100)} %`;
  return h("div", { class: "card" }, h("h3", null, "Budget"), h("p", { class: "figure" }, bytes(budget.disk_bytes)),
    share === null ? h("p", { class: "quiet" }, `no limit; ${bytes(budget.free_bytes)} free on the disk`)
      : h("p", null, h("meter", { min: "0", max: "1", low: "0.6", high: "0.8", optimum: "0", value: String(share), "aria-label": "Share of the budget" }, percent), ` ${percent} of ${bytes(budget.budget_bytes)}`));
}

function segments(found) {
  const shown = found.segments.slice(-LISTED_MAX).reverse();
  const older = found.segments_left_out + found.segments.length - shown.length;
  return [
    table("Segments", ["segment", "core", "stream", "items", "bundles", "size", "age", "state"], shown.map((row) => [
      count(row.id), count(row.core), row.slot, count(row.records), count(row.bundles), bytes(row.bytes), seconds(row.age_s), row.state])),
    older ? h("p", { class: "quiet" }, `${several(older, "older segment")} not listed.`) : null,
  ];
}

function subscriber(who, found) {
  const gaps = who.gaps.map(([low, high]) => (low === high ? String(low) : `${low} to ${high}`)).join(", ");
  return h("section", { class: "card" }, h("h3", null, who.id, " ", badge(who.state)),
    line(who, found),
    facts([["high-water mark", who.high_water ? `segment ${count(who.high_water)}` : "nothing yet"], ["gaps", gaps || "none"], ["waiting", several(who.backlog, "segment")], ["lag", seconds(who.lag_s)],
      ["in flight", count(who.in_flight)], ["deferred", count(who.deferred)], ["retries", count(who.retries)], ["lost", count(who.lost)]], "wide"));
}

function line(who, found) {
  const own = found.segments.filter((row) => row.core === who.core).slice(-DRAWN_MAX);
  const last = Math.max(who.highest ?? 0, who.high_water, 1, ...own.map((row) => row.id));
  const at = (seq) => EDGE + (WIDE - 2 * EDGE) * (seq - 1) / last;
  const bar = (kind, [low, high], y, height, title) => svg("rect", { class: kind, x: at(low), y, height, width: Math.max(2, (WIDE - 2 * EDGE) * (high - low + 1) / last - 1) }, svg("title", null, title));
  const mark = at(who.high_water + 1);
  return h("div", { class: "scroll" }, svg("svg", { class: "picture line", viewBox: `0 0 ${WIDE} 60`, role: "img", "aria-label": `${who.id}: resolved up to ${who.high_water} of ${last}, ${several(who.gaps.length, "gap")}` },
    own.map((row) => bar(STATES[row.state] ?? "dead-part", [row.id, row.id], 4, 9, `segment ${row.id}: ${row.state}, ${several(row.records, "item")}`)),
    who.high_water ? bar("dead-part", [1, who.high_water], 18, 18, `up to ${who.high_water}: resolved`) : null,
    who.complete.map((stretch) => bar("dead-part", stretch, 18, 18, `${stretch[0]} to ${stretch[1]}: resolved out of order`)),
    who.gaps.map((stretch) => bar("gap-part", stretch, 18, 18, `${stretch[0]} to ${stretch[1]}: a gap`)),
    who.partial.map((half) => bar("half-part", [half.segment, half.segment], 18, 18, `segment ${half.segment}: ${half.resolved} bundles resolved`)),
    svg("line", { class: "mark", x1: mark, x2: mark, y1: 2, y2: 42 }),
    svg("text", { class: "small", x: Math.min(mark, WIDE - 120), y: 56 }, `mark ${count(who.high_water)}`),
    svg("text", { class: "small", x: WIDE - EDGE, y: 56, "text-anchor": "end" }, String(last))));
}
