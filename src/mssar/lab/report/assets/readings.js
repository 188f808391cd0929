// What the curves say in words and numbers.

/** Names at the right ends of the curves, pushed apart where they would overlap. */
function namesAtEnds(shown, key) {
  const ends = shown.map((c, i) => [c.mean[key]?.length ?? 0, c.mean[key]?.at(-1) ?? null, i]);
  return {
    type: "custom",
    silent: true,
    data: ends.filter(([, value]) => value > 0),
    encode: { x: 0, y: 1 },
    tooltip: { show: false },
    renderItem(params, api) {
      if (params.dataIndexInside > 0) return null;
      const labels = Array.from({ length: params.dataInsideLength }, (_, i) => {
        const [x, y] = api.coord([api.value(0, i), api.value(1, i)]);
        return { x: x + 9, y: y - 6, text: short(shown[api.value(2, i)]) };
      });
      labels.sort((a, b) => a.y - b.y);
      labels.forEach((label, i) => {
        if (i) label.y = Math.max(label.y, labels[i - 1].y + 15);
      });
      const style = { fill: css("--ink"), fontSize: 12, fontFamily: SANS };
      return {
        type: "group",
        children: labels.map((at) => ({ type: "text", style: { ...style, ...at } })),
      };
    },
  };
}

/** The values of all curves at an epoch. */
function tipAt(epoch, shown, parts, colours) {
  const places = PLACES[view.quantity];
  const unit = view.quantity === "error" ? " %" : "";
  const lines = parts.flatMap(([part, name]) => {
    const key = `${part}_${view.quantity}`;
    return shown
      .filter((c) => c.mean[key]?.[epoch - 1] != null)
      .map((c) => {
        const [low, high] = [c.low[key]?.[epoch - 1], c.high[key]?.[epoch - 1]];
        const span =
          c.n > 1 && low != null ? `${digits(low, places)} … ${digits(high, places)}` : "";
        const mark = stroked(colours.get(c), ...(part === "test" ? [] : [DASHES, 1.4]));
        const label = parts.length > 1 ? `${short(c)}, ${name}` : short(c);
        return [mark, label, digits(c.mean[key][epoch - 1], places) + unit, span];
      });
  });
  return tip(`Epoch ${epoch}`, lines);
}

/** Where a curve is of one run, or not at its end. */
function remarks(shown) {
  const single = shown.filter((c) => c.n === 1).map(short);
  const going = shown
    .filter((c) => c.going)
    .map((c) => `${short(c)} (epoch ${lengthOf(c)} of ${c.epochs})`);
  const said = [];
  if (!shown.length) said.push("Nothing is chosen.");
  if (single.length) said.push(`One run only, so no band: ${single.join("; ")}.`);
  if (going.length) said.push(`Still being trained: ${going.join("; ")}.`);
  $("#curves-note").textContent = said.join(" ");
}

function lastEpochs(section, shown) {
  const cell = (c, key, places) => {
    const at = lengthOf(c) - 1;
    const span =
      c.n > 1
        ? ` (${digits(c.low[key]?.[at], places)} … ${digits(c.high[key]?.[at], places)})`
        : "";
    return digits(c.mean[key]?.[at], places) + span;
  };
  const columns = [
    ["test_error", 2],
    ["train_error", 2],
    ["test_loss", 4],
    ["train_loss", 4],
  ];
  const head = [
    "Curve",
    "Epoch",
    "Runs",
    "Test error, %",
    "Training error, %",
    "Test loss",
    "Training loss",
  ];
  const rows = shown.map((c) => [
    named(c.label),
    `${lengthOf(c)} of ${c.epochs}`,
    String(c.n),
    ...columns.map(([key, places]) => cell(c, key, places)),
  ]);
  keep($(".numbers .scroll", section), rows, () => [grid(head, rows)]);
}
