// How often each weight occurs.

function showHistogram(of) {
  const section = $("#histogram");
  section.hidden = !of.histograms.length;
  if (section.hidden) return;
  const scales = unique(of.histograms.map((b) => b.scale)).sort((a, b) => a - b);
  seen.among = among(seen.among, scales);
  keep($(".controls", section), scales, () => {
    const set = (k) => (
      (seen.among = k),
      showHistogram(explainedNow())
    );
    return [
      group(
        "Scale",
        scales.map((k) => [k, grids(k)]),
        (k) => k === seen.among,
        set,
      ),
    ];
  });
  const shown = of.histograms
    .filter((b) => b.scale === seen.among)
    .sort((a, b) => a.stage - b.stage);
  const count = shown.length;
  const colour = (i) => mixed(css("--mssar"), css("--other"), count > 1 ? 1 - i / (count - 1) : 0);
  const dashes = (i) => [[], [6, 4], [2, 3], [8, 3, 2, 3]][i % 4];
  legend(
    $(".legend", section),
    shown.map((b, i) => [stroked(colour(i), dashes(i)), `stage ${b.stage}`]),
  );
  const { soft } = ink();
  const option = {
    grid: { left: 44, right: 20, top: 30, bottom: 44 },
    xAxis: axis("weight", {
      min: 0,
      max: 1,
      nameLocation: "middle",
      nameGap: 26,
      splitLine: { show: false },
    }),
    yAxis: axis("share, %", {
      nameTextStyle: { color: soft, align: "left", padding: [0, 0, 0, -34] },
    }),
    tooltip: {
      trigger: "axis",
      axisPointer: { type: "line", snap: true },
      formatter: (found) => tipOfBin(found[0].axisValue, shown, (i) => stroked(colour(i), dashes(i))),
    },
    series: shown.map((b, i) => ({
      type: "line",
      step: "middle",
      symbol: "none",
      color: colour(i),
      lineStyle: { width: 2, type: i % 4 ? dashes(i) : "solid" },
      areaStyle: { opacity: 0.08 },
      emphasis: { disabled: true },
      data: b.shares.map((s, bin) => [(bin + 0.5) / b.shares.length, 100 * s]),
    })),
  };
  draw(
    $("#histogram-chart"),
    `How often each weight occurs, by stage, scale ${grids(seen.among)}; in numbers below.`,
    option,
  );
  const rows = shown.map((b) => {
    const middle = (i) => (i + 0.5) / b.shares.length;
    const sum = (keepIt) => b.shares.reduce((all, s, i) => all + (keepIt(middle(i)) ? s : 0), 0);
    const mean = b.shares.reduce((all, s, i) => all + s * middle(i), 0);
    return [
      `stage ${b.stage}`,
      digits(mean),
      percent(100 * sum((w) => w < 0.25)),
      percent(100 * sum((w) => w > 0.75)),
    ];
  });
  const head = ["Stage", "Mean weight", "Below ¼", "Above ¾"];
  keep($(".numbers .scroll", section), rows, () => [grid(head, rows)]);
}

function tipOfBin(at, shown, mark) {
  const bins = shown[0].shares.length;
  const bin = Math.max(0, Math.min(bins - 1, Math.floor(at * bins)));
  const lines = shown.map((b, i) => [
    mark(i),
    `stage ${b.stage}`,
    percent(100 * b.shares[bin]),
  ]);
  return tip(`Weights ${digits(bin / bins)} … ${digits((bin + 1) / bins)}`, lines);
}
