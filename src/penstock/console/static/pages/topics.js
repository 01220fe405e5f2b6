// Topics: a list that stays fast with ten thousand of them. One topic and the routers are separate pages.

import { get, part, query } from "../api.js";
import { h, perFrame, show } from "../dom.js";
import { brief, bytes, rate, several } from "../format.js";
import { faults, note } from "../polling.js";
import { routers } from "./routers.js";
import { kept, topic } from "./topic.js";

const ROW = 34;
const PAGE = 200;
const FRESH_MS = 3000;
const HEADS = ["topic", "kind", "records", "size", "rate", "retention"];

export async function render(stage, context) {
  const fault = faults();
  const body = h("div", null);
  stage.append(h("h1", null, "Topics"), fault, body);
  if (context.names[0] === "routers") routers(body, { ...context, fault });
  else if (context.names[0] === "topic") topic(body, context.names[1] ?? "", { ...context, fault });
  else list(body, { ...context, fault });
}

/**
 * Only the visible rows are in the document. Names are loaded in pages as the user scrolls towards the end, which is
 * fast. The visible pages are read again with the details of each topic.
 */
function list(body, { signal, fault }) {
  const prefix = h("input", { type: "search", id: "prefix", placeholder: "begins with …", autocomplete: "off" });
  const status = h("p", { class: "quiet", role: "status" });
  const sheet = h("div", null);
  const box = h("div", { class: "rows", tabindex: "0", role: "region", "aria-label": "Topics" }, sheet);
  body.append(h("form", { class: "row", onsubmit: (event) => event.preventDefault() }, h("div", null, h("label", { for: "prefix" }, "Filter"), prefix),
    h("a", { class: "button", href: "#/topics/routers" }, "Routers")), status,
  h("div", { class: "topic-line heads", "aria-hidden": "true" }, HEADS.map((head) => h("span", null, head))), box);
  let rows = [];
  let begins = [];
  let next = null;
  let reading = false;
  let turn = 0;
  let lines = new Map();

  const seen = () => {
    const first = Math.max(0, Math.floor(box.scrollTop / ROW) - 5);
    return [first, Math.min(rows.length, first + Math.ceil(box.clientHeight / ROW) + 15)];
  };
  const draw = () => {
    const [first, last] = seen();
    sheet.style.height = `${rows.length * ROW}px`;
    lines = reconciled(sheet, lines, visibleRows(rows, first, last, lines));
    if (last >= rows.length - PAGE && next && !reading) more();
  };
  const ask = (after, config) => get(`topics${query({ prefix: prefix.value, after, limit: PAGE, config })}`, signal);
  const guarded = async (work) => {
    const mine = turn;
    try { await work(() => mine === turn && !signal.aborted); if (mine === turn) fault.replaceChildren(); }
    catch (error) { if (!signal.aborted && mine === turn) fault.replaceChildren(note(error)); }
  };
  const more = () => guarded(async (isMine) => {
    reading = true;
    try {
      const after = next;
      const found = await ask(after, "false");
      if (!isMine()) return;
      rows = after === null ? found.topics : rows.concat(found.topics);
      begins = after === null ? [null] : begins.concat([after]);
      next = found.next;
      status.textContent = heading(found.total, rows.length, next, prefix.value);
    } finally { if (isMine()) reading = false; }
    draw();
    if (begins.length === 1) fresh();
  });
  const fresh = () => guarded(async (isMine) => {
    if (reading) return;
    const [first, last] = seen();
    for (let page = Math.floor(first / PAGE); page <= Math.floor(Math.max(0, last - 1) / PAGE); page += 1) {
      const found = await ask(begins[page] ?? null);
      if (!isMine()) return;
      const news = new Map(found.topics.map((row) => [row.name, row]));
      rows = begins.length > 1 ? rows.map((row) => news.get(row.name) ?? row) : found.topics;
      if (begins.length === 1) { next = found.next; status.textContent = heading(found.total, rows.length, next, prefix.value); }
      draw();
    }
  });
  const restart = () => { turn += 1; next = null; more(); };
  let typing = null;
  prefix.addEventListener("input", () => { clearTimeout(typing); typing = setTimeout(() => { box.scrollTop = 0; restart(); }, 150); });
  let resting = null;
  const soon = perFrame(draw, signal);
  box.addEventListener("scroll", () => {
    clearTimeout(resting);
    resting = setTimeout(fresh, 200);
    soon();
  }, { passive: true });
  const watcher = new ResizeObserver(draw);
  watcher.observe(box);
  const timer = setInterval(() => { if (!document.hidden && begins.length) fresh(); else if (!begins.length) restart(); }, FRESH_MS);
  signal.addEventListener("abort", () => { clearInterval(timer); clearTimeout(typing); clearTimeout(resting); watcher.disconnect(); });
  restart();
}

function heading(total, loaded, next, prefix) {
  if (!loaded) return prefix ? `No topic begins with “${prefix}”.` : "No topics yet: the first write creates one.";
  return total === null ? `${several(loaded, "topic")}${next ? " and more" : ""}` : several(total, "topic");
}

/** Return the visible rows with their positions, and the row with the focus, which would otherwise lose it. */
function visibleRows(rows, first, last, lines) {
  const places = Array.from({ length: Math.max(0, last - first) }, (_, place) => first + place);
  const held = [...lines].find(([, one]) => one.element.contains(document.activeElement))?.[0];
  const at = held === undefined ? -1 : rows.findIndex((row) => row.name === held);
  if (at >= 0 && at < first) places.unshift(at);
  if (at >= 0 && at >= last) places.push(at);
  return places.map((place) => [rows[place], place * ROW]);
}

/**
 * Set the lines of `sheet` to `rows` ([row, top], in order), reusing `lines` (name → {element, row}). An element
 * keeps its name and is not moved among the others, because both would remove the focus. Return the current lines.
 */
function reconciled(sheet, lines, rows) {
  const now = new Map(rows.map(([row, top]) => [row.name, settled(lines.get(row.name), row, top)]));
  for (const [name, one] of lines) if (!now.has(name)) one.element.remove();
  let next = sheet.firstChild;
  for (const { element } of now.values()) {
    if (element === next) next = next.nextSibling;
    else sheet.insertBefore(element, next);
  }
  return now;
}

function settled(known, row, top) {
  const element = known?.element ?? h("div", { class: "line topic-line" });
  if (known?.row !== row) show(element, cells(row));
  element.style.top = `${top}px`;
  element.style.height = `${ROW}px`;
  return { element, row };
}

function cells(row) {
  return [
    h("a", { href: `#/topics/topic/${part(row.name)}`, title: row.name }, row.name), h("span", null, row.queue ? "queue" : row.class ?? "–"),
    h("span", null, brief(row.records)), h("span", null, bytes(row.bytes)), h("span", null, rate(row.rate)), h("span", { class: "quiet" }, kept(row.retention)),
  ];
}
