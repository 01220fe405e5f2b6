// Boxes joined by arrows, from left to right.

import { svg } from "./dom.js";
import { layered } from "./layers.js";

const ASIDE = 44;
const BELOW = 40;

/**
 * Draw `nodes` ({id}) and `edges` ({from, to}), with `columnOf(node)` and sizes `{wide, high, gapX, gapY}`.
 * `box(node, spot)` returns the drawing of a node, and `text(edge)` the label of an edge as `{kind, lines, title}`.
 * Backward edges run below all boxes. Several edges between the same two nodes are bent apart.
 */
export function graph(nodes, edges, columnOf, sizes, { box, text, label }) {
  const { wide, high, gapX, gapY } = sizes;
  const { columns, ways, back } = layered(nodes, edges, columnOf);
  const tallest = Math.max(1, ...columns.map((ids) => ids.length));
  const bends = aside([...ways.keys()]);
  const rim = 10 + Math.max(0, ...[...bends.values()].map((bend) => bend - high / 2));
  const spots = new Map();
  columns.forEach((ids, x) => ids.forEach((id, y) => {
    const free = (tallest - ids.length) / 2;
    spots.set(id, { x: 10 + x * (wide + gapX), y: rim + (y + free) * (high + gapY) });
  }));
  const width = 20 + columns.length * wide + (columns.length - 1) * gapX;
  const floor = 2 * rim + tallest * high + (tallest - 1) * gapY;
  const height = floor + back.length * BELOW;
  const lines = [
    ...[...ways].map(([edge, way]) => onward(way.map((id) => spots.get(id)), sizes, bends.get(edge), text(edge))),
    ...back.map((edge, place) => backward(spots.get(edge.from), spots.get(edge.to), sizes, floor + (place + 0.5) * BELOW, text(edge))),
  ];
  return svg("svg", { class: "picture", viewBox: `0 0 ${width} ${height}`, width, height, role: "group", "aria-label": label },
    head(), svg("g", null, lines.map((one) => one.line)), svg("g", null, nodes.map((node) => box(node, spots.get(node.id)))), svg("g", null, lines.map((one) => one.words)));
}

/** Return how far each edge is bent: Map(edge → distance). A single edge between two nodes is not bent. */
function aside(edges) {
  const groups = Map.groupBy(edges, (edge) => JSON.stringify([edge.from, edge.to]));
  return new Map([...groups.values()].flatMap((group) => group.map((edge, place) => [edge, (place - (group.length - 1) / 2) * ASIDE])));
}

function head() {
  return svg("defs", null, svg("marker", { id: "head", viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 8, markerHeight: 8, markerUnits: "userSpaceOnUse", orient: "auto" },
    svg("path", { d: "M0,0 L8,4 L0,8 z", class: "tip" })));
}

function points(spots, wide, high) {
  return spots.flatMap(({ x, y }, place) => {
    const middle = y + high / 2;
    const ends = [[x, middle], [x + wide, middle]];
    return place === 0 ? [ends[1]] : place === spots.length - 1 ? [ends[0]] : ends;
  });
}

/** Draw an edge to the right, with its label in the middle of its last section. */
function onward(spots, { wide, high }, bend, label) {
  const all = points(spots, wide, high);
  const curves = all.slice(1).map(([x, y], place) => {
    const [x0, y0] = all[place];
    const middle = (x0 + x) / 2;
    return y === y0 && !bend ? `L${x},${y}` : `C${middle},${y0 + bend} ${middle},${y + bend} ${x},${y}`;
  });
  const [[x0, y0], [x, y]] = all.slice(-2);
  return { line: line(`M${all[0].join(",")} ${curves.join(" ")}`, "", label), words: words((x0 + x) / 2, (y0 + y) / 2 + bend * 0.75, label) };
}

/** Draw a backward edge from the bottom of one box, down to `deep`, to the bottom of the other. */
function backward(from, to, { wide, high }, deep, label) {
  const [x0, y0] = [from.x + wide * 0.7, from.y + high];
  const [x, y] = [to.x + wide * 0.3, to.y + high];
  const middle = (x0 + x) / 2;
  const d = `M${x0},${y0} C${x0},${deep} ${x0},${deep} ${middle},${deep} S${x},${deep} ${x},${y}`;
  return { line: line(d, "back", label), words: words(middle, deep, label) };
}

function line(d, way, { kind, title }) {
  return svg("path", { class: ["edge", way, kind].filter(Boolean).join(" "), "marker-end": "url(#head)", d }, svg("title", null, title));
}

function words(x, y, { kind, lines }) {
  return lines.filter(Boolean).map((one, place) => svg("text", { class: `small ${kind}`.trim(), x, y: place ? y + 2 + place * 12 : y - 6, "text-anchor": "middle" }, one));
}

/** Return at most `most` characters of a name. */
export function cut(text, most) {
  return text.length > most ? `${text.slice(0, most - 1)}…` : text;
}
