// Error over cost: over multiply-adds, as in the paper, or over measured time.

const PATH = ["none", "se", "mssar"]; // a line leads along these

const spent = { dataset: null, variants: false, over: "macs" };

/** The hardware that most of these were timed on. */
function machineOf(points) {
  const times = points.flatMap((p) => page.times.filter((t) => isTimeOf(t, p)));
  const machines = unique(times.map((t) => t.hardware));
  const count = (m) => times.filter((t) => t.hardware === m).length;
  return machines.reduce((a, b) => (a !== null && count(a) >= count(b) ? a : b), null);
}

const isTimeOf = (t, p) =>
  t.network === p.network && t.recalibration === p.recalibration && t.options === p.options;

/** What a point costs, in what is chosen; nothing if that was not measured. */
function costOf(p, machine) {
  if (spent.over === "macs") return p.macs;
  const found = page.times.find(
    (t) => isTimeOf(t, p) && t.what === spent.over && t.hardware === machine,
  );
  return found && (1000 * found.ms) / found.batch;
}

function showPoints() {
  const section = $("#points");
  if (!present(section, page.points.length > 0)) return;
  const datasets = unique(page.points.map((p) => p.dataset));
  spent.dataset = among(spent.dataset, datasets);
  const of = page.points.filter((p) => p.dataset === spent.dataset);
  const variants = of.some((p) => !isPlain(p, of));
  const measured = unique(
    page.times.filter((t) => of.some((p) => isTimeOf(t, p))).map((t) => t.what),
  ).sort();
  const costs = [["macs", "multiply-adds"], ...measured.reverse().map((w) => [w, `${w} time`])];
  spent.over = among(
    spent.over,
    costs.map(([key]) => key),
  );
  keep($(".controls", section), [datasets, spent.dataset, variants, costs], () => {
    const made = [];
    if (costs.length > 1) {
      const set = (over) => ((spent.over = over), showPoints());
      made.push(group("Over", costs, (over) => over === spent.over, set));
    }
    if (datasets.length > 1) {
      const options = datasets.map((d) => [d, say(d)]);
      made.push(
        select("Data set", options, spent.dataset, (d) => ((spent.dataset = d), showPoints())),
      );
    }
    if (variants) {
      const set = (_, on) => ((spent.variants = on), showPoints());
      made.push(group("Show", [["variants", "variants"]], () => spent.variants, set, "checkbox"));
    }
    return made;
  });
  drawPoints(section, of);
}

