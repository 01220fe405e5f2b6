// Functions that create elements. Text becomes text nodes only: no markup is ever parsed here.

const SVG = "http://www.w3.org/2000/svg";
const HIDDEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]/g;
const EXACT = new Set(["href", "value"]);

/** Return the text with codes in place of characters that are invisible or change the text direction. */
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

/** Create an HTML element. Properties that begin with `on` are listeners, all others are attributes. */
export function h(tag, props, ...children) {
  return fill(document.createElement(tag), props, children);
}

/** Create an SVG element in the same way. */
export function svg(tag, props, ...children) {
  return fill(document.createElementNS(SVG, tag), props, children);
}

/**
 * Set an element's content. Only the differences are changed, so that focus, selection and scroll position remain.
 * Use `replaceChildren` for content with listeners: listeners of unchanged elements are not replaced here.
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

/** Create a table with a caption for screen readers. A cell is a node, text, or null for unknown. */
export function table(caption, heads, rows, props) {
  return h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption },
    h("table", props,
      h("caption", { class: "unseen" }, caption),
      h("thead", null, h("tr", null, heads.map((head) => h("th", { scope: "col" }, head)))),
      h("tbody", null, rows.map((cells) => h("tr", null, cells.map((cell) => h("td", null, cell ?? "–")))))));
}

/** Create a list of names and values. `kind` "wide" puts them side by side. */
export function facts(pairs, kind = "") {
  return h("dl", { class: `facts ${kind}`.trim() },
    pairs.map(([name, value]) => h("div", null, h("dt", null, name), h("dd", null, value ?? "–"))));
}

/** Create a card with a number, its name and a remark. */
export function figure(title, value, remark) {
  return h("div", { class: "card" }, h("h3", null, title), h("p", { class: "figure" }, value), remark ? h("p", { class: "quiet" }, remark) : null);
}

/** Create a legend of the colours of a picture, from [class, text]. */
export function legend(pairs) {
  return h("ul", { class: "legend" }, pairs.map(([kind, text]) => h("li", null, h("span", { class: `chip ${kind}` }), text)));
}

/** Create a badge: a state as a word with a colour. */
export function badge(state, text) {
  return h("span", { class: `badge ${state}` }, text ?? String(state).replaceAll("_", " "));
}

/** Create the text for an empty list, which says how to fill it. */
export function empty(...children) {
  return h("p", { class: "empty" }, children);
}

/** Create the path back to a list: `#/page`, its title, and the name of the current item. */
export function crumbs(page, title, name) {
  return h("p", { class: "crumbs" }, h("a", { href: `#/${page}` }, title), ` / ${name}`);
}

/** Return a function that calls `draw` at most once per frame, until `signal` aborts. */
export function perFrame(draw, signal) {
  let isDue = false;
  return () => {
    if (isDue) return;
    isDue = true;
    requestAnimationFrame(() => { isDue = false; if (!signal.aborted) draw(); });
  };
}

/** Announce a text to screen readers. */
export function speak(text) {
  document.getElementById("spoken").textContent = text;
}
