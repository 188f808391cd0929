// Elements, controls and numbers. Strings become text, never markup.

const $ = (selector, inside = document) => inside.querySelector(selector);
const $$ = (selector, inside = document) => [...inside.querySelectorAll(selector)];

/** An element. `on…` are listeners, booleans are set or left out, the rest are attributes. */
function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (typeof value === "boolean") element[name] = value;
    else element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

const built = new WeakMap();

/** Builds what is in a slot only where the key has changed: so a reader keeps the focus. */
function keep(slot, key, build) {
  const text = JSON.stringify(key);
  if (built.get(slot) === text) return;
  built.set(slot, text);
  slot.replaceChildren(...build());
}

let groups = 0;

/** Radio buttons or check boxes; options are [value, text] and isOn says which are chosen. */
function group(legend, options, isOn, changed, type = "radio") {
  const name = `group-${++groups}`;
  const one = ([value, text]) => {
    const input = h("input", { type, name, value: String(value), checked: isOn(value) });
    input.addEventListener("change", () => changed(value, input.checked));
    return h("label", {}, input, h("span", {}, text));
  };
  const inside = h("div", { class: "options" }, ...options.map(one));
  return h("fieldset", { class: "group" }, h("legend", {}, legend), inside);
}

function select(label, options, value, changed) {
  const all = options.map(([v, text]) => h("option", { value: v, selected: v === value }, text));
  const element = h("select", {}, ...all);
  element.addEventListener("change", () => changed(element.value));
  return h("label", { class: "select" }, h("span", {}, label), element);
}

const button = (text, onclick, attributes = {}) =>
  h("button", { type: "button", onclick, ...attributes }, text);

/** A table of text: the first cell of a row is its heading. */
function grid(head, rows) {
  const line = ([first, ...rest]) =>
    h("tr", {}, h("th", { scope: "row" }, first), ...rest.map((cell) => h("td", {}, cell)));
  const top = h("tr", {}, ...head.map((text) => h("th", { scope: "col" }, text)));
  return h("table", { class: "small" }, h("thead", {}, top), h("tbody", {}, ...rows.map(line)));
}

/** A short line as it is drawn in the figure beside it. */
function swatch(colour, kind = "line") {
  const element = h("i", { class: `swatch ${kind}`, "aria-hidden": "true" });
  element.style.setProperty("--colour", colour);
  return element;
}

const unique = (list) => [...new Set(list)];
const among = (value, list) => (list.includes(value) ? value : list[0]);

const digits = (value, n = 2) => (value == null ? "" : value.toFixed(n).replace("-", "\u2212"));
const percent = (value) => (value == null ? "" : `${digits(value)} %`);
const withSpread = (mean, spread) =>
  spread == null ? digits(mean) : `${digits(mean)} ± ${digits(spread)}`;

/** 40.8 M, 1.81 G. */
function large(count) {
  if (count == null) return "";
  const [unit, letter] = [
    [1e9, "G"],
    [1e6, "M"],
    [1e3, "k"],
  ].find(([u]) => count >= u) ?? [1, ""];
  return `${Number((count / unit).toPrecision(3))} ${letter}`.trim();
}

const words = JSON.parse($("#names").textContent);
const say = (name) => (Object.hasOwn(words.names, name) ? words.names[name] : name);

/** "MS-SAR, scales=1,2" */
const recalibrated = (of) => say(of.recalibration) + (of.options ? `, ${of.options}` : "");

const ORDER = ["none", "se", "mssar"];
const rank = (of) => (ORDER.includes(of.recalibration) ? ORDER.indexOf(of.recalibration) : 3);
const byRank = (a, b) => rank(a) - rank(b) || a.options.localeCompare(b.options);

/** Whether this is the way a network comes, or one of its variants. */
const isPlain = (of, all) =>
  !of.options ||
  !all.some(
    (other) =>
      !other.options &&
      ["network", "recalibration", "dataset"].every((key) => other[key] === of[key]),
  );
