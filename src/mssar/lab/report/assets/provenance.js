// Where a number comes from: the runs behind it, in a dialog.

function provenance(runs, of, opener) {
  const dialog = $("#provenance");
  $("h2", dialog).textContent = of;
  const sections = runs.map((id) => {
    const known = Object.hasOwn(page.provenance, id) ? page.provenance[id] : {};
    const { seed, command, ...rest } = known;
    const title = seed === undefined ? `Run ${id}` : `Seed ${seed}`;
    const parts = [h("h3", {}, title)];
    if (command !== undefined) parts.push(commandOf(String(command), title));
    if (!Object.keys(known).length) parts.push(h("p", {}, "Nothing more is known."));
    const lines = Object.entries(rest);
    if (seed !== undefined) lines.unshift(["run", id]);
    const items = lines.flatMap(([name, text]) => [
      h("dt", {}, name),
      h("dd", {}, ...detail(name, String(text), title)),
    ]);
    return h("section", {}, ...parts, ...(items.length ? [h("dl", {}, ...items)] : []));
  });
  $(".seeds", dialog).replaceChildren(...sections);
  const place = placeOf(opener);
  dialog.onclose = () => place && !opener.isConnected && focusOn(place);
  dialog.showModal();
  dialog.scrollTop = 0;
}

/** A text, with its long hashes cut short; a recipe as a list. */
function detail(name, text, title) {
  const recipe = name === "recipe" ? listOf(text) : null;
  if (recipe) return [recipe];
  return text.split(/\b([0-9a-f]{40,})\b/).map((part, i) => {
    if (i % 2 === 0) return part;
    const short = h("code", { title: part }, `${part.slice(0, 10)}…`);
    const whole = () => (short.textContent = part);
    return h("span", { class: "hash" }, short, copier(part, `${name}, ${title}`, short, whole));
  });
}

/** What is in a recipe, by name; nothing, if it cannot be read. */
function listOf(text) {
  const plain = (value) => {
    if (Array.isArray(value)) return value.map(plain).join(", ") || "none";
    if (value === null || typeof value !== "object") {
      return { true: "yes", false: "no", null: "none" }[value] ?? String(value);
    }
    return Object.entries(value)
      .map(([key, inner]) => (key === "kind" ? plain(inner) : `${spaced(key)} ${plain(inner)}`))
      .join(", ");
  };
  const spaced = (key) => key.replaceAll("_", " ");
  try {
    const recipe = JSON.parse(text);
    if (recipe === null || typeof recipe !== "object" || Array.isArray(recipe)) return null;
    const line = ([key, value]) =>
      h("li", {}, h("span", {}, spaced(key)), ` ${plain(value)}`);
    return h("ul", { class: "recipe" }, ...Object.entries(recipe).map(line));
  } catch {
    return null;
  }
}

/** A button that copies a text; where that is not allowed, the text is at least marked. */
function copier(text, what, element, before = () => {}) {
  const copy = button("Copy", async () => {
    try {
      await navigator.clipboard.writeText(text);
      copy.textContent = "Copied";
    } catch {
      before();
      getSelection().selectAllChildren(element);
      copy.textContent = "Marked";
    }
    setTimeout(() => (copy.textContent = "Copy"), 1500);
  });
  copy.setAttribute("aria-label", `Copy: ${what}`);
  return copy;
}

function commandOf(text, title) {
  const code = h("code", {}, text);
  const line = h("pre", { tabindex: "0", role: "group", "aria-label": `Command, ${title}` }, code);
  return h("div", { class: "command" }, line, copier(text, `command, ${title}`, code));
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
