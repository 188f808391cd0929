// Error and loss over epochs.

const view = {
  dataset: null,
  networks: null,
  quantity: "error",
  parts: new Set(["test"]),
  log: false,
  off: new Map(), // by label: whether the reader turned it off, or on
  met: new Set(), // runs that were on their way when they came
  window: undefined, // first and last epoch; null: all of them; undefined: not yet chosen
};
const PARTS = [
  ["test", "testing"],
  ["train", "training"],
];
const ROUND = [-5, -4, -3, -2, -1, 0, 1, 2].flatMap((p) =>
  [1, 2, 5].map((m) => Number(`${m}e${p}`)),
);
const DASHES = [5, 4]; // of the training pictures
const PLACES = { error: 2, loss: 4 };
const inOrder = (a, b) => a.localeCompare(b, "en", { numeric: true });

function showCurves() {
  const section = $("#curves");
  if (!present(section, page.curves.length > 0)) return;
  const datasets = unique(page.curves.map((c) => c.dataset));
  view.dataset = among(view.dataset ?? firstDataset(datasets), datasets);
  const of = page.curves.filter((c) => c.dataset === view.dataset);
  const networks = unique(of.map((c) => c.network)).sort(inOrder);
  if (!view.networks || (view.networks.size && !networks.some((n) => view.networks.has(n)))) {
    const kinds = (n) =>
      unique(of.filter((c) => c.network === n).map((c) => c.recalibration)).length;
    // The one with most to compare; of several the deepest.
    view.networks = new Set([networks.reduce((a, b) => (kinds(b) >= kinds(a) ? b : a))]);
  }
  meet(of);
  if (view.window === undefined) view.window = lastHalf(chosenCurves().shown);
  curveControls(section, datasets, networks);
  zoomControls(section);
  drawCurves(section);
}

/** What is being trained; or else the data on which errors differ most. */
function firstDataset(datasets) {
  const going = page.curves.find((c) => c.going)?.dataset;
  return going ?? datasets.find((d) => d === "cifar100");
}

/** Where finished curves part; of what is being trained, and in the demo, all is shown. */
function lastHalf(shown) {
  const epochs = shownEpochs(shown);
  if (page.kind !== "reproduction" || shown.some((c) => c.going) || epochs < 4) return null;
  return [Math.floor(epochs / 2) + 1, epochs];
}

const keyOf = (curve) => JSON.stringify([curve.dataset, curve.label]);

/** What is being trained is shown, until the reader turns it off. */
function meet(curves) {
  for (const curve of curves.filter((c) => c.going && !view.met.has(keyOf(c)))) {
    view.met.add(keyOf(curve));
    view.networks.add(curve.network);
  }
}

function curveControls(section, datasets, networks) {
  const set = (key) => (value) => {
    view[key] = value;
    showCurves();
  };
  const toggle = (key) => (value, on) => {
    if (on) view[key].add(value);
    else view[key].delete(value);
    showCurves();
  };
  const slot = $(".controls", section);
  keep(slot, [datasets, view.dataset, networks, view.quantity], () => {
    const focused = slot.contains(document.activeElement) && document.activeElement.value;
    const made = [];
    if (datasets.length > 1) {
      const options = datasets.map((d) => [d, say(d)]);
      made.push(select("Data set", options, view.dataset, set("dataset")));
    }
    if (networks.length > 1) {
      const on = (n) => view.networks.has(n);
      const options = networks.map((n) => [n, n]);
      const boxes = group("Network", options, on, toggle("networks"), "checkbox");
      boxes.classList.add("networks");
      made.push(boxes);
    }
    const quantities = [
      ["error", "error"],
      ["loss", "loss"],
    ];
    made.push(group("Quantity", quantities, (q) => q === view.quantity, set("quantity")));
    const on = (p) => view.parts.has(p);
    made.push(group("Pictures", PARTS, on, toggle("parts"), "checkbox"));
    if (view.quantity === "loss") {
      const axes = [
        [false, "linear"],
        [true, "log"],
      ];
      made.push(group("Axis", axes, (a) => a === view.log, set("log")));
    }
    queueMicrotask(() => {
      const again = $$("input, select", slot).find((e) => focused && e.value === focused);
      if (again) again.focus();
    });
    return made;
  });
  for (const box of $$(".networks input", slot)) box.checked = view.networks.has(box.value);
}

/** What can be drawn now, what of it is, and in which colour. */
function chosenCurves() {
  const here = page.curves.filter(
    (c) => c.dataset === view.dataset && view.networks.has(c.network),
  );
  here.sort((a, b) => inOrder(a.network, b.network) || byRank(a, b));
  const on = (c) => isPlain(c, here) || view.met.has(keyOf(c));
  const shown = here.filter((c) => !(view.off.get(c.label) ?? !on(c)));
  const nth = {};
  const colours = new Map();
  for (const c of shown) {
    nth[c.recalibration] = (nth[c.recalibration] ?? -1) + 1;
    colours.set(c, hue(c.recalibration, nth[c.recalibration]));
  }
  return { here, shown, colours };
}

const same = (a, b) =>
  ["network", "recalibration", "options", "dataset"].every((key) => a[key] === b[key]);

/** A curve's name among those that are chosen; runs on their way may share all but their seed. */
function short(curve) {
  if (page.curves.some((other) => other !== curve && same(other, curve))) return named(curve.label);
  return view.networks.size > 1 ? `${curve.network} ${recalibrated(curve)}` : recalibrated(curve);
}

