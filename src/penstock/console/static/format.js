// Numbers for display. An unknown number is a dash, never zero. A number and its unit stay on one line.

const COUNT = new Intl.NumberFormat("en", { maximumFractionDigits: 1 });
const SHORT = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });
const SIZES = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
const JOIN = "\u00a0";

export const UNKNOWN = "–";

const missing = (value) => value === null || value === undefined || Number.isNaN(value);

export function count(value) {
  return missing(value) ? UNKNOWN : COUNT.format(value);
}

export function brief(value) {
  return missing(value) ? UNKNOWN : SHORT.format(value);
}

/** Return a count with its noun, which is singular for one. */
export function several(value, one, many = `${one}s`) {
  return missing(value) ? UNKNOWN : `${count(value)}${JOIN}${value === 1 ? one : many}`;
}

export function rate(value, unit = "records") {
  return missing(value) ? UNKNOWN : `${brief(value)}${JOIN}${unit}/s`;
}

export function bytes(value) {
  if (missing(value)) return UNKNOWN;
  let rest = value;
  let place = 0;
  while (rest >= 1024 && place < SIZES.length - 1) { rest /= 1024; place += 1; }
  return `${place ? rest.toFixed(1) : COUNT.format(rest)}${JOIN}${SIZES[place]}`;
}

export function seconds(value) {
  if (missing(value)) return UNKNOWN;
  if (value < 1) return `${Math.round(value * 1000)}${JOIN}ms`;
  if (value < 120) return `${value.toFixed(value < 10 ? 1 : 0)}${JOIN}s`;
  if (value < 7200) return `${Math.round(value / 60)}${JOIN}min`;
  if (value < 172800) return `${Math.round(value / 3600)}${JOIN}h`;
  return `${Math.round(value / 86400)}${JOIN}d`;
}

const two = (value) => String(value).padStart(2, "0");

export function when(ms) {
  if (missing(ms)) return UNKNOWN;
  const at = new Date(ms);
  return `${two(at.getHours())}:${two(at.getMinutes())}:${two(at.getSeconds())}`;
}

/** Return day and time, or only the time if it is today. */
export function day(ms, now = Date.now()) {
  if (missing(ms)) return UNKNOWN;
  const at = new Date(ms);
  if (at.toDateString() === new Date(now).toDateString()) return when(ms);
  return `${at.getFullYear()}-${two(at.getMonth() + 1)}-${two(at.getDate())}${JOIN}${when(ms)}`;
}

export function ago(ms, now = Date.now()) {
  const past = (now - ms) / 1000;
  return missing(ms) ? UNKNOWN : past < 1 ? "now" : `${seconds(past)}${JOIN}ago`;
}

/** Return the label of a moment on an axis with a mark every `step` seconds. */
export function mark(at, step) {
  const text = when(at * 1000);
  if (step >= 86400) return day(at * 1000, 0).slice(5, 10);
  return step >= 60 ? text.slice(0, 5) : text;
}
