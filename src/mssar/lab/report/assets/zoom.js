// Which epochs the curves show: by buttons, by the handles below the figure, by the wheel.

const LEAST = 2; // epochs

/** The first and the last epoch to show; where the window does not fit these epochs, all. */
function windowIn(epochs) {
  if (view.window && view.window[1] > epochs) view.window = null;
  return view.window ?? [1, Math.max(LEAST, epochs)];
}

/** So many epochs about the middle of these, or as near to it as there are any. */
function about([first, last], count, epochs) {
  const many = Math.max(LEAST, Math.min(count, epochs));
  const from = first + Math.floor((last - first + 1 - many) / 2);
  const start = Math.max(1, Math.min(from, epochs - many + 1));
  return [start, start + many - 1];
}

function zoomControls(section) {
  const to = (choose) => () => {
    const epochs = Math.max(LEAST, shownEpochs(chosenCurves().shown));
    const [first, last] = windowIn(epochs);
    const now = [Math.ceil(first - NEAR), Math.floor(last + NEAR)];
    const next = choose(now, now[1] - now[0] + 1, epochs);
    view.window = next[0] === 1 && next[1] === epochs ? null : next;
    drawCurves(section);
  };
  keep($(".zoom", section), "zoom", () => [
    h("span", { id: "epochs", class: "hint", role: "status" }),
    button(
      "Zoom in",
      to((now, count, all) => about(now, Math.ceil(count / 2), all)),
    ),
    button(
      "Zoom out",
      to((now, count, all) => about(now, 2 * count, all)),
    ),
    button(
      "Last quarter",
      to((_, __, all) => [all - Math.max(LEAST, Math.round(all / 4)) + 1, all]),
    ),
    button(
      "Reset zoom",
      to((_, __, all) => [1, all]),
    ),
  ]);
}

const NEAR = 1e-6; // of an epoch

/** How many epochs there are of these curves; if none are shown, of those that could be. */
const shownEpochs = (shown) =>
  epochsOf(shown.length ? shown : page.curves.filter((c) => c.dataset === view.dataset));

function listen(element, chart) {
  chart.on("datazoom", () => {
    const [{ start, end, startValue, endValue }] = chart.getOption().dataZoom;
    view.window = start <= 0 && end >= 100 ? null : [startValue, endValue];
    readout(chart);
  });
  // A wheel over the figure scrolls the page, until the reader has clicked into it.
  const wheel = (how) => () =>
    chart.setOption({ dataZoom: [{ id: "inside", zoomOnMouseWheel: how }] });
  element.addEventListener("pointerdown", wheel(true));
  element.addEventListener("pointerleave", wheel("ctrl"));
}

function readout(chart) {
  const [{ startValue, endValue }] = chart.getOption().dataZoom;
  const [first, last] = [Math.ceil(startValue - NEAR), Math.floor(endValue + NEAR)];
  $("#epochs").textContent = `epochs ${first}–${last}`;
}
