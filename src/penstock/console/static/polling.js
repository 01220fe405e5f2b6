// Pages that read something again and again while they are shown, and say so when that fails.

import { get, Refused } from "./api.js";
import { h } from "./dom.js";

const FINAL = new Set([400, 404]);

/**
 * Read `address()` now and every `everyMs`, until `signal` ends it. `draw(value)` gets each answer.
 * What was drawn stays when a reading fails; the fault stands above it. Reading ends
 * with an answer that asking again will not change. Gives a function that reads at once.
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

/** A fault as a paragraph. */
export function note(error) {
  return h("p", { class: "error", role: "status" }, `Not known now: ${error.message}`);
}

/** A place for faults, to stand above what they concern. */
export function faults() {
  return h("div", null);
}
