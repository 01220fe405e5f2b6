// A pipeline's dead letters with their bytes and reasons, and their redrive, which asks for confirmation.

import { get, part, post, query } from "../api.js";
import { badge, empty, h, show, speak, table } from "../dom.js";
import { ago, bytes, count, day, several } from "../format.js";
import { on } from "../live.js";
import { faults, note } from "../polling.js";

const PAGE = 50;
const HEX_MAX = 1024;
const HEADS = ["", "position", "reason", "record", "dead since", "state"];
const dialog = document.getElementById("dialog");

/**
 * Return the section for the pipeline `name`. `queue()` returns the name of its queue, if known.
 * `section.follow(batches)` reads again when micro-batches have added new dead letters.
 */
export function letters(name, queue, signal) {
  const fault = faults();
  const status = h("p", { class: "quiet", role: "status" });
  const rows = h("div", null);
  const job = h("div", { role: "status" });
  const chosen = new Set();
  let page = null;
  const all = h("button", { type: "button", class: "danger", disabled: true, onclick: () => ask(null) }, "Redrive all …");
  const some = h("button", { type: "button", disabled: true, onclick: () => ask([...chosen]) }, "Redrive chosen …");
  const more = h("button", { type: "button", hidden: true, onclick: () => read(page.next) }, "More");

  const read = async (after) => {
    try {
      const found = await get(`pipelines/${part(name)}/dead-letters${query({ after, limit: PAGE })}`, signal);
      page = after ? { ...found, letters: page.letters.concat(found.letters) } : found;
      fault.replaceChildren();
      draw();
    } catch (error) { if (!signal.aborted) fault.replaceChildren(note(error)); }
  };
  const draw = () => {
    status.textContent = page.kept ? `${several(page.total, "dead letter")}, ${count(page.left)} not redriven` : "This pipeline keeps no dead letters: a record that does not decode stops it.";
    all.disabled = !page.left;
    some.disabled = !chosen.size;
    more.hidden = !page.next;
    rows.replaceChildren(page.letters.length ? table("Dead letters", HEADS, page.letters.map(row)) : page.kept ? empty("None: every record was decoded.") : "");
  };
  const choose = (letter) => h("input", { type: "checkbox", "aria-label": `choose ${letter.position}`, checked: chosen.has(letter.position), onchange: (event) => {
    if (event.target.checked) chosen.add(letter.position); else chosen.delete(letter.position);
    some.disabled = !chosen.size;
  } });
  const row = (letter) => [
    letter.redriven || letter.index < 0 ? "" : choose(letter),
    h("a", { href: `#/trace${query({ buffer: queue(), shard: letter.shard, sequence: letter.sequence, index: letter.index < 0 ? null : letter.index })}`, title: "Trace this record" }, letter.position),
    letter.reason, payload(letter), day(letter.at_ms), letter.redriven ? badge("passed", "redriven") : badge("waits")];

  const ask = (positions) => {
    const size = positions === null ? page.left : positions.length;
    const problem = h("p", { class: "error", role: "alert" });
    const go = h("button", { type: "button", class: "danger", onclick: async () => {
      go.disabled = true;
      try {
        shown(await post(`pipelines/${part(name)}/redrive`, positions === null ? { confirm: true } : { confirm: true, positions }, signal));
        dialog.close();
      } catch (error) { problem.textContent = error.message; go.disabled = false; }
    } }, `Put ${count(size)} back`);
    const leave = h("button", { type: "button", onclick: () => dialog.close() }, "Cancel");
    dialog.replaceChildren(h("h1", null, `Put ${several(size, "dead letter")} back into the queue?`),
      h("p", null, "Each is appended once at the end of the queue and processed again. A record that still does not decode becomes a new dead letter."), problem, h("p", null, go, " ", leave));
    dialog.showModal();
    leave.focus();
  };
  const shown = (one) => {
    show(job, progress(one));
    if (one.state !== "running") { speak(`redrive ${one.state}`); chosen.clear(); read(null); }
  };
  on(["redrive"], (one) => { if (one.pipeline === name) shown(one); }, signal);
  get(`pipelines/${part(name)}/redrive`, signal).then((found) => {
    if (found.length) show(job, h("p", { class: "quiet" }, `The last redrive, ${ago(found[0].started_ms)}: ${found[0].state}`));
  }, () => { /* the page already shows it if the console does not respond */ });
  read(null);
  const section = h("section", { class: "card" }, h("h2", null, "Dead letters"), fault, status, h("p", null, all, " ", some), job, rows, more);
  let seen = null;
  section.follow = (batches) => {
    const last = batches.findLast((line) => line.dead_letters > 0)?.id ?? -1;
    if (seen !== null && last !== seen && (page?.letters.length ?? 0) <= PAGE) read(null);
    seen = last;
  };
  return section;
}

function payload(letter) {
  const data = letter.bytes_b64 === null ? null : Uint8Array.from(atob(letter.bytes_b64), (one) => one.charCodeAt(0));
  if (data === null) return h("span", { class: "quiet" }, "not kept");
  const hex = [...data.subarray(0, HEX_MAX)].map((one) => one.toString(16).padStart(2, "0")).join(" ");
  return [letter.text === null ? null : h("code", { class: "payload" }, letter.text, letter.cut ? " …" : ""),
    h("details", null, h("summary", null, bytes(letter.size)), h("pre", null, hex, letter.size > Math.min(data.length, HEX_MAX) ? " …" : ""))];
}

function progress(one) {
  const result = Object.entries(one.result ?? {}).filter(([, value]) => typeof value === "number").map(([key, value]) => `${key.replaceAll("_", " ")} ${count(value)}`).join(", ");
  const kind = { done: "ready", failed: "failed" }[one.state] ?? "running";
  return h("div", { class: one.state === "failed" ? "card bad" : "card" }, h("h3", null, `Redrive ${one.id} `, badge(kind, one.state)),
    one.state === "done" ? h("p", null, result || "nothing to report") : null, one.error ? h("pre", { class: "error" }, one.error) : null,
    one.lines.length ? h("pre", null, one.lines.slice(-6).join("\n")) : null);
}
