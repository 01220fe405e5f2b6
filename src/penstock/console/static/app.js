// The frame of the page: session, navigation, keys, and the state of the connection.

import { get, keep, post, Refused } from "./api.js";
import { h, speak } from "./dom.js";
import { live, on } from "./live.js";

const PAGES = [
  ["flow", "Flow"], ["buffer", "Buffer"], ["topics", "Topics"], ["quiver", "Quiver"],
  ["pipelines", "Pipelines"], ["databases", "Databases"], ["trace", "Trace"], ["log", "Log"],
];
const THEME = "penstock-console-theme";
const main = document.getElementById("main");
const dialog = document.getElementById("dialog");
const banner = document.getElementById("banner");
let leaving = null;

// --- pages

/** Decode a segment of the address. Return it unchanged if it is not valid. */
function segment(text) {
  try { return decodeURIComponent(text); } catch { return text; }
}

function place() {
  const [path, search = ""] = location.hash.replace(/^#\/?/, "").split("?");
  const [page, ...rest] = path.split("/").map(segment);
  const known = PAGES.some(([name]) => name === page) ? page : "flow";
  return { page: known, names: rest, search: new URLSearchParams(search) };
}

async function go() {
  if (location.hash === "#main") { main.focus(); return; }
  const here = place();
  leaving?.abort();
  leaving = new AbortController();
  const { signal } = leaving;
  for (const link of document.querySelectorAll("#pages a")) {
    if (link.dataset.page === here.page) { link.setAttribute("aria-current", "page"); link.scrollIntoView({ block: "nearest", inline: "center" }); }
    else link.removeAttribute("aria-current");
  }
  const title = PAGES.find(([name]) => name === here.page)[1];
  document.title = `${title} · Penstock`;
  main.replaceChildren(h("p", { class: "quiet" }, "Loading …"));
  try {
    const module = await import(`./pages/${here.page}.js`);
    if (signal.aborted) return;
    const stage = h("div", { class: `page page-${here.page}` });
    main.replaceChildren(stage);
    await module.render(stage, { ...here, signal });
  } catch (error) {
    if (signal.aborted) return;
    fault(error);
  }
}

function fault(error) {
  if (error instanceof Refused && error.status === 401) { ask(error.message); return; }
  main.replaceChildren(h("h1", null, "This page could not be shown"), h("p", { class: "error" }, error.message),
    h("button", { type: "button", onclick: go }, "Try again"));
}

// --- session

async function begin() {
  const token = /^#token=([\w-]+)$/.exec(location.hash)?.[1];
  if (token) history.replaceState(null, "", "/console#/flow");
  let spent = null;
  try {
    if (token) await post("session", { token }).catch((error) => { if (!refused(error)) throw error; spent = error; });
    live.overview = await get("overview"); // a browser that opens the address again already has a session
  } catch (error) {
    if (refused(error)) { ask((spent ?? error).message); return; }
  }
  enterPages();
}

function enterPages() {
  compare();
  live.start();
  go();
}

const refused = (error) => error instanceof Refused && (error.status === 401 || error.status === 403);

/** Sign in with a key, a token, or the whole printed address with its token. Throw if it is not accepted. */
async function enter(text) {
  const token = /(?:^|#token=)([\w-]{20,})$/.exec(text)?.[1];
  if (!text.includes("#token=")) {
    keep(text);
    try { live.overview = await get("overview"); return; } catch (error) {
      keep(null);
      if (!refused(error) || error.asksKey || !token) throw error;
    }
  }
  await post("session", { token: token ?? "" });
  live.overview = await get("overview");
}

function ask(why) {
  live.stop();
  leaving?.abort();
  main.replaceChildren(h("h1", null, "Not open"), h("p", null, why), h("button", { type: "button", onclick: () => ask(why) }, "Enter a key"));
  const input = h("input", { type: "password", id: "key", autocomplete: "off", required: true });
  const problem = h("p", { class: "error", role: "alert" });
  const form = h("form", { class: "ask", onsubmit: async (event) => {
    event.preventDefault();
    try { await enter(input.value.trim()); } catch (error) { problem.textContent = error.message; input.select(); return; }
    dialog.close();
    enterPages();
  } }, h("h1", null, "Sign in"), h("p", null, why),
  h("label", { for: "key" }, "Key, or the printed address"), input, problem,
  h("p", { class: "quiet" }, "A key is kept in this tab until the tab is closed, and is never part of an address."),
  h("button", { type: "submit", class: "primary" }, "Enter"));
  dialog.replaceChildren(form);
  if (!dialog.open) dialog.showModal();
  input.focus();
}

// --- connection

const GAP_SHOWN_MS = 8000;
const LINKS = { live: "live", waiting: "reconnecting …", refused: "refused" };
let gapUntil = 0;

function tell(text) {
  banner.hidden = !text;
  if (text) banner.textContent = text;
}

function linked({ word, text, error }) {
  const link = document.getElementById("link");
  link.textContent = LINKS[word];
  link.className = word;
  if (word !== "live") tell(`This page may be out of date: ${text}. Retrying automatically.`);
  else if (Date.now() >= gapUntil) tell("");
  if (word === "refused" && error) { tell(""); ask(error.message); }
}

on(["link"], linked);
on(["gap"], () => {
  gapUntil = Date.now() + GAP_SHOWN_MS;
  tell("The connection was lost for a long time: some log lines are missing. The state is current.");
  setTimeout(() => { if (live.link === "live") tell(""); }, GAP_SHOWN_MS);
});

const states = new Map();

/** Announce the parts whose state has changed. */
function compare() {
  for (const one of live.overview?.parts ?? []) {
    const before = states.get(one.name);
    if (before && before !== one.state) speak(`${one.name} is ${one.state.replaceAll("_", " ")}`);
    states.set(one.name, one.state);
  }
}

on(["part", "overview"], compare);

// --- theme, keys

function themed(theme) {
  if (theme === "auto") document.documentElement.removeAttribute("data-theme");
  else document.documentElement.setAttribute("data-theme", theme);
  document.getElementById("theme").textContent = `Theme: ${theme}`;
  dispatchEvent(new Event("themed"));
}

let theme = localStorage.getItem(THEME) ?? "auto";
themed(theme);
document.getElementById("theme").addEventListener("click", () => {
  theme = { auto: "dark", dark: "light", light: "auto" }[theme];
  localStorage.setItem(THEME, theme);
  themed(theme);
});

function help() {
  const keys = [["1 … 8", "the pages, in order"], ["/", "search or filter on this page"], ["r", "reload the data of this page"],
    ["t", "light, dark, or system theme"], ["?", "this list"], ["Esc", "close"]];
  dialog.replaceChildren(h("h1", null, "Keys"),
    h("dl", { class: "facts" }, keys.map(([key, what]) => [h("dt", null, h("kbd", null, key)), h("dd", null, what)])),
    h("form", { method: "dialog" }, h("button", null, "Close")));
  dialog.showModal();
}

document.getElementById("help").addEventListener("click", help);
addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || dialog.open) return;
  if (event.target.closest("input, textarea, select")) return;
  const number = Number(event.key);
  if (number >= 1 && number <= PAGES.length) location.hash = `#/${PAGES[number - 1][0]}`;
  else if (event.key === "/") { event.preventDefault(); main.querySelector("input[type=search], input, textarea")?.focus(); }
  else if (event.key === "r") go();
  else if (event.key === "t") document.getElementById("theme").click();
  else if (event.key === "?") help();
});

document.getElementById("pages").append(...PAGES.map(([name, title]) => h("a", { href: `#/${name}`, "data-page": name }, title)));
addEventListener("hashchange", go);
begin();
