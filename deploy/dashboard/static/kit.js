// Formats figures for people, and builds the DOM without markup: text from peers is always plain text. The live page and
// the pages of `shoal report` and `shoal simulate` share it.

export const byId = (id) => document.getElementById(id);

// A string in place of attributes is a class.
export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag), given = typeof attributes === "string" ? { class: attributes } : attributes;
  for (const [name, value] of Object.entries(given)) if (value) made.setAttribute(name, value);
  made.append(...children.filter((child) => child !== "").map((child) => (child instanceof Node ? child : String(child))));
  return made;
}

// Columns from `words` on hold sentences; the first `names` of each row are headings.
export function table(heads, rows, { words = heads.length, names = 0, ...attributes } = {}) {
  const kind = (index) => (index >= words ? "text" : "");
  const head = heads.map((text, index) => element("th", kind(index), text));
  const cell = (text, index) => element(index < names ? "th" : "td", { class: kind(index), "data-label": heads[index] }, text);
  const body = rows.map((row) => element("tr", {}, ...row.map(cell)));
  return element("table", attributes, element("thead", {}, element("tr", {}, ...head)), element("tbody", {}, ...body));
}

export function svg(tag, attributes = {}, text = "") {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text) made.textContent = text;
  return made;
}

// Rewriting equal text would cost a layout.
export function say(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

export function mark(node, name, value) {
  if (node.getAttribute(name) !== String(value)) node.setAttribute(name, value);
}

const PREFIXES = ["", "k", "M", "G", "T", "P", "E"];

export function compact(value, unit = "") {
  if (!Number.isFinite(value)) return "–";
  let power = 0;
  while (Math.abs(value) >= 999.5 && power < PREFIXES.length - 1) { value /= 1000; power += 1; }
  const digits = Math.abs(value) >= 100 || (power === 0 && Number.isInteger(value)) ? 0 : Math.abs(value) >= 10 ? 1 : 2;
  const prefix = PREFIXES[power];
  return unit ? `${value.toFixed(digits)} ${prefix}${unit}` : `${value.toFixed(digits)}${prefix}`;
}

export const loss = (value) => (value === null ? "–" : value.toFixed(3));
export const percent = (value) => `${value > 0 && value < 0.095 ? (100 * value).toFixed(1) : Math.round(100 * value)} %`;

export function duration(seconds) {
  const minutes = Math.round(seconds / 60), hours = Math.floor(minutes / 60), days = Math.floor(hours / 24);
  if (seconds < 90) return `${Math.round(seconds)} s`;
  if (hours < 1) return `${minutes} min`;
  if (days < 2) return `${hours} h ${minutes % 60} min`;
  return `${days} days ${hours % 24} h`;
}

export function ago(seconds) {
  return seconds < 5 ? "now" : `${duration(seconds)} ago`;
}

export const plural = (count, word) => `${count} ${word}${count === 1 ? "" : "s"}`;
