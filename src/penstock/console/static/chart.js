// Line charts over time, drawn by uPlot, which is loaded with the first chart, in the colours of the page.

import { h } from "./dom.js";
import { mark, when } from "./format.js";

let loading = null;

function load() {
  loading ??= new Promise((done, failed) => {
    document.head.append(h("link", { rel: "stylesheet", href: "/console/static/vendor/uPlot.min.css" }));
    const script = h("script", { src: "/console/static/vendor/uPlot.iife.min.js" });
    script.addEventListener("load", () => done(globalThis.uPlot));
    script.addEventListener("error", () => { loading = null; failed(new Error("the charts could not be loaded")); });
    document.head.append(script);
  });
  return loading;
}

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

/** Return a range from zero, or from the lowest value below it. A flat line gets space above it. */
function height(_, low, high) {
  const least = Math.min(0, low ?? 0);
  return [least, high > least ? high + (high - least) * 0.1 : least + 1];
}

/** Return the range of the times. A single moment gets a minute around it. */
function span(_, low, high) {
  return high > low ? [low, high] : [low - 30, high + 30];
}

/** Show the newest values in the legend while no pointer is over the chart. */
function newest(plot) {
  if (!(plot.cursor.left >= 0)) plot.setLegend({ idx: plot.data[0].length - 1 });
}

function options(found, holder, high) {
  const axis = { stroke: colour("--soft"), grid: { stroke: colour("--line"), width: 1 }, ticks: { stroke: colour("--line") } };
  const format = found.series[0]?.format ?? String;
  return {
    width: Math.max(200, holder.clientWidth || 400),
    height: high,
    padding: [8, 32, 0, 0],
    cursor: { drag: { x: false, y: false } },
    hooks: { ready: [newest] },
    scales: { x: { time: true, range: span }, y: { range: height } },
    axes: [
      { ...axis, space: 70, values: (_, ticks, __, ___, step) => ticks.map((at) => mark(at, step)) },
      { ...axis, size: 70, values: (_, ticks) => ticks.map(format) },
    ],
    series: [{ label: "time", value: (_, at) => when(at === null ? null : at * 1000) }, ...found.series.map((one, place) => ({
      label: one.label, stroke: colour(`--series-${(place % 6) + 1}`), width: 2, spanGaps: false,
      points: { show: found.times.length < 30 },
      value: (_, value) => (value === null || value === undefined ? "–" : (one.format ?? String)(value)),
    }))],
  };
}

/**
 * Return a chart of series over time. `read()` returns `{times: [ms], series: [{label, values, format?}]}`; null is a
 * gap. `element.draw()` reads again. The chart ends with `signal`.
 */
export function chart(title, read, signal, { height: high = 180, kind = "card", none = "No data yet: it is collected while the console is open." } = {}) {
  const holder = h("div", { class: "chart" });
  const spoken = h("p", { class: "unseen" });
  const figure = h("figure", { class: kind, "aria-label": title }, h("h2", null, title), holder, spoken);
  let plot = null;
  let shape = "";

  const clear = () => { plot?.destroy(); plot = null; shape = ""; holder.textContent = none; spoken.textContent = none; };

  figure.draw = async () => {
    const found = read();
    if (!found.series.some((one) => one.values.some((value) => value !== null && value !== undefined))) { clear(); return; }
    const uPlot = await load();
    if (signal.aborted) return;
    const data = [found.times.map((ms) => ms / 1000), ...found.series.map((one) => one.values)];
    const now = `${found.series.map((one) => one.label).join("|")}${found.times.length < 30}`;
    if (plot && now === shape) plot.setData(data);
    else {
      plot?.destroy();
      holder.textContent = "";
      plot = new uPlot(options(found, holder, high), data, holder);
      shape = now;
    }
    newest(plot);
    spoken.textContent = found.series.map((one) => {
      const last = one.values.findLast((value) => value !== null && value !== undefined);
      return `${one.label}: ${last === undefined ? "unknown" : (one.format ?? String)(last)}`;
    }).join(", ");
  };

  const again = () => { shape = ""; figure.draw(); };
  addEventListener("themed", again, { signal });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", again, { signal });
  const watcher = new ResizeObserver(() => plot?.setSize({ width: Math.max(200, holder.clientWidth), height: high }));
  watcher.observe(holder);
  signal.addEventListener("abort", () => { watcher.disconnect(); plot?.destroy(); });
  return figure;
}
