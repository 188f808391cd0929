// Light and dark, news, and the beginning.

let page = JSON.parse($("#data").textContent);
let printing = false;

function showFigures() {
  showCurves();
  showPoints();
  showTimes();
  showMaps();
}

const dark = matchMedia("(prefers-color-scheme: dark)");
const theme = () => document.documentElement.dataset.theme ?? (dark.matches ? "dark" : "light");

function watchTheme() {
  const toggle = $("#theme");
  const label = () => {
    const symbol = h("span", { "aria-hidden": "true" }, theme() === "dark" ? "☀" : "☾");
    toggle.replaceChildren(symbol, theme() === "dark" ? " Light" : " Dark");
  };
  toggle.hidden = false;
  toggle.setAttribute("aria-label", "Change between light and dark");
  toggle.addEventListener("click", () => {
    const chosen = theme() === "dark" ? "light" : "dark";
    document.documentElement.dataset.theme = chosen;
    try {
      localStorage.setItem("mssar-theme", chosen);
    } catch {
      // Then it lasts as long as the page.
    }
    label();
    showFigures();
  });
  dark.addEventListener("change", () => (label(), showFigures()));
  label();
}

const PAPER = 680; // pixels, less than the width of a sheet

/** On paper it is light and narrow, and there is nothing to drag. */
function watchPrinter() {
  const root = document.documentElement;
  const charts = () => $$(".chart").flatMap((e) => echarts.getInstanceByDom(e) ?? []);
  let before;
  addEventListener("beforeprint", () => {
    if (printing) return;
    printing = true;
    before = root.dataset.theme;
    root.dataset.theme = "light";
    showFigures();
    charts().forEach((chart) => chart.resize({ width: Math.min(PAPER, chart.getWidth()) }));
  });
  addEventListener("afterprint", () => {
    if (!printing) return;
    printing = false;
    if (before === undefined) delete root.dataset.theme;
    else root.dataset.theme = before;
    charts().forEach((chart) => chart.resize({ width: "auto" }));
    showFigures();
  });
}

/** As in page.py. */
const when = (made) => made.replace("T", " ").replace(/(:\d\d)(\.\d+)?(Z|\+00:00)$/, " UTC");

/** Text with its `code` marked. */
const sentences = (text) =>
  text.split(/`(.+?)`/).map((part, i) => (i % 2 ? h("code", {}, part) : part));

/** As in page.py. */
function showProgress() {
  const rows = page.tables.filter((t) => t.name !== "others").flatMap((t) => t.rows);
  const done = rows.filter((row) => row.n > 0).length;
  if (page.kind !== "reproduction" || !rows.length) return $("#progress").replaceChildren();
  const bar = { "aria-labelledby": "so-far", max: rows.length, value: done };
  const text = `${done} of ${rows.length} results so far`;
  $("#progress").replaceChildren(h("progress", bar), h("span", { id: "so-far" }, text));
}

const EVERY = 3000; // milliseconds

let [last, tag] = [null, null]; // answer, and what the server calls it

/** The news, or nothing where there are none; fails where the server does. */
async function fetched() {
  const headers = tag ? { "If-None-Match": tag } : {};
  const answer = await fetch("data.json", { headers, cache: "no-store" });
  if (answer.status === 304) return null;
  if (!answer.ok) throw new Error(`data.json: ${answer.status}`);
  const text = await answer.text();
  if (text === last) return null;
  const fresh = JSON.parse(text);
  [last, tag] = [text, answer.headers.get("ETag")];
  return fresh;
}

/** A server that trains answers with the same data and new tables. */
function watchNews() {
  const status = $("#news");
  let at = null;
  let lost = false;
  const ask = async () => {
    if (document.hidden) return;
    let fresh = null;
    try {
      fresh = await fetched();
    } catch {
      lost = true;
      status.textContent = "no answer from the server; trying again";
      return;
    }
    if (fresh) take(fresh);
    if (fresh || lost) said();
    lost = false;
  };
  const again = () => ask().finally(() => setTimeout(again, EVERY));
  const said = () => (status.textContent = at ? `updated ${at}` : "live");
  const take = (fresh) => {
    page = fresh.page;
    at = new Date().toLocaleTimeString("en-GB");
    replaceTables(fresh.tables);
    $("#differences").replaceChildren(...parsed(fresh.differences));
    $("#title").textContent = page.title;
    $("#findings").replaceChildren(...page.findings.map((line) => h("li", {}, ...sentences(line))));
    showProgress();
    const made = h("time", { datetime: page.made }, when(page.made));
    $("#stamp").replaceChildren("Made ", made, ` by mssar ${page.version}.`);
    const lines = page.problems.map((line) => h("li", {}, line));
    const list = [h("h3", {}, "What could not be read"), h("ul", { class: "problems" }, ...lines)];
    $("#problems").replaceChildren(...(lines.length ? list : []));
    showFigures();
  };
  said();
  setTimeout(again, EVERY);
}

furnish();
watchTables();
watchTheme();
watchPrinter();
watchMaps();
showFigures();
if (page.live) watchNews();
