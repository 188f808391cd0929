// The tables come as HTML; here they learn to be sorted and filtered, and where numbers come from.

const sorting = new Map(); // by table: { key, up }
const filtering = new Map(); // by table: { network, dataset }
const FILTER_FROM = 13; // rows

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
      });
      press.append(arrow);
      th.replaceChildren(press);
    }
    sort(article);
    filters(article);
  }
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
  const count = h("span", { class: "hint", role: "status" });
  const apply = () => {
    for (const row of rows) {
      row.hidden = Object.entries(chosen).some(([key, v]) => v && row.dataset[key] !== v);
    }
    const left = rows.filter((row) => !row.hidden).length;
    count.textContent = left < rows.length ? `${left} of ${rows.length} rows` : `${left} rows`;
  };
  const pick = (key, label) => {
    const values = unique(rows.map((row) => row.dataset[key]));
    if (!values.includes(chosen[key])) chosen[key] = "";
    if (values.length < 2) return [];
    const options = [["", "all"], ...values.map((v) => [v, v])];
    return [select(label, options, chosen[key], (v) => ((chosen[key] = v), apply()))];
  };
  $(".filters", article).replaceChildren(
    ...pick("network", "Network"),
    ...pick("dataset", "Data set"),
    count,
  );
  apply();
}

/** A place in the tables that is still known when they have been made anew. */
function placeOf(element) {
  const table = element?.closest("[data-table]")?.dataset.table;
  if (table === undefined) return null;
  const row = element.closest("tr[data-row]")?.dataset.row;
  const key = element.closest("th[data-key]")?.dataset.key;
  const scroll = element.matches(".scroll");
  return { table, row, key, scroll, filter: element.closest(".select")?.firstChild.textContent };
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
    (place.scroll && $(".scroll", article));
  if (found) found.focus({ preventScroll: true });
}

/** New tables, with the order, filters, focus and scroll that the old ones had. */
function replaceTables(html) {
  const slot = $("#tables");
  const place = placeOf(document.activeElement);
  const scrolled = $$(".scroll", slot).map((s) => s.scrollLeft);
  const fresh = new DOMParser().parseFromString(html, "text/html");
  slot.replaceChildren(...fresh.body.childNodes);
  furnish();
  $$(".scroll", slot).forEach((s, i) => (s.scrollLeft = scrolled[i] ?? 0));
  if (place) focusOn(place);
}

/** The runs behind a number, in a dialog. */
function provenance(runs, of, opener) {
  const dialog = $("#provenance");
  $("h2", dialog).textContent = of;
  const sections = runs.map((id) => {
    const known = Object.hasOwn(page.provenance, id) ? page.provenance[id] : {};
    const { seed, command, ...rest } = known;
    const items = Object.entries(rest).flatMap(([name, text]) => [
      h("dt", {}, name),
      h("dd", {}, String(text)),
    ]);
    const title = seed === undefined ? `Run ${id}` : `Seed ${seed}`;
    const parts = [h("h3", {}, title)];
    if (command !== undefined) parts.push(copyable(String(command), title));
    if (!items.length && command === undefined) parts.push(h("p", {}, "Nothing more is known."));
    return h("section", {}, ...parts, h("dl", {}, h("dt", {}, "run"), h("dd", {}, id), ...items));
  });
  $(".seeds", dialog).replaceChildren(...sections);
  const place = placeOf(opener);
  dialog.onclose = () => place && !opener.isConnected && focusOn(place);
  dialog.showModal();
  dialog.scrollTop = 0;
}

function copyable(text, title) {
  const code = h("code", {}, text);
  const copy = button("Copy", async () => {
    try {
      await navigator.clipboard.writeText(text);
      copy.textContent = "Copied";
    } catch {
      getSelection().selectAllChildren(code); // not allowed: it is at least marked
      copy.textContent = "Marked";
    }
    setTimeout(() => (copy.textContent = "Copy"), 1500);
  });
  copy.setAttribute("aria-label", `Copy the command of ${title}`);
  const line = h("pre", { tabindex: "0", role: "group", "aria-label": `Command, ${title}` }, code);
  return h("div", { class: "command" }, line, copy);
}

function watchTables() {
  $("#tables").addEventListener("click", (event) => {
    const pressed = event.target.closest(".runs");
    if (!pressed) return;
    const row = pressed.closest("tr");
    const text = (key) => row.querySelector(`.${key}`)?.textContent ?? row.dataset[key];
    const of = `${text("network")}, ${text("recalibration")}, ${text("dataset")}: ${text("mean")}`;
    provenance(JSON.parse(pressed.dataset.runs), of, pressed);
  });
  const dialog = $("#provenance");
  $(".close", dialog).addEventListener("click", () => dialog.close());
  dialog.addEventListener("click", (event) => event.target === dialog && dialog.close());
}
