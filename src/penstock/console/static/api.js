// Calls to the console's API, and its streams. A key is stored only in this tab's session storage, never in a URL.

const BASE = "/console/api/";
const KEY = "penstock-console-key";

export class Refused extends Error {
  /** `asksKey` says whether a key would allow the request. */
  constructor(status, code, message, asksKey = false) {
    super(message);
    this.status = status;
    this.code = code;
    this.asksKey = asksKey;
  }
}

export function keep(key) {
  if (key) sessionStorage.setItem(KEY, key);
  else sessionStorage.removeItem(KEY);
}

function headers(extra) {
  const key = sessionStorage.getItem(KEY);
  return key ? { ...extra, authorization: `Bearer ${key}` } : { ...extra };
}

async function refusal(answer) {
  let code = "unavailable";
  let text = `the console responded with ${answer.status}`;
  try {
    const body = await answer.json();
    const error = body.error;
    code = error?.code ?? body.errorType ?? code;
    text = error?.message ?? body.message ?? (typeof error === "string" ? error : text);
  } catch { /* not JSON: only the status is known */ }
  return new Refused(answer.status, code, text, answer.headers.has("www-authenticate"));
}

async function call(path, options) {
  const answer = await fetch(BASE + path, { credentials: "same-origin", cache: "no-store", ...options });
  if (!answer.ok) throw await refusal(answer);
  return answer.status === 204 ? null : answer.json();
}

export function get(path, signal) {
  return call(path, { headers: headers(), signal });
}

export function post(path, body, signal) {
  return call(path, {
    method: "POST", headers: headers({ "content-type": "application/json" }), body: JSON.stringify(body), signal,
  });
}

/** One path segment. */
export const part = encodeURIComponent;

/** Return a query string of the fields that have a value. */
export function query(fields) {
  const found = new URLSearchParams();
  for (const [name, value] of Object.entries(fields)) {
    if (value !== null && value !== undefined && value !== "") found.set(name, value);
  }
  const text = found.toString();
  return text ? `?${text}` : "";
}

/** Read a chunk. Fail after `silentMs` without data; 0 means no limit. */
function readChunk(reader, silentMs) {
  if (!silentMs) return reader.read();
  let timer = null;
  const silence = new Promise((_, failed) => { timer = setTimeout(() => failed(new Error("no data was received for too long")), silentMs); });
  return Promise.race([reader.read(), silence]).finally(() => clearTimeout(timer));
}

/** Yield the events of one response as {id, event, data}, until the response ends. */
async function* events(answer, silentMs) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await readChunk(reader, silentMs);
      if (done) return;
      const frames = (rest + value).split("\n\n");
      rest = frames.pop();
      yield* frames.map(parsed);
    }
  } finally {
    reader.cancel().catch(() => { /* it has already ended */ });
  }
}

function parsed(frame) {
  const one = { id: null, event: "message", data: [] };
  for (const line of frame.split("\n")) {
    const cut = line.indexOf(":");
    if (cut <= 0) continue;
    const field = line.slice(0, cut);
    const text = line.slice(cut + 1).replace(/^ /, "");
    if (field === "data") one.data.push(text);
    else if (field === "id" || field === "event") one[field] = text;
  }
  return { ...one, data: one.data.join("\n") };
}

/** Wait for `ms`, or until `signal` aborts. */
function pause(ms, signal) {
  return new Promise((done) => {
    const over = () => { clearTimeout(timer); signal.removeEventListener("abort", over); done(); };
    const timer = setTimeout(over, ms);
    signal.addEventListener("abort", over);
  });
}

/** Wait until the page is visible, or `signal` aborts. */
function shown(signal) {
  return new Promise((done) => {
    const look = () => {
      if (document.hidden && !signal.aborted) return;
      document.removeEventListener("visibilitychange", look);
      signal.removeEventListener("abort", look);
      done();
    };
    document.addEventListener("visibilitychange", look);
    signal.addEventListener("abort", look);
    look();
  });
}

/** Return a signal that aborts with `signal`, or when the page is hidden. */
function attended(signal) {
  const ended = new AbortController();
  const look = () => { if (document.hidden || signal.aborted) ended.abort(); };
  document.addEventListener("visibilitychange", look);
  signal.addEventListener("abort", look);
  look();
  return {
    signal: ended.signal,
    done: () => { document.removeEventListener("visibilitychange", look); signal.removeEventListener("abort", look); },
  };
}

const WAIT_MS = 500;
const WAIT_MAX_MS = 8000;

/**
 * Follow a stream until `signal` aborts. After a lost connection it continues after the last received id.
 * There is no connection while the page is hidden. `address(after)` returns the path to continue from.
 * `tell(event, data, id)` receives each event, and `state(word, text)` receives `live`, `waiting` or `refused`.
 * A connection is considered lost after `silentMs` without data. The wait between two attempts doubles, until
 * a connection lasts longer than the longest wait.
 */
export async function follow(address, { signal, tell, state, after = null, silentMs = 0 }) {
  let last = after;
  let wait = WAIT_MS;
  for (;;) {
    await shown(signal);
    if (signal.aborted) return;
    const one = attended(signal);
    const began = performance.now();
    try {
      const answer = await fetch(BASE + address(last), {
        credentials: "same-origin", cache: "no-store", headers: headers({ accept: "text/event-stream" }), signal: one.signal,
      });
      if (!answer.ok) throw await refusal(answer);
      state?.("live", "");
      for await (const found of events(answer, silentMs)) {
        if (one.signal.aborted) break;
        if (found.id !== null) last = found.id;
        if (found.data !== "") tell(found.event, JSON.parse(found.data), found.id);
      }
      if (!one.signal.aborted) state?.("waiting", "the connection ended");
    } catch (error) {
      if (signal.aborted) return;
      if (error instanceof Refused && error.status < 500 && error.status !== 429) {
        state?.("refused", error.message, error);
        return;
      }
      if (!one.signal.aborted) state?.("waiting", error.message);
    } finally { one.done(); }
    if (one.signal.aborted) continue;
    if (performance.now() - began > WAIT_MAX_MS) wait = WAIT_MS;
    await pause(wait * (0.5 + Math.random() / 2), signal);
    wait = Math.min(wait * 2, WAIT_MAX_MS);
  }
}
