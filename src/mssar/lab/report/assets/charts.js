// What all figures have in common.

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

const channels = (hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));

function mixed(a, b, share) {
  const [from, to] = [channels(a), channels(b)];
  const hex = from.map((v, i) =>
    Math.round(v + (to[i] - v) * share)
      .toString(16)
      .padStart(2, "0"),
  );
  return `#${hex.join("")}`;
}

/** One hue for each recalibration; the second and third of a kind are paler. */
function hue(recalibration, nth = 0) {
  const known = ORDER.includes(recalibration) ? recalibration : "other";
  return mixed(css(`--${known}`), css("--paper"), [0, 0.3, 0.5, 0.62][nth % 4]);
}

const ink = () => ({ text: css("--ink"), soft: css("--soft"), line: css("--line") });

const SANS = 'system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif';

/** An axis; `name` stands at its end. */
function axis(name, more = {}) {
  const { soft, line } = ink();
  return {
    type: "value",
    name,
    nameTextStyle: { color: soft, fontSize: 12 },
    axisLabel: { color: soft, fontSize: 12, hideOverlap: true },
    axisLine: { show: true, lineStyle: { color: line } },
    axisTick: { show: false },
    splitLine: { show: true, lineStyle: { color: line, opacity: 0.55 } },
    ...more,
  };
}

/** Draws into an element; what it shows is said in words for those who cannot see it. */
function draw(element, label, option) {
  let chart = echarts.getInstanceByDom(element);
  if (!chart) {
    chart = echarts.init(element, null, { renderer: "svg" });
    new ResizeObserver(() => printing || chart.resize()).observe(element);
    element.setAttribute("role", "img");
  }
  element.setAttribute("aria-label", label);
  const tip = {
    confine: true,
    backgroundColor: css("--raised"),
    borderColor: css("--line"),
    textStyle: { color: css("--ink"), fontSize: 13, fontFamily: SANS },
    transitionDuration: 0,
    ...option.tooltip,
  };
  const shared = { textStyle: { fontFamily: SANS }, animation: false, tooltip: tip };
  chart.setOption({ ...option, ...shared }, { notMerge: true });
  return chart;
}

/** What a tooltip shows, as elements: [swatch or nothing, name, value, more]. */
function tip(title, lines) {
  const rows = lines.map(([mark, name, value, more]) =>
    h(
      "tr",
      {},
      h("th", { scope: "row" }, ...(mark ? [mark] : []), name),
      h("td", {}, value),
      h("td", { class: "more" }, more ?? ""),
    ),
  );
  return h("div", { class: "tip" }, h("b", {}, title), h("table", {}, h("tbody", {}, ...rows)));
}

/** A legend: [swatch, text]. */
const legend = (slot, entries) =>
  slot.replaceChildren(...entries.map(([mark, text]) => h("span", {}, mark, text)));

/** Shows a section's figure, or says what would fill it. */
function present(section, there) {
  $(".figure", section).hidden = !there;
  const empty = $(".empty", section);
  if (empty) empty.hidden = there;
  const said = $(".words", section);
  if (said) said.hidden = !there;
  return there;
}

/** A filled shape between two lines, epoch by epoch: data are [x, low, high]. */
function band(data, colour) {
  return {
    type: "custom",
    silent: true,
    clip: true,
    z: 1,
    data,
    encode: { x: 0, y: [1, 2] },
    tooltip: { show: false },
    renderItem(params, api) {
      if (params.dataIndexInside > 0) return null;
      const at = (dimension, i) => api.coord([api.value(0, i), api.value(dimension, i)]);
      const all = Array.from({ length: params.dataInsideLength }, (_, i) => i);
      const points = [...all.map((i) => at(1, i)), ...all.reverse().map((i) => at(2, i))];
      return { type: "polygon", shape: { points }, style: { fill: colour, opacity: 0.16 } };
    },
  };
}
