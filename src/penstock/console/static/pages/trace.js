// The path of a record.

import { get, query } from "../api.js";
import { badge, empty, facts, h, show } from "../dom.js";
import { day } from "../format.js";
import { faults, note } from "../polling.js";

const WAYS = {
  topic: ["A record of a topic", [["topic", "Topic"], ["seq", "Sequence"]]],
  buffer: ["A record of a queue", [["buffer", "Queue"], ["sequence", "Sequence of its batch"], ["index", "Index in the batch (optional)"], ["shard", "Shard (optional)"]]],
  id: ["A batch", [["id", "Its id or location"]]],
  pipeline: ["A micro-batch", [["pipeline", "Pipeline"], ["batch", "Number"]]],
};
const OPTIONAL = new Set(["index", "shard"]);
const STAGES = { topic: "Topic", log: "Log", relay: "Relay", buffer: "Queue", batch: "Batch", pipeline: "Pipeline", microbatch: "Micro-batch", table: "Table", database: "Database", dead_letter: "Dead letter" };

export async function render(stage, { signal, search }) {
  const fault = faults();
  const out = h("div", { role: "status" });
  const given = Object.fromEntries(search);
  let way = Object.keys(WAYS).find((one) => one in given) ?? "topic";
  const pick = h("select", { id: "way" }, Object.entries(WAYS).map(([key, [title]]) => h("option", { value: key, selected: key === way }, title)));
  const inputs = h("div", { class: "row" });
  const draw = () => inputs.replaceChildren(...WAYS[way][1].map(([field, title]) => h("div", null, h("label", { for: field }, title),
    h("input", { id: field, name: field, value: given[field] ?? "", required: !OPTIONAL.has(field), autocomplete: "off" }))));
  pick.addEventListener("change", () => { way = pick.value; draw(); });
  const form = h("form", { onsubmit: (event) => {
    event.preventDefault();
    const search = query(Object.fromEntries(new FormData(form)));
    if (location.hash === `#/trace${search}`) ask(search);
    else location.hash = `#/trace${search}`;
  } }, h("label", { for: "way" }, "What"), pick, inputs, h("p", null, h("button", { class: "primary" }, "Find")));
  const ask = async (request) => {
    show(out, h("p", { class: "quiet" }, "Searching …"));
    try {
      const found = await get(`trace${request}`, signal);
      fault.replaceChildren();
      show(out, h("div", { class: "card" }, h("h2", null, found.text), h("ol", { class: "steps" }, found.steps.map(step))));
    } catch (error) {
      if (signal.aborted) return;
      show(out);
      fault.replaceChildren(note(error));
    }
  };
  stage.append(h("h1", null, "Trace"), h("div", { class: "card" }, form), fault, out);
  draw();
  if (Object.keys(given).length) ask(query(given));
  else show(out, empty("The path of a record from its topic to its table. The live tail of a topic, the list of a queue's batches and the list of a pipeline's micro-batches link to this page."));
}

function step(one) {
  const detail = Object.entries(one.detail ?? {}).filter(([, value]) => value !== null && value !== undefined && value !== false);
  return h("li", { class: one.state }, h("h3", null, STAGES[one.stage] ?? one.stage, " ", badge(one.state)), h("p", null, one.text),
    one.at_ms ? h("p", { class: "quiet" }, day(one.at_ms)) : null,
    detail.length ? facts(detail.map(([name, value]) => [name.replaceAll("_", " "), h("code", null, typeof value === "object" ? JSON.stringify(value) : String(value))]), "wide") : null);
}
