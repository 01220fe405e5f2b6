// The log stream of all parts, with a filter.

import { h } from "../dom.js";
import { when } from "../format.js";
import { live, on } from "../live.js";

const SHOWN_MAX = 500;
const LEVELS = ["debug", "info", "warning", "error"];

export async function render(stage, { signal, search }) {
  const text = h("input", { type: "search", id: "find", placeholder: "part or text", value: search.get("find") ?? "" });
  const level = h("select", { id: "level" }, LEVELS.map((name) => h("option", { value: name, selected: name === "info" }, name)));
  const list = h("div", { class: "log", role: "log", tabindex: "0", "aria-label": "Log", "aria-live": "off", "data-empty": "No line matches." });
  stage.append(h("h1", null, "Log"), h("form", { class: "row", onsubmit: (event) => event.preventDefault() },
    h("div", null, h("label", { for: "find" }, "Find"), text), h("div", { class: "slim" }, h("label", { for: "level" }, "From level"), level)), list);

  const fits = (line) => LEVELS.indexOf(line.level) >= LEVELS.indexOf(level.value)
    && `${line.part} ${line.text}`.toLowerCase().includes(text.value.toLowerCase());
  const row = (line) => h("div", { class: line.level }, `${when(line.at_ms)} `, h("span", { class: "part" }, line.part), ` ${line.text}${line.cut ? " …" : ""}`);
  const atEnd = () => list.scrollHeight - list.scrollTop - list.clientHeight < 40;
  const all = () => { list.replaceChildren(...live.lines.filter(fits).map(row)); list.scrollTop = list.scrollHeight; };
  on(["log"], (line) => {
    if (!fits(line)) return;
    const follow = atEnd();
    list.append(row(line));
    while (list.childElementCount > SHOWN_MAX) list.firstElementChild.remove();
    if (follow) list.scrollTop = list.scrollHeight;
  }, signal);
  text.addEventListener("input", all);
  level.addEventListener("change", all);
  all();
}
