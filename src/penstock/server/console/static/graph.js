// Boxes joined by arrows, from left to right.

import { svg } from "./dom.js";
import { layered } from "./layers.js";

/**
 * A drawing of `nodes` ({id}) and `edges` ({from, to}), with `columnOf(node)` and sizes
 * `{wide, high, gapX, gapY}`. `box(node, spot)` and `text(edge)` give what stands in and on them:
 * `text` is `{kind, lines, title}`.
 */
export function graph(nodes, edges, columnOf, { wide, high, gapX, gapY }, { box, text, label }) {
  const { columns, ways } = layered(nodes, edges, columnOf);
  const tallest = Math.max(1, ...columns.map((ids) => ids.length));
  const spots = new Map();
  columns.forEach((ids, x) => ids.forEach((id, y) => {
    const free = (tallest - ids.length) / 2;
    spots.set(id, { x: 10 + x * (wide + gapX), y: 10 + (y + free) * (high + gapY) });
  }));
  const width = 20 + columns.length * wide + (columns.length - 1) * gapX;
  const height = 20 + tallest * high + (tallest - 1) * gapY;
  return svg("svg", { class: "picture", viewBox: `0 0 ${width} ${height}`, width, height, role: "group", "aria-label": label },
    head(),
    [...ways].map(([edge, way]) => line(way.map((id) => spots.get(id)), wide, high, text(edge))),
    nodes.map((node) => box(node, spots.get(node.id))),
    [...ways].map(([edge, way]) => words(way.map((id) => spots.get(id)), wide, high, text(edge))));
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

function line(spots, wide, high, { kind, title }) {
  const all = points(spots, wide, high);
  const curves = all.slice(1).map(([x, y], place) => {
    const [x0, y0] = all[place];
    return y === y0 ? `L${x},${y}` : `C${(x0 + x) / 2},${y0} ${(x0 + x) / 2},${y} ${x},${y}`;
  });
  return svg("path", { class: `edge ${kind}`.trim(), "marker-end": "url(#head)", d: `M${all[0].join(",")} ${curves.join(" ")}` }, svg("title", null, title));
}

function words(spots, wide, high, { kind, lines }) {
  const [[x0, y0], [x, y]] = points(spots, wide, high).slice(-2);
  const shown = lines.filter(Boolean);
  const middle = (y0 + y) / 2;
  return shown.map((one, place) => svg("text", { class: `small ${kind}`.trim(), x: (x0 + x) / 2, y: place ? middle + 2 + place * 12 : middle - 6, "text-anchor": "middle" }, one));
}

/** At most so many characters of a name. */
export function cut(text, most) {
  return text.length > most ? `${text.slice(0, most - 1)}…` : text;
}
