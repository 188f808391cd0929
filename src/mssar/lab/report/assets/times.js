// Measured time, over that without recalibration.

const timed = { hardware: null, what: "training" };

function showTimes() {
  const section = $("#times");
  if (!present(section, page.times.length > 0)) return;
  const machines = unique(page.times.map((t) => t.hardware));
  timed.hardware = among(timed.hardware, machines);
  const here = page.times.filter((t) => t.hardware === timed.hardware);
  const kinds = unique(here.map((t) => t.what))
    .sort()
    .reverse();
  timed.what = among(timed.what, kinds);
  keep($(".controls", section), [machines, timed.hardware, kinds], () => {
    const options = machines.map((m) => [m, m]);
    const made = [
      select("Hardware", options, timed.hardware, (m) => ((timed.hardware = m), showTimes())),
    ];
    const set = (k) => ((timed.what = k), showTimes());
    made.push(
      group(
        "Of",
        kinds.map((k) => [k, k]),
        (k) => k === timed.what,
        set,
      ),
    );
    return made;
  });
  drawTimes(
    section,
    here.filter((t) => t.what === timed.what),
  );
}

/** Each time in its place: a row for each network, in it a lane for each recalibration. */
function placed(times) {
  const several = unique(times.map((t) => t.dataset)).length > 1;
  const rows = new Map();
  for (const t of times.filter((t) => t.ratio != null && t.recalibration !== "none").sort(byRank)) {
    const data = several ? `${say(t.dataset)}, ` : "";
    const name = `${t.network}\n${data}batch ${t.batch}, ${t.precision}`;
    rows.set(name, [...(rows.get(name) ?? []), t]);
  }
  const dots = [...rows.values()].flatMap((lanes, row) =>
    lanes.map((of, lane) => {
      const nth = lanes.slice(0, lane).filter((t) => t.recalibration === of.recalibration).length;
      const shift = lane - (lanes.length - 1) / 2;
      return { of, row, shift, colour: hue(of.recalibration, nth) };
    }),
  );
  const lanes = Math.max(2, ...[...rows.values()].map((list) => list.length));
  return { names: [...rows.keys()], lanes, dots };
}

const LANE = 18; // pixels

/** From the 20th to the 80th percentile, as a ratio to the same median as the ratio. */
const reach = ({ ms, low, high, ratio }) =>
  ms > 0 && low != null && high != null ? [(low / ms) * ratio, (high / ms) * ratio] : [ratio, ratio];

function drawTimes(section, of) {
  const { names, lanes, dots } = placed(of);
  const kinds = unique(dots.map((d) => d.of.recalibration));
  const marks = kinds.map((kind) => [swatch(hue(kind), "dot"), say(kind)]);
  if (marks.length) marks.push([swatch(ink().text, "whisker"), "20th to 80th percentile"]);
  legend($(".legend", section), marks);
  const element = $("#times-chart");
  element.hidden = !dots.length; // then the numbers have to do
  element.style.height = `${64 + names.length * (lanes * LANE + 12)}px`;
  if (dots.length) {
    const what = `Time of ${timed.what} on ${timed.hardware} over that without recalibration`;
    draw(element, `${what}; in numbers below.`, timesOption(names, dots));
  }
  const lines = [...of]
    .sort((a, b) => inOrder(a.network, b.network) || inOrder(a.dataset, b.dataset) || byRank(a, b))
    .map((t) => [
      `${t.network}, ${recalibrated(t)}`,
      t.ratio == null ? "" : `${digits(t.ratio)} ×`,
      `${milli(t.ms)} (${milli(t.low)} … ${milli(t.high)})`,
      `${t.batch}, ${t.precision}`,
      say(t.dataset),
      t.source,
    ]);
  const head = [
    "Network",
    "Ratio",
    "ms a batch (20th … 80th percentile)",
    "Batch",
    "Images of",
    "Measured by",
  ];
  keep($(".numbers .scroll", section), lines, () => [grid(head, lines)]);
}

function timesOption(names, dots) {
  const { soft, text, line } = ink();
  const ratios = dots.flatMap((d) => [d.of.ratio, ...reach(d.of)]);
  const most = Math.max(1.5, Math.ceil(2 * Math.max(...ratios)) / 2);
  const stroke = (x1, y1, x2, y2, colour, lineWidth) => ({
    type: "line",
    shape: { x1, y1, x2, y2 },
    style: { stroke: colour, lineWidth },
  });
  const stems = {
    type: "custom",
    data: dots.map((d) => ({ value: [d.of.ratio, d.row], of: d.of })),
    encode: { x: 0, y: 1 },
    renderItem(params, api) {
      const { of, shift, colour } = dots[params.dataIndex];
      const [x, middle] = api.coord([api.value(0), api.value(1)]);
      const [from] = api.coord([1, api.value(1)]);
      const y = middle + shift * LANE;
      const [low, high] = reach(of).map((ratio) => api.coord([ratio, 0])[0]);
      const right = Math.max(x + 2, from, high) + 9;
      const label = { text: `${digits(api.value(0))} ×`, x: right, y: y - 6 };
      const end = (at) => stroke(at, y - 5, at, y + 5, text, 1.2);
      const whisker = [stroke(low, y, high, y, text, 1.2), end(low), end(high)];
      const style = { ...label, fill: text, fontSize: 12, fontFamily: SANS };
      const dot = { type: "circle", shape: { cx: x, cy: y, r: 6 }, style: { fill: colour } };
      return {
        type: "group",
        children: [stroke(from, y, x, y, colour, 3), dot, ...whisker, { type: "text", style }],
      };
    },
  };
  const free = {
    type: "custom",
    silent: true,
    z: 1,
    data: [[1, 0]],
    renderItem(params, api) {
      const [x] = api.coord([1, 0]);
      const { y, height } = params.coordSys;
      return stroke(x, y, x, y + height, soft, 1.5);
    },
  };
  return {
    grid: { left: 132, right: 56, top: 10, bottom: 44 },
    xAxis: axis("times the network without recalibration", {
      min: Math.floor(2 * Math.min(1, ...ratios)) / 2,
      max: most,
      interval: most <= 3 ? 0.5 : most <= 8 ? 1 : undefined,
      nameLocation: "middle",
      nameGap: 26,
      axisLabel: { color: soft, fontSize: 12, hideOverlap: true, formatter: (v) => `${v} ×` },
    }),
    yAxis: axis("", {
      type: "category",
      data: names,
      inverse: true,
      axisLabel: { color: text, fontSize: 12, lineHeight: 15, width: 122, overflow: "truncate" },
      splitLine: { show: false },
      axisLine: { lineStyle: { color: line } },
    }),
    tooltip: { trigger: "item", formatter: ({ data }) => (data?.of ? tipOf(data.of) : "") },
    series: [free, stems],
  };
}

const milli = (ms) => (ms == null ? "" : String(Number(ms.toPrecision(4))));

const tipOf = (t) =>
  tip(`${t.network}, ${recalibrated(t)}`, [
    [null, "Ratio", `${digits(t.ratio)} ×`],
    [null, `Batch of ${t.batch}`, `${milli(t.ms)} ms`, `${milli(t.low)} … ${milli(t.high)}`],
    [null, "On", `${t.hardware}, ${t.precision}`],
    [null, "Measured by", t.source],
  ]);
