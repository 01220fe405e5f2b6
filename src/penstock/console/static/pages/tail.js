// The live tail of a topic. Records that are lost, or arrive too fast to be read, are shown as a gap.

import { follow, part, query } from "../api.js";
import { h } from "../dom.js";
import { when } from "../format.js";

const SHOWN_MAX = 300;
const BACK = 20;
const SILENT_MS = 30_000;
const BEGINNINGS = [["last", `the last ${BACK}`], ["now", "now"], ["all", "the beginning"]];

/** Return the element. `element.start(head)` begins to follow, from the selected position. */
export function tail(name, signal) {
  const tag = h("input", { id: "tag", placeholder: "tag, or beginning*", autocomplete: "off" });
  const node = h("input", { id: "node", placeholder: "written by", autocomplete: "off" });
  const from = h("select", { id: "from" }, BEGINNINGS.map(([value, title]) => h("option", { value }, title)));
  const state = h("span", { class: "quiet", role: "status" });
  const list = h("div", { class: "log", role: "log", tabindex: "0", "aria-label": "Live tail", "aria-live": "off", "data-empty": "No records yet: they appear as they are written." });
  let mine = null;
  let head = 0;

  const add = (row) => {
    const end = list.scrollHeight - list.scrollTop - list.clientHeight < 40;
    list.append(row);
    while (list.childElementCount > SHOWN_MAX) list.firstElementChild.remove();
    if (end) list.scrollTop = list.scrollHeight;
  };
  const start = () => {
    mine?.abort();
    mine = new AbortController();
    list.replaceChildren();
    state.textContent = "connecting …";
    follow((after) => `topics/${part(name)}/tail${query({ after, tag: tag.value.trim(), node: node.value.trim() })}`, {
      signal: AbortSignal.any([signal, mine.signal]),
      silentMs: SILENT_MS,
      after: { last: Math.max(0, head - BACK), now: null, all: 0 }[from.value],
      tell: (event, data) => { state.textContent = "live"; const row = ROWS[event]?.(data, name); if (row) add(row); },
      state: (word, text) => { state.textContent = word === "live" ? "connecting …" : `${word}: ${text}`; },
    });
  };
  const form = h("form", { class: "row", onsubmit: (event) => { event.preventDefault(); start(); } },
    h("div", null, h("label", { for: "tag" }, "Only tag"), tag), h("div", null, h("label", { for: "node" }, "Only node"), node),
    h("div", { class: "slim" }, h("label", { for: "from" }, "From"), from), h("button", null, "Follow"), state);
  from.addEventListener("change", start);
  const element = h("section", { class: "card" }, h("h2", null, "Live tail"), form, list);
  element.start = (now) => { head = now; start(); };
  return element;
}

const ROWS = {
  record: (one, name) => h("div", { class: "record" },
    h("a", { href: `#/trace${query({ topic: name, seq: one.seq })}`, title: "Trace this record" }, one.seq), h("span", { class: "quiet" }, ` ${when(one.ts_ms)} `),
    one.node ? h("span", { class: "part" }, `${one.node} `) : null, one.tag ? h("span", { class: "warning" }, `[${one.tag}] `) : null, one.text ?? "(bytes)", one.cut ? " …" : ""),
  gap: (gap) => h("div", { class: "error" }, `${gap.from} to ${gap.to} are not shown: ${gap.reason.replaceAll("_", " ")}`),
  deleted: () => h("div", { class: "error" }, "the topic was deleted"),
  error: (one) => h("div", { class: "error" }, one.message),
};
