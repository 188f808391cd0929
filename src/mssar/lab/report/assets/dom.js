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

/** Where there is nothing to choose, what it is. */
const fact = (label, text) =>
  h("p", { class: "fact" }, h("span", {}, label), text instanceof Node ? text : String(text));

/** Radio buttons or check boxes; options are [value, text] and isOn says which are chosen. */
function group(legend, options, isOn, changed, type = "radio") {
  if (type === "radio" && options.length === 1) return fact(legend, options[0][1]);
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
  if (options.length === 1) return fact(label, options[0][1]);
  const all = options.map(([v, text]) => h("option", { value: v, selected: v === value }, text));
  const element = h("select", {}, ...all);
  element.addEventListener("change", () => changed(element.value));
  return h("label", { class: "select" }, h("span", {}, label), element);
}

const button = (text, onclick, attributes = {}) =>
  h("button", { type: "button", onclick, ...attributes }, text);

/** The layer's name stays on one line. */
const whole = (text) =>
  text.split(/(MS-SAR)/).map((part, i) => (i % 2 ? h("span", { class: "whole" }, part) : part));

/** A table of text: the first cell of a row is its heading. */
function grid(head, rows) {
  const line = ([first, ...rest]) =>
    h("tr", {}, h("th", { scope: "row" }, ...whole(first)), ...rest.map((cell) => h("td", {}, cell)));
  const top = h("tr", {}, ...head.map((text) => h("th", { scope: "col" }, text)));
  return h("table", { class: "small" }, h("thead", {}, top), h("tbody", {}, ...rows.map(line)));
}

/** A mark as it is in the figure beside it: a line, a dot or a ring. */
function swatch(colour, kind = "line") {
  const element = h("i", { class: `swatch ${kind}`, "aria-hidden": "true" });
  element.style.setProperty("--colour", colour);
  return element;
}

const SVG = "http://www.w3.org/2000/svg";

/** A short line with the dashes, in pixels, that it has in the figure; solid if there are none. */
function stroked(colour, dashes = [], width = 2) {
  const [svg, line] = ["svg", "line"].map((tag) => document.createElementNS(SVG, tag));
  const set = (element, of) => Object.entries(of).forEach(([k, v]) => element.setAttribute(k, v));
  set(svg, { width: 30, height: 6, "aria-hidden": "true", class: "stroked" });
  set(line, { x1: 0, x2: 30, y1: 3, y2: 3, stroke: colour, "stroke-width": width });
  if (dashes.length) line.setAttribute("stroke-dasharray", dashes.join(" "));
  svg.append(line);
  return svg;
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

/** A label with its names as people write them: "resnet20 mssar, seed 0" has MS-SAR in it. */
const named = (label) => label.replace(/(?<![\w=.-])\w+(?![\w=.-])/g, say);

/** "MS-SAR, scales=1,2" */
const recalibrated = (of) => say(of.recalibration) + (of.options ? `, ${of.options}` : "");

const ORDER = words.order; // of recalibrations
const rank = (of) =>
  ORDER.includes(of.recalibration) ? ORDER.indexOf(of.recalibration) : ORDER.length;
const byRank = (a, b) => rank(a) - rank(b) || a.options.localeCompare(b.options);

/** Whether this is the way a network comes, or one of its variants. */
const isPlain = (of, all) =>
  !of.options ||
  !all.some(
    (other) =>
      !other.options &&
      ["network", "recalibration", "dataset"].every((key) => other[key] === of[key]),
  );
