// The data flow: its nodes and edges, with rates and lags, and the balance of the pipelines.

import { account } from "../account.js";
import { badge, empty, facts, h, perFrame, show, svg, table } from "../dom.js";
import { ago, brief, bytes, rate, seconds, several } from "../format.js";
import { cut, graph } from "../graph.js";
import { live, on } from "../live.js";

const COLUMNS = { clients: 0, topics: 1, collector: 1, quiver: 2, queue: 3, pipeline: 4 };
const SIZES = { wide: 142, high: 46, gapX: 84, gapY: 34 };
const PAGE_OF = { topics: "topics", collector: "quiver", quiver: "quiver", queue: "buffer", pipeline: "pipelines", timeseries: "databases", vector: "databases" };
const LABEL = "Parts and stores, connected by the paths of records; the table of edges below has the same data";
const UNITS = { batches: ["batch", "batches"], records: ["record", "records"], segments: ["segment", "segments"] };

export async function render(stage, { signal }) {
  const picture = h("div", { class: "card scroll", tabindex: "0", role: "region", "aria-label": "Flow" });
  const balance = h("section", { "aria-label": "Balance" });
  const parts = h("section", { "aria-label": "Parts" });
  const edges = h("section", { "aria-label": "Edges" });
  stage.append(h("h1", null, "Flow"), picture, h("h2", null, "Does it balance?"), balance, h("h2", null, "Parts"), parts, h("h2", null, "Edges"), edges);
  const draw = () => {
    const now = live.overview;
    if (!now) { show(picture, h("p", { class: "quiet" }, "Waiting for the first data …")); return; }
    show(picture, drawing(now.flow));
    show(balance, now.balance.length ? now.balance.map(account) : empty("No pipeline is part of this plan, so there is no balance. Add a pipeline with ", h("code", null, "pipelines:"), " in penstock.yaml."));
    show(parts, h("div", { class: "cards" }, now.parts.map(card)));
    show(edges, listing(now.flow));
  };
  on(["overview", "part"], perFrame(draw, signal), signal);
  draw();
}

function drawing(flow) {
  if (!flow.nodes.length) return empty("Nothing runs here yet.");
  return graph(flow.nodes, flow.edges, (node) => COLUMNS[node.kind] ?? 5, SIZES, { box, text, label: LABEL });
}

const kindOf = (node) => (node.kind === "clients" ? "senders" : node.kind);
const stateOf = (node) => node.state.replaceAll("_", " ");

function box(node, { x, y }) {
  const page = PAGE_OF[node.kind];
  const inside = [
    svg("title", null, `${node.label}: ${stateOf(node)}`),
    svg("rect", { class: `box ${node.state}`, x, y, width: SIZES.wide, height: SIZES.high, rx: 8 }),
    svg("text", { x: x + 10, y: y + 19 }, cut(node.label, 19)),
    svg("text", { class: "small", x: x + 10, y: y + 36 }, cut(`${kindOf(node)} · ${stateOf(node)}`, 24)),
  ];
  return page ? svg("a", { href: `#/${page}`, "aria-label": `${node.label}, ${kindOf(node)}, ${stateOf(node)}` }, inside) : svg("g", null, inside);
}

function waiting(edge) {
  return several(edge.backlog, ...(UNITS[edge.backlog_unit] ?? [edge.backlog_unit, edge.backlog_unit]));
}

const hasBytesAlone = (edge) => edge.rate_records_s === null && edge.rate_bytes_s !== null;

/** Return the rate in records, or in bytes if records are not counted. */
function speed(edge) {
  return hasBytesAlone(edge) ? `${bytes(edge.rate_bytes_s)}/s` : rate(edge.rate_records_s);
}

function text(edge) {
  const backlog = edge.backlog ? [waiting(edge), edge.lag_s === null ? null : `${seconds(edge.lag_s)} behind`] : [];
  const kind = edge.known ? ((edge.rate_records_s ?? edge.rate_bytes_s) > 0 ? "moving" : "") : "unknown";
  return {
    kind: edge.last_error ? `${kind} wrong` : kind,
    lines: edge.known ? [hasBytesAlone(edge) ? speed(edge) : edge.rate_records_s === null ? null : `${brief(edge.rate_records_s)}/s`, ...backlog] : ["not known"],
    title: `${edge.from} to ${edge.to}: ${speed(edge)}, waiting ${waiting(edge)}, lag ${seconds(edge.lag_s)}${edge.last_error ? `. ${edge.last_error}` : ""}`,
  };
}

function card(part) {
  const down = part.state === "failed" || part.state === "stopped";
  return h("div", { class: down ? "card bad" : "card" },
    h("h3", null, part.name, " ", badge(part.state)),
    facts([["kind", part.kind], ["since", part.since_ms ? ago(part.since_ms) : null], ["address", part.address], ["process", part.pid],
      ["restarts", part.restarts || null]].filter(([, value]) => value !== null && value !== undefined)),
    part.last_error ? h("p", { class: "error" }, part.last_error) : null,
    part.disabled_why ? h("p", { class: "quiet" }, "Disabled. To enable it: ", h("code", null, part.disabled_why)) : null);
}

function listing(flow) {
  const nodes = new Map(flow.nodes.map((node) => [node.id, node]));
  const end = (id) => {
    const node = nodes.get(id);
    return node ? [node.label, " ", h("span", { class: "quiet" }, kindOf(node))] : id;
  };
  return table("Edges of the flow", ["from", "to", "rate", "waiting", "lag", "last error"], flow.edges.map((edge) => [
    end(edge.from), end(edge.to),
    edge.known ? speed(edge) : badge("unknown", "not known"),
    edge.backlog === null ? null : waiting(edge), seconds(edge.lag_s),
    edge.last_error ? h("span", { class: "error" }, edge.last_error) : null,
  ]));
}