function drawPoints(section, of) {
  const machine = machineOf(of);
  const x = (p) => costOf(p, machine);
  const timed = spent.over !== "macs";
  const shown = of.filter((p) => (spent.variants || isPlain(p, of)) && x(p) > 0);
  const { soft } = ink();
  const kinds = unique(shown.map((p) => p.recalibration)).sort(
    (a, b) => rank({ recalibration: a }) - rank({ recalibration: b }),
  );
  const hollow = (p) => ({
    color: css("--paper"),
    borderColor: hue(p.recalibration),
    borderWidth: 2,
  });
  const full = (p) => ({
    color: hue(p.recalibration),
    borderColor: css("--paper"),
    borderWidth: 1,
  });
  const item = (p) => ({
    value: [x(p), p.error],
    of: p,
    itemStyle: p.published ? hollow(p) : full(p),
    symbolSize: isPlain(p, of) ? 12 : 8,
  });
  const series = [];
  for (const network of unique(shown.map((p) => p.network))) {
    for (const published of [true, false]) {
      const path = shown
        .filter((p) => p.network === network && p.published === published && isPlain(p, of))
        .filter((p) => PATH.includes(p.recalibration))
        .sort(byRank);
      if (!path.length) continue;
      series.push({
        type: "line",
        silent: true,
        symbol: "none",
        data: path.map((p) => [x(p), p.error]),
        lineStyle: { color: soft, width: 1.3, type: published ? [4, 4] : "solid" },
        tooltip: { show: false },
      });
    }
    const mine = shown.filter((p) => p.network === network);
    series.push({ type: "scatter", z: 4, data: mine.map(item) });
  }
  series.push(networkNames(shown, x));
  series.push(whiskers(
    shown.filter((p) => p.spread),
    x,
  ));
  const marks = kinds.map((k) => [swatch(hue(k), "dot"), say(k)]);
  if (shown.some((p) => p.published)) {
    marks.push([swatch(soft, "ring"), "published"], [swatch(soft, "dot"), "ours"]);
  }
  legend($(".legend", section), marks);
  const costs = shown.map(x);
  const unit = timed ? `µs an image, ${spent.over}, ${machine}` : "multiply-adds for one image";
  const option = {
    grid: { left: 44, right: 20, top: 34, bottom: 48 },
    xAxis: axis(`${unit}, logarithmic`, {
      type: "log",
      min: Math.min(...costs) / (timed ? 3 : 1.6),
      max: Math.max(...costs) * 1.6,
      nameLocation: "middle",
      nameGap: 28,
      axisLabel: {
        color: soft,
        fontSize: 12,
        formatter: timed ? (v) => String(Number(v.toPrecision(3))) : large,
        hideOverlap: true,
        customValues: rounds(costs),
      },
      splitLine: { show: false },
    }),
    yAxis: axis("error, %", {
      scale: true,
      nameTextStyle: { color: soft, align: "left", padding: [0, 0, 0, -34], fontSize: 12 },
    }),
    tooltip: {
      trigger: "item",
      formatter: ({ data }) => {
        const p = data.of;
        const whose = p.published ? "published" : `ours, n=${p.n}`;
        return tip(`${p.network}, ${recalibrated(p)}`, [
          [null, `Error (${whose})`, `${withSpread(p.error, p.spread)} %`],
          ...(timed ? [[null, `µs an image, ${spent.over}`, micro(x(p)), machine]] : []),
          [null, "Multiply-adds", large(p.macs)],
          ...(p.params == null ? [] : [[null, "Parameters", large(p.params)]]),
        ]);
      },
    },
    series,
  };
  draw(
    $("#points-chart"),
    `Error over ${unit} on ${say(spent.dataset)}; in numbers below.`,
    option,
  );
  const rows = [...shown]
    .sort((a, b) => inOrder(a.network, b.network) || byRank(a, b) || b.published - a.published)
    .map((p) => [
      `${p.network}, ${recalibrated(p)}`,
      p.published ? "published" : `ours, n=${p.n}`,
      withSpread(p.error, p.spread),
      large(p.macs),
      large(p.params),
      ...(timed ? [micro(x(p))] : []),
    ]);
  const head = ["Network", "Whose", "Error, %", "Multiply-adds", "Parameters"];
  if (timed) head.push(unit);
  keep($(".numbers .scroll", section), rows, () => [grid(head, rows)]);
}

/** The name of each network beside its highest point, where no error bar runs. */
function networkNames(shown, x) {
  const costs = shown.map((p) => Math.log(x(p)));
  const [low, high] = [Math.min(...costs), Math.max(...costs)];
  const names = unique(shown.map((p) => p.network)).map((network) => {
    const mine = shown.filter((p) => p.network === network);
    const highest = mine.reduce((a, b) => (b.error > a.error ? b : a));
    const far = high > low && (Math.log(x(highest)) - low) / (high - low) > 0.7;
    const label = { position: far || spent.over !== "macs" ? "left" : "right" }; // off the lines
    return { value: [x(highest), highest.error], name: network, label };
  });
  return {
    type: "scatter",
    silent: true,
    symbolSize: 1,
    itemStyle: { color: "transparent" },
    data: names,
    tooltip: { show: false },
    label: { show: true, formatter: "{b}", distance: 10, color: ink().text, fontSize: 12 },
    labelLayout: { hideOverlap: true },
  };
}

const micro = (us) => String(Number(us.toPrecision(3)));

/** Round numbers near these, for a logarithmic axis. */
function rounds(numbers) {
  const [low, high] = [Math.min(...numbers) / 1.6, Math.max(...numbers) * 1.6];
  const powers = Array.from({ length: 15 }, (_, i) => i - 2);
  const near = (steps) =>
    powers.flatMap((p) => steps.map((m) => m * 10 ** p)).filter((v) => v >= low && v <= high);
  const few = near([1, 2, 5]);
  return few.length > 2 ? few : near([1, 2, 3, 4, 5, 6, 8]);
}

/** The spread of our errors, as upright strokes. */
function whiskers(points, x) {
  return {
    type: "custom",
    silent: true,
    z: 3,
    data: points.map((p) => [x(p), p.error - p.spread, p.error + p.spread, rank(p)]),
    encode: { x: 0, y: [1, 2] },
    renderItem(_, api) {
      const [x, y1] = api.coord([api.value(0), api.value(1)]);
      const [, y2] = api.coord([api.value(0), api.value(2)]);
      const stroke = hue(ORDER[api.value(3)]);
      return { type: "line", shape: { x1: x, y1, x2: x, y2 }, style: { stroke, lineWidth: 2 } };
    },
  };
}