function drawCurves(section) {
  const { here, shown, colours } = chosenCurves();
  chips($(".chips", section), here, shown, colours, section);
  const parts = PARTS.filter(([part]) => view.parts.has(part));
  const bare = !shown.length || !parts.length;
  const log = view.log && view.quantity === "loss" && !bare;
  const fits = (v) => (v == null || (log && v <= 0) ? null : v);
  const epochs = shownEpochs(shown);
  const [first, last] = windowIn(epochs);
  const labels =
    shown.length > 1 && section.clientWidth > 700 && (view.networks.size > 1 || shown.length > 3);
  const series = [];
  for (const [part] of parts) {
    const key = `${part}_${view.quantity}`;
    for (const curve of shown) {
      const colour = colours.get(curve);
      const data = (curve.mean[key] ?? []).map((v, i) => [i + 1, fits(v)]);
      if (curve.n > 1) {
        const edges = (_, i) => [i + 1, fits(curve.low[key]?.[i]), fits(curve.high[key]?.[i])];
        const full = data.map(edges).filter((edge) => !edge.includes(null));
        if (full.length > 1) series.push(band(full, colour));
      }
      series.push({
        type: "line",
        name: curve.label,
        data,
        color: colour,
        z: 3,
        showSymbol: data.length === 1,
        symbol: "circle",
        symbolSize: 6,
        lineStyle: { width: part === "test" ? 2 : 1.4, type: part === "test" ? "solid" : DASHES },
        emphasis: { disabled: true },
      });
    }
  }
  if (labels && parts.length) series.push(namesAtEnds(shown, `${parts[0][0]}_${view.quantity}`));
  const touch = matchMedia("(pointer: coarse)").matches;
  const zoom = {
    startValue: first,
    endValue: last,
    minValueSpan: 1,
    xAxisIndex: 0,
    filterMode: "filter",
  };
  const { line, soft } = ink();
  const inside = {
    ...zoom,
    id: "inside",
    type: "inside",
    disabled: touch, // there a finger scrolls the page
    zoomOnMouseWheel: "ctrl",
    preventDefaultMouseMove: false,
  };
  const slider = {
    ...zoom,
    type: "slider",
    height: 20,
    bottom: 8,
    showDetail: false,
    showDataShadow: false,
    brushSelect: false,
    show: !printing,
    borderColor: line,
    backgroundColor: "transparent",
    fillerColor: mixed(css("--line"), css("--paper"), 0.4),
    handleStyle: { color: css("--raised"), borderColor: soft },
    moveHandleSize: 0,
  };
  const unit = view.quantity === "error" ? "error, %" : log ? "loss, logarithmic" : "loss";
  const logarithmic = {
    min: (of) => of.min * 0.9,
    max: (of) => of.max * 1.1,
    axisTick: { show: false, customValues: ROUND },
    axisLabel: { color: soft, fontSize: 12, customValues: ROUND },
  };
  const longest = Math.max(0, ...shown.map((c) => named(c.label).length));
  const beside = Math.min(Math.max(170, 24 + 7 * longest), 0.4 * section.clientWidth);
  const option = {
    grid: { left: 48, right: labels ? beside : 16, top: 34, bottom: printing ? 48 : 84 },
    xAxis: axis("epoch", {
      min: 1,
      max: Math.max(2, epochs),
      minInterval: 1,
      nameLocation: "middle",
      nameGap: 24,
      splitLine: { show: false },
      axisLabel: { color: soft, fontSize: 12, formatter: (v) => (Number.isInteger(v) ? v : "") },
    }),
    yAxis: axis(unit, {
      type: log ? "log" : "value",
      scale: true,
      ...(log ? logarithmic : {}),
      ...(bare ? { min: 0, max: view.quantity === "error" ? 100 : 5 } : {}),
      nameTextStyle: { color: soft, align: "left", padding: [0, 0, 0, -36], fontSize: 12 },
    }),
    dataZoom: [inside, slider],
    tooltip: {
      trigger: "axis",
      axisPointer: { type: "line", snap: true, lineStyle: { color: soft } },
      formatter: (found) => tipAt(Math.round(found[0].axisValue), shown, parts, colours),
    },
    series,
  };
  const names = shown.map((c) => named(c.label)).join(", ") || "none chosen";
  const element = $("#curves-chart");
  const fresh = !echarts.getInstanceByDom(element);
  const chart = draw(
    element,
    `${unit} over ${epochs} epochs: ${names}. The values follow below.`,
    option,
  );
  if (fresh) listen(element, chart);
  readout(chart);
  remarks(shown);
  lastEpochs(section, shown);
}

const lengthOf = (curve) => Math.max(0, ...Object.values(curve.mean).map((list) => list.length));
const epochsOf = (curves) => Math.max(1, ...curves.map((c) => Math.max(c.epochs, lengthOf(c))));

function chips(slot, here, shown, colours, section) {
  const key = here.map((c) => [
    c.label,
    c.network,
    c.recalibration,
    c.options,
    view.networks.size > 1,
  ]);
  keep(slot, key, () =>
    here.map((c) =>
      button(
        "",
        () => {
          const { here: now, shown: drawn } = chosenCurves();
          const at = now.find((other) => other.label === c.label);
          view.off.set(c.label, drawn.includes(at));
          drawCurves(section);
        },
        { class: "chip" },
      ),
    ),
  );
  here.forEach((c, i) => {
    const chip = slot.children[i];
    chip.setAttribute("aria-pressed", String(shown.includes(c)));
    chip.replaceChildren(swatch(colours.get(c) ?? css("--line")), short(c));
  });
}
