// The state of the whole page: the last overview, the log, and the connection.

import { follow } from "./api.js";

const LINES_MAX = 500;
const SILENT_MS = 30_000;

class Live extends EventTarget {
  overview = null;
  lines = [];
  link = "waiting";
  gaps = 0;
  jobs = new Map();
  #stop = null;
  #isHeld = false;

  start() {
    this.#stop?.abort();
    this.#stop = new AbortController();
    return follow((after) => (after === null ? "live" : `live?after=${after}`), {
      signal: this.#stop.signal,
      silentMs: SILENT_MS,
      tell: (event, data) => this.#receive(event, data),
      state: (word, text, error) => this.#linked(word, text, error),
    });
  }

  stop() {
    this.#stop?.abort();
  }

  part(name) {
    return this.overview?.parts.find((one) => one.name === name) ?? null;
  }

  #receive(event, data) {
    if (event === "overview") {
      this.overview = data;
      if (this.#isHeld) this.#say("live", "");
    } else if (event === "part" && this.overview) {
      const before = this.part(data.name);
      const rest = this.overview.parts.filter((one) => one.name !== data.name);
      this.overview = { ...this.overview, parts: before ? this.overview.parts.map((one) => (one === before ? data : one)) : [...rest, data] };
    } else if (event === "log") {
      this.lines.push(data);
      if (this.lines.length > LINES_MAX) this.lines.splice(0, this.lines.length - LINES_MAX);
    } else if (event === "gap") this.gaps += 1;
    this.dispatchEvent(new CustomEvent(event, { detail: data }));
  }

  /** Report a connection as live only after it has delivered the current state. Until then the page is out of date. */
  #linked(word, text, error) {
    if (word === "live") this.#isHeld = true;
    else this.#say(word, text, error);
  }

  #say(word, text, error) {
    this.#isHeld = false;
    this.link = word;
    this.dispatchEvent(new CustomEvent("link", { detail: { word, text, error } }));
  }
}

export const live = new Live();

/** Call `draw` at every event with one of these names, until `signal` aborts. */
export function on(names, draw, signal) {
  for (const name of names) live.addEventListener(name, (event) => draw(event.detail), { signal });
}
