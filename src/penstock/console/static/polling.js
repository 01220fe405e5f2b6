// Polling for pages that are shown, and the display of failures.

import { get, Refused } from "./api.js";
import { h } from "./dom.js";

const FINAL = new Set([400, 404]);

/**
 * Read `address()` now and every `everyMs`, until `signal` aborts. `draw(value)` receives each result.
 * When a read fails, the last drawing stays and `fault` shows the error. Polling ends with an error that a retry
 * cannot change. Return a function that reads immediately.
 */
export function poll(address, everyMs, draw, { signal, fault }) {
  let timer = null;
  let turn = 0;
  const again = async () => {
    clearTimeout(timer);
    const mine = ++turn;
    try {
      const value = await get(address(), signal);
      if (signal.aborted || mine !== turn) return;
      fault.replaceChildren();
      draw(value);
    } catch (error) {
      if (signal.aborted || mine !== turn) return;
      fault.replaceChildren(note(error));
      if (error instanceof Refused && FINAL.has(error.status)) return;
    }
    timer = setTimeout(again, document.hidden ? everyMs * 5 : everyMs);
  };
  signal.addEventListener("abort", () => clearTimeout(timer));
  document.addEventListener("visibilitychange", () => { if (!document.hidden) again(); }, { signal });
  again();
  return again;
}

/** Return a paragraph with an error. */
export function note(error) {
  return h("p", { class: "error", role: "status" }, `Not available: ${error.message}`);
}

/** Return an element for errors, to put above the content that they concern. */
export function faults() {
  return h("div", null);
}
