// Error over multiply-adds.

const spent = { dataset: null, variants: false };

function showPoints() {
  const section = $("#points");
  if (!present(section, page.points.length > 0)) return;
  const datasets = unique(page.points.map((p) => p.dataset));
  spent.dataset = among(spent.dataset, datasets);
  const of = page.points.filter((p) => p.dataset === spent.dataset);
  const variants = of.some((p) => !isPlain(p, of));
  keep($(".controls", section), [datasets, spent.dataset, variants], () => {
    const made = [];
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
  const shown = of.filter((p) => spent.variants || isPlain(p, of));
  const { soft, text } = ink();
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
    value: [p.macs, p.error],
    of: p,
    itemStyle: p.published ? hollow(p) : full(p),
    symbolSize: isPlain(p, of) ? 12 : 8,
  });
  const series = [];
  for (const network of unique(shown.map((p) => p.network))) {
    for (const published of [true, false]) {
      const path = shown
        .filter((p) => p.network === network && p.published === published && isPlain(p, of))
        .sort(byRank);
      if (!path.length) continue;
      series.push({
        type: "line",
        silent: true,
        symbol: "none",
        data: path.map((p) => [p.macs, p.error]),
        lineStyle: { color: soft, width: 1.3, type: published ? [4, 4] : "solid" },
        tooltip: { show: false },
      });
    }
    const mine = shown.filter((p) => p.network === network);
    const highest = mine.reduce((a, b) => (b.error > a.error ? b : a));
    series.push({
      type: "scatter",
      z: 4,
      data: mine.map((p) => ({
        ...item(p),
        label: {
          show: p === highest,
          formatter: () => network,
          position: "top",
          distance: 9,
          color: text,
          fontSize: 12,
        },
      })),
      labelLayout: { hideOverlap: true },
    });
  }
  series.push(whiskers(shown.filter((p) => p.spread)));
  const marks = kinds.map((k) => [swatch(hue(k), "dot"), say(k)]);
  if (shown.some((p) => p.published)) {
    marks.push([swatch(soft, "ring"), "published"], [swatch(soft, "dot"), "ours"]);
  }
  legend($(".legend", section), marks);
  const macs = shown.map((p) => p.macs);
  const option = {
    grid: { left: 44, right: 20, top: 34, bottom: 48 },
    xAxis: axis("multiply-adds for one image, logarithmic", {
      type: "log",
      min: Math.min(...macs) / 1.6,
      max: Math.max(...macs) * 1.6,
      nameLocation: "middle",
      nameGap: 28,
      axisLabel: {
        color: soft,
        fontSize: 12,
        formatter: large,
        hideOverlap: true,
        customValues: rounds(macs),
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
          [null, "Multiply-adds", large(p.macs)],
          ...(p.params == null ? [] : [[null, "Parameters", large(p.params)]]),
        ]);
      },
    },
    series,
  };
  draw(
    $("#points-chart"),
    `Error over multiply-adds on ${say(spent.dataset)}; in numbers below.`,
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
    ]);
  const head = ["Network", "Whose", "Error, %", "Multiply-adds", "Parameters"];
  keep($(".numbers .scroll", section), rows, () => [grid(head, rows)]);
}

/** Round numbers near these, for a logarithmic axis. */
function rounds(numbers) {
  const [low, high] = [Math.min(...numbers) / 1.6, Math.max(...numbers) * 1.6];
  const powers = [3, 4, 5, 6, 7, 8, 9, 10, 11, 12];
  const near = (steps) =>
    powers.flatMap((p) => steps.map((m) => m * 10 ** p)).filter((v) => v >= low && v <= high);
  const few = near([1, 2, 5]);
  return few.length > 2 ? few : near([1, 2, 3, 4, 5, 6, 8]);
}

/** The spread of our errors, as upright strokes. */
function whiskers(points) {
  return {
    type: "custom",
    silent: true,
    z: 3,
    data: points.map((p) => [p.macs, p.error - p.spread, p.error + p.spread, rank(p)]),
    encode: { x: 0, y: [1, 2] },
    renderItem(_, api) {
      const [x, y1] = api.coord([api.value(0), api.value(1)]);
      const [, y2] = api.coord([api.value(0), api.value(2)]);
      const stroke = hue(ORDER[api.value(3)]);
      return { type: "line", shape: { x1: x, y1, x2: x, y2 }, style: { stroke, lineWidth: 2 } };
    },
  };
}
