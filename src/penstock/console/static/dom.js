// Elements from plain calls. Text becomes text nodes and nothing else: no markup is ever parsed here.

const SVG = "http://www.w3.org/2000/svg";
const HIDDEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]/g;
const EXACT = new Set(["href", "value"]);

/** The text with its codes in place of characters that nobody sees, or that turn others around. */
export function visible(text) {
  return text.replace(HIDDEN, (one) => `\\u${one.charCodeAt(0).toString(16).padStart(4, "0")}`);
}

const absent = (value) => value === null || value === undefined || value === false;

function fill(node, props, children) {
  for (const [name, value] of Object.entries(props ?? {})) {
    if (absent(value)) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : EXACT.has(name) ? String(value) : visible(String(value)));
  }
  node.append(...children.flat(Infinity).filter((one) => !absent(one)).map(
    (one) => (one instanceof Node ? one : document.createTextNode(visible(String(one)))),
  ));
  return node;
}

/** An HTML element. Properties that begin with `on` are listeners, all others attributes. */
export function h(tag, props, ...children) {
  return fill(document.createElement(tag), props, children);
}

/** The same for SVG. */
export function svg(tag, props, ...children) {
  return fill(document.createElementNS(SVG, tag), props, children);
}

/**
 * Make an element's content this. Only what differs is touched, so that focus, selection and scrolling survive.
 * Content with listeners is put in with `replaceChildren` instead: listeners of what stays are not changed.
 */
export function show(node, ...children) {
  align(node, fill(document.createElement("div"), null, children));
  return node;
}

function align(node, draft) {
  const now = [...node.childNodes];
  const next = [...draft.childNodes];
  next.forEach((one, place) => { if (now[place]) settle(now[place], one); else node.append(one); });
  for (const one of now.slice(next.length)) one.remove();
}

function settle(node, draft) {
  if (node.isEqualNode(draft)) return;
  if (node.nodeName !== draft.nodeName) { node.replaceWith(draft); return; }
  if (node.nodeType === Node.TEXT_NODE) { node.data = draft.data; return; }
  for (const { name } of [...node.attributes]) if (!draft.hasAttribute(name)) node.removeAttribute(name);
  for (const { name, value } of draft.attributes) if (node.getAttribute(name) !== value) node.setAttribute(name, value);
  align(node, draft);
}

/** A table with a caption for readers that do not see it. Cells are nodes, text, or null for unknown. */
export function table(caption, heads, rows, props) {
  return h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption },
    h("table", props,
      h("caption", { class: "unseen" }, caption),
      h("thead", null, h("tr", null, heads.map((head) => h("th", { scope: "col" }, head)))),
      h("tbody", null, rows.map((cells) => h("tr", null, cells.map((cell) => h("td", null, cell ?? "–")))))));
}

/** A list of names and values; `kind` "wide" puts them beside each other. */
export function facts(pairs, kind = "") {
  return h("dl", { class: `facts ${kind}`.trim() },
    pairs.map(([name, value]) => h("div", null, h("dt", null, name), h("dd", null, value ?? "–"))));
}

/** One number with its name and a remark. */
export function figure(title, value, remark) {
  return h("div", { class: "card" }, h("h3", null, title), h("p", { class: "figure" }, value), remark ? h("p", { class: "quiet" }, remark) : null);
}

/** What the colours of a picture mean, from [class, text]. */
export function legend(pairs) {
  return h("ul", { class: "legend" }, pairs.map(([kind, text]) => h("li", null, h("span", { class: `chip ${kind}` }), text)));
}

/** A state as a word with a colour; the word is what counts. */
export function badge(state, text) {
  return h("span", { class: `badge ${state}` }, text ?? String(state).replaceAll("_", " "));
}

/** What to say where there is nothing to show, and what would change that. */
export function empty(...children) {
  return h("p", { class: "empty" }, children);
}

/** The way back to a list: `#/page`, its title, and the name of what is shown. */
export function crumbs(page, title, name) {
  return h("p", { class: "crumbs" }, h("a", { href: `#/${page}` }, title), ` / ${name}`);
}

/** `draw` as a function that may be called often: it draws once before the page is next shown, if `signal` has not ended. */
export function perFrame(draw, signal) {
  let isDue = false;
  return () => {
    if (isDue) return;
    isDue = true;
    requestAnimationFrame(() => { isDue = false; if (!signal.aborted) draw(); });
  };
}

/** Say something to those who listen instead of looking. */
export function speak(text) {
  document.getElementById("spoken").textContent = text;
}
