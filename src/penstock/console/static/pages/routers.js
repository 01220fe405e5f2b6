// Routers, which copy records from one topic into another, as a graph and a table.

import { part } from "../api.js";
import { badge, crumbs, empty, h, show, svg, table } from "../dom.js";
import { brief, count } from "../format.js";
import { cut, graph } from "../graph.js";
import { ranks } from "../layers.js";
import { poll } from "../polling.js";

const SIZES = { wide: 170, high: 36, gapX: 130, gapY: 28 };
const DEEP_MAX = 20;
const LABEL = "Topics connected by routers; the table below has the same data";

/** Draw the routers every three seconds. */
export function routers(body, { signal, fault }) {
  const picture = h("div", { class: "card scroll", tabindex: "0", role: "region", "aria-label": "Routers as a graph" });
  const rows = h("div", null);
  body.append(crumbs("topics", "All topics", "routers"), picture, rows);
  poll(() => "routers", 3000, (found) => {
    show(picture, found.edges.length ? drawing(found) : empty("There are no routers. ", h("code", null, "penstock topics router put"), " creates one."));
    show(rows, found.edges.length ? listing(found) : []);
  }, { signal, fault });
}

function listing(found) {
  return table("Routers", ["router", "from", "to", "filter", "copied", "state"], found.edges.map((edge) => [
    edge.id, link(edge.from), link(edge.to), edge.filter ?? "all", count(edge.copied), edge.state === null ? badge("unknown", "not known") : badge(edge.state)]));
}

const link = (name) => h("a", { href: `#/topics/topic/${part(name)}` }, name);

function drawing(found) {
  const rank = ranks(found.nodes, found.edges, DEEP_MAX);
  return graph(found.nodes, found.edges, (node) => rank.get(node.id), SIZES, { box, text, label: LABEL });
}

function text(edge) {
  return { kind: "", lines: [cut(edge.filter ?? "all", 20), `${brief(edge.copied)} copied`], title: `${edge.id}: ${edge.filter ?? "all"}, ${count(edge.copied)} copied` };
}

function box(node, { x, y }) {
  return svg("a", { href: `#/topics/topic/${part(node.id)}`, "aria-label": `topic ${node.id}` }, svg("title", null, node.id),
    svg("rect", { class: "box ready", x, y, width: SIZES.wide, height: SIZES.high, rx: 8 }), svg("text", { x: x + 10, y: y + 22 }, cut(node.id, 22)));
}
