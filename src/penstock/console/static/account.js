// The balance of one chain: the produced records, and where they are.

import { badge, h } from "./dom.js";
import { ago, count } from "./format.js";

const WHERE = ["delivered", "dead_lettered", "dropped", "skipped", "in_flight"];

function verdict(balances) {
  if (balances === null) return badge("unknown", "not known");
  return balances ? badge("balances") : badge("error", "does not balance");
}

function term(sign, value, name) {
  return h("span", { class: "term" }, sign ? h("span", { class: "sign" }, sign) : null,
    h("span", null, h("span", { class: "figure" }, count(value)), h("span", { class: "quiet" }, name.replaceAll("_", " "))));
}

/** A card for one line of the balance. */
export function account(line) {
  return h("div", { class: line.balances === false ? "card bad" : "card" },
    h("h3", null, line.chain, " ", verdict(line.balances)),
    h("p", { class: "sum" }, term(null, line.produced, "produced"), WHERE.map((name, number) => term(number ? "+" : "=", line[name], name))),
    h("p", { class: "quiet" }, `From ${line.source}, ${line.as_of_ms ? `as of ${ago(line.as_of_ms)}` : "not audited yet"}.`),
    line.error ? h("p", { class: "error" }, line.error) : null,
    line.findings.map((text) => h("p", { class: "error" }, text)));
}
