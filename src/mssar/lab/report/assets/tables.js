// The tables come as HTML; here they learn to be sorted, filtered and folded.

const sorting = new Map(); // by table: { key, up }
const filtering = new Map(); // by table: { network, dataset }
const unfolded = new Set(); // tables of which all rows are wanted
const FILTER_FROM = 13; // rows
const OPEN_ROWS = 6; // not run yet, that are no wall
const FIRST_ROWS = 4; // of a table of which nothing has been run

/** After fresh HTML: the reader's order and filters again. */
function furnish() {
  for (const article of $$("#tables [data-table]")) {
    const name = article.dataset.table;
    $$("tbody tr", article).forEach((row, place) => (row.dataset.place = place));
    for (const th of $$("thead th", article)) {
      const arrow = h("span", { class: "arrow", "aria-hidden": "true" });
      const press = button(th.textContent, () => {
        const last = sorting.get(name);
        const up = last?.key === th.dataset.key ? !last.up : true;
        sorting.set(name, { key: th.dataset.key, up });
        sort(article);
        reveal(article);
      });
      press.append(arrow);
      th.replaceChildren(press);
    }
    sort(article);
    filters(article);
    fold(article);
    reveal(article);
  }
}

/** The rows that say enough; nothing, if that is all of them. */
function digest(rows) {
  const run = rows.filter((row) => Number(row.dataset.n) > 0);
  if (run.length) return rows.length - run.length > OPEN_ROWS ? run : null;
  return rows.length > FIRST_ROWS ? rows.slice(0, FIRST_ROWS) : null;
}

/** A button for the other rows, where there are many that have not been run. */
function fold(article) {
  const rows = $$("tbody tr", article);
  if (!digest(rows)) return;
  const name = article.dataset.table;
  const press = button(
    "",
    () => {
      if (!unfolded.delete(name)) unfolded.add(name);
      reveal(article);
    },
    { class: "more-rows" },
  );
  $(".scroll", article).after(press);
}

/** Hides the rows that the reader has filtered out, and those that are folded away. */
function reveal(article) {
  const rows = $$("tbody tr", article);
  const name = article.dataset.table;
  const chosen = Object.entries(filtering.get(name) ?? {}).filter(([, value]) => value);
  const few = digest(rows);
  const folded = few && !chosen.length && !unfolded.has(name);
  for (const row of rows) {
    row.hidden = folded
      ? !few.includes(row)
      : chosen.some(([key, value]) => row.dataset[key] !== value);
  }
  const left = rows.filter((row) => !row.hidden).length;
  const count = $(".count", article);
  if (count) {
    count.textContent = left < rows.length ? `${left} of ${rows.length} rows` : `${left} rows`;
  }
  const press = $(".more-rows", article);
  if (!press) return;
  press.hidden = chosen.length > 0;
  press.setAttribute("aria-expanded", String(!folded));
  const run = few.some((row) => Number(row.dataset.n) > 0);
  const fewer = run ? "Show only what has been run" : `Show the first ${few.length} rows only`;
  press.textContent = folded ? `Show all ${rows.length} rows` : fewer;
}

function sort(article) {
  const by = sorting.get(article.dataset.table);
  if (!by) return;
  for (const th of $$("thead th", article)) {
    if (th.dataset.key === by.key) th.setAttribute("aria-sort", by.up ? "ascending" : "descending");
    else th.removeAttribute("aria-sort");
  }
  const body = $("tbody", article);
  const value = (row) => row.querySelector(`.${CSS.escape(by.key)}`)?.dataset.value;
  const rows = $$("tr", body).map((row) => ({ row, value: value(row) }));
  const numbers = rows.every((r) => r.value === undefined || Number.isFinite(Number(r.value)));
  const compare = numbers ? (a, b) => a - b : (a, b) => a.localeCompare(b, "en", { numeric: true });
  rows.sort((a, b) => {
    const missing = (a.value === undefined) - (b.value === undefined); // last, either way
    const order = missing || a.value === undefined ? 0 : compare(a.value, b.value);
    return missing || (by.up ? order : -order) || a.row.dataset.place - b.row.dataset.place;
  });
  body.append(...rows.map((r) => r.row));
}

function filters(article) {
  const rows = $$("tbody tr", article);
  if (rows.length < FILTER_FROM) return;
  const name = article.dataset.table;
  const chosen = filtering.get(name) ?? { network: "", dataset: "" };
  filtering.set(name, chosen);
  const count = h("span", { class: "hint count", role: "status" });
  const pick = (key, label) => {
    const values = unique(rows.map((row) => row.dataset[key]));
    if (!values.includes(chosen[key])) chosen[key] = "";
    if (values.length < 2) return [];
    const options = [["", "all"], ...values.map((v) => [v, v])];
    return [select(label, options, chosen[key], (v) => ((chosen[key] = v), reveal(article)))];
  };
  $(".filters", article).replaceChildren(
    ...pick("network", "Network"),
    ...pick("dataset", "Data set"),
    count,
  );
}

/** A place in the tables that is still known when they have been made anew. */
function placeOf(element) {
  const table = element?.closest("[data-table]")?.dataset.table;
  if (table === undefined) return null;
  const row = element.closest("tr[data-row]")?.dataset.row;
  const key = element.closest("th[data-key]")?.dataset.key;
  const scroll = element.matches(".scroll");
  const fold = element.matches(".more-rows");
  const filter = element.closest(".select")?.firstChild.textContent;
  return { table, row, key, scroll, fold, filter };
}

function focusOn(place) {
  const article = $$("[data-table]").find((a) => a.dataset.table === place.table);
  if (!article) return;
  const row = $$("tr[data-row]", article).find((r) => r.dataset.row === place.row);
  const labels = $$(".select", article);
  const found =
    (row && $(".runs", row)) ||
    (place.key && $(`th[data-key="${CSS.escape(place.key)}"] button`, article)) ||
    (place.filter && labels.find((l) => l.firstChild.textContent === place.filter)?.lastChild) ||
    (place.fold && $(".more-rows", article)) ||
    (place.scroll && $(".scroll", article));
  if (found) found.focus({ preventScroll: true });
}

/** What Python made, parsed as a document of its own, where nothing runs. */
function parsed(html) {
  return new DOMParser().parseFromString(html, "text/html").body.childNodes;
}

/** New tables, with the order, filters, focus and scroll that the old ones had. */
function replaceTables(html) {
  const slot = $("#tables");
  const place = placeOf(document.activeElement);
  const scrolled = $$(".scroll", slot).map((s) => s.scrollLeft);
  slot.replaceChildren(...parsed(html));
  furnish();
  $$(".scroll", slot).forEach((s, i) => (s.scrollLeft = scrolled[i] ?? 0));
  if (place) focusOn(place);
}
