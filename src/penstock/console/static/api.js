// Calls to the console's own API, and its streams. A key lives in this tab's session storage and in no address.

const BASE = "/console/api/";
const KEY = "penstock-console-key";

export class Refused extends Error {
  /** `asksKey`: whether a key would open what was refused. */
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
  let text = `the console answered ${answer.status}`;
  try {
    const body = await answer.json();
    const error = body.error;
    code = error?.code ?? body.errorType ?? code;
    text = error?.message ?? body.message ?? (typeof error === "string" ? error : text);
  } catch { /* not JSON: the status has to do */ }
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

/** A query of what is set. */
export function query(fields) {
  const found = new URLSearchParams();
  for (const [name, value] of Object.entries(fields)) {
    if (value !== null && value !== undefined && value !== "") found.set(name, value);
  }
  const text = found.toString();
  return text ? `?${text}` : "";
}

/** A read that fails when nothing comes for so long; 0 waits for ever. */
function heard(reader, silentMs) {
  if (!silentMs) return reader.read();
  let timer = null;
  const silence = new Promise((_, failed) => { timer = setTimeout(() => failed(new Error("nothing was heard for long")), silentMs); });
  return Promise.race([reader.read(), silence]).finally(() => clearTimeout(timer));
}

/** The events of one answer, as {id, event, data}. Ends with the answer. */
async function* events(answer, silentMs) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await heard(reader, silentMs);
      if (done) return;
      const frames = (rest + value).split("\n\n");
      rest = frames.pop();
      yield* frames.map(parsed);
    }
  } finally {
    reader.cancel().catch(() => { /* it is over already */ });
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

/** Wait so long, or until `signal` ends it. */
function rest(ms, signal) {
  return new Promise((done) => {
    const over = () => { clearTimeout(timer); signal.removeEventListener("abort", over); done(); };
    const timer = setTimeout(over, ms);
    signal.addEventListener("abort", over);
  });
}

/** Wait until somebody sees the page, or `signal` ends it. */
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

/** What ends one connection: `signal`, or that nobody sees the page any more. */
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
 * Follow a stream until `signal` ends it, over lost connections: it goes on behind the last id it has seen.
 * While nobody sees the page there is no connection. `address(after)` is the path to read on from.
 * `tell(event, data, id)` gets each event, `state(word, text)` gets `live`, `waiting` or `refused`.
 * A stream that says something now and then is taken for lost after `silentMs`. The wait between two tries
 * is doubled until a connection stands for longer than the longest wait.
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
      for await (const heard of events(answer, silentMs)) {
        if (one.signal.aborted) break;
        if (heard.id !== null) last = heard.id;
        if (heard.data !== "") tell(heard.event, JSON.parse(heard.data), heard.id);
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
    await rest(wait * (0.5 + Math.random() / 2), signal);
    wait = Math.min(wait * 2, WAIT_MAX_MS);
  }
}
