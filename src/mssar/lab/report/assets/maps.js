// What the layers see: weights over an image.

const seen = { label: null, image: 0, block: 0, view: 0, scale: 0, opacity: 55, among: 0 };
const STOPS = [
  "#440154",
  "#482878",
  "#3e4989",
  "#31688e",
  "#26828e",
  "#1f9e89",
  "#35b779",
  "#6ece58",
  "#b5de2b",
  "#fde725",
].map(channels);
const SIDE = 512; // of the canvas, in pixels

/** 0 … 255 as a colour, dark to bright. */
function shade(byte) {
  const at = (byte / 255) * (STOPS.length - 1);
  const i = Math.min(Math.floor(at), STOPS.length - 2);
  const mix = STOPS[i].map((v, c) => Math.round(v + (STOPS[i + 1][c] - v) * (at - i)));
  return `rgb(${mix.join(",")})`;
}

const grids = (k) => (k ? `${k}×${k}` : "all");

function showMaps() {
  const section = $("#maps");
  if (!present(section, page.explained.length > 0)) return;
  const labels = page.explained.map((e) => e.label);
  const before = seen.label;
  seen.label = among(seen.label, labels);
  const of = page.explained.find((e) => e.label === seen.label);
  if (seen.label !== before) seen.block = liveliest(of);
  keep($("#maps-which"), labels, () => {
    if (labels.length < 2) return [];
    const options = labels.map((l) => [l, l]);
    return [select("Network", options, seen.label, (l) => ((seen.label = l), showMaps()))];
  });
  const usable = of.images.length > 0 && of.blocks.length > 0;
  $(".viewer", section).hidden = !usable;
  if (usable) showViewer(of);
  showHistogram(of);
}

/** The block whose mean weights differ most between places: where there is something to see. */
function liveliest(of) {
  const span = (grid, [low, high]) => {
    const values = bytes(grid.values);
    return ((Math.max(...values) - Math.min(...values)) / 255) * (high - low);
  };
  const spans = of.blocks.map((block, i) => {
    const all = of.images.map((image) => span(image.maps[i][0][0], block.ranges[0]));
    return all.reduce((a, b) => a + b, 0);
  });
  return Math.max(0, spans.indexOf(Math.max(...spans)));
}

function showViewer(of) {
  const within = (value, list) => Math.max(0, Math.min(value, list.length - 1));
  seen.image = within(seen.image, of.images);
  seen.block = within(seen.block, of.blocks);
  const block = of.blocks[seen.block];
  const maps = of.images[seen.image].maps[seen.block];
  seen.view = within(seen.view, maps);
  seen.scale = within(seen.scale, maps[seen.view]);

  const set = (key) => (value) => {
    seen[key] = value;
    showViewer(of);
  };
  keep($("#pictures"), [of.label, of.images.map((i) => [i.label, i.image.length])], () => {
    const made = group(
      "Picture",
      of.images.map((_, i) => [i, ""]),
      (i) => i === seen.image,
      set("image"),
    );
    made.classList.add("thumbs");
    $$("label span", made).forEach((slot, i) => {
      const { image, label, guess } = of.images[i];
      const alt = guess === label ? label : `${label}, taken for ${guess}`;
      slot.append(h("img", { src: image, alt, title: alt }));
    });
    return [made];
  });
  keep($("#block"), [of.label, of.blocks.length], () => blockKnob(of, set("block")));
  const range = $("#block input");
  range.value = seen.block;
  range.setAttribute("aria-valuetext", `${block.name}, ${seen.block + 1} of ${of.blocks.length}`);
  $("#block output").textContent = `${block.name} · stage ${block.stage}`;
  keep($("#scale"), [of.label, block.scales, seen.scale < 0], () => [
    group(
      "Scale",
      [0, ...block.scales].map((k, i) => [i, grids(k)]),
      (i) => i === seen.scale,
      set("scale"),
    ),
  ]);
  const views = ["mean", ...block.shown.map((c) => `#${c}`)];
  keep($("#channel"), [of.label, views], () => [
    group(
      "Channel",
      views.map((v, i) => [i, v]),
      (i) => i === seen.view,
      set("view"),
    ),
  ]);
  keep($("#opacity"), "opacity", () => {
    const input = h("input", {
      type: "range",
      min: "0",
      max: "100",
      step: "5",
      value: String(seen.opacity),
    });
    input.addEventListener("input", () => {
      seen.opacity = Number(input.value);
      paint(page.explained.find((e) => e.label === seen.label));
    });
    return [h("label", { class: "range" }, h("span", {}, "Opacity of the weights"), input)];
  });
  paint(of);
}

function blockKnob(of, set) {
  const last = of.blocks.length - 1;
  const step = (by) => () => set(Math.max(0, Math.min(last, seen.block + by)));
  const input = h("input", {
    type: "range",
    min: "0",
    max: String(last),
    step: "1",
    id: "block-range",
  });
  input.addEventListener("input", () => set(Number(input.value)));
  const label = h("label", { for: "block-range" }, "Block");
  const name = h("output", { for: "block-range", "aria-live": "off" });
  const back = button("‹", step(-1), { "aria-label": "Previous block" });
  const on = button("›", step(1), { "aria-label": "Next block" });
  return [h("div", { class: "range" }, label, name, h("div", { class: "row" }, back, input, on))];
}

const pictures = new Map(); // by address

function picture(address) {
  if (!pictures.has(address)) {
    const image = new Image();
    image.src = address;
    image.addEventListener("load", () => showMaps());
    pictures.set(address, image);
  }
  return pictures.get(address);
}

const bytes = (text) => Uint8Array.from(atob(text), (c) => c.charCodeAt(0));

function current(of) {
  const image = of.images[seen.image];
  const map = image.maps[seen.block][seen.view][seen.scale];
  return { image, map, values: bytes(map.values) };
}

function paint(of) {
  const { image, map, values } = current(of);
  const canvas = $("#overlay");
  const most = Math.max(image.width, image.height, 1);
  const [wide, tall] = [image.width, image.height].map((s) => Math.round((SIDE * s) / most));
  if (canvas.width !== wide) canvas.width = wide;
  if (canvas.height !== tall) canvas.height = tall;
  const to = canvas.getContext("2d");
  to.clearRect(0, 0, wide, tall);
  const under = picture(image.image);
  to.imageSmoothingEnabled = Math.max(image.width, image.height) > SIDE / 2;
  if (under.complete && under.naturalWidth) to.drawImage(under, 0, 0, wide, tall);
  to.globalAlpha = seen.opacity / 100;
  const x = (i) => Math.round((i * wide) / map.width);
  const y = (i) => Math.round((i * tall) / map.height);
  for (let row = 0; row < map.height; row++) {
    for (let column = 0; column < map.width; column++) {
      to.fillStyle = shade(values[row * map.width + column]);
      to.fillRect(x(column), y(row), x(column + 1) - x(column), y(row + 1) - y(row));
    }
  }
  to.globalAlpha = 1;
  ramp(of);
  describe(of, image, values);
}

function ramp(of) {
  const to = $("#ramp").getContext("2d");
  for (let i = 0; i < 256; i++) {
    to.fillStyle = shade(i);
    to.fillRect(i, 0, 1, 1);
  }
  const [low, high] = range(of);
  $("#bar-low").textContent = digits(low);
  $("#bar-high").textContent = digits(high);
}

/** The least and the greatest weight of this view, over images and scales. */
const range = (of) => of.blocks[seen.block].ranges[seen.view];

function weight(of, byte) {
  const [low, high] = range(of);
  return low + (byte / 255) * (high - low);
}

function describe(of, image, values) {
  const block = of.blocks[seen.block];
  const named =
    image.guess === image.label
      ? `${image.label}, named rightly`
      : `${image.label}, taken for ${image.guess}`;
  const what = seen.view
    ? `channel ${block.shown[seen.view - 1]}`
    : `the mean over ${block.channels} channels`;
  const scale = seen.scale ? `scale ${grids(block.scales[seen.scale - 1])}` : "all scales together";
  const [low, high] = [Math.min(...values), Math.max(...values)].map((b) => digits(weight(of, b)));
  const span = low === high ? `${low} everywhere` : `${low} to ${high}`;
  const text = `${of.label} on ${say(of.dataset)}. Picture: ${named}. Block ${block.name} (${seen.block + 1} of ${of.blocks.length}, stage ${block.stage}), ${scale}, ${what}: weights ${span}.`;
  const shown = $("#shown");
  if (shown.textContent !== text) shown.textContent = text;
  $("#overlay").setAttribute("aria-label", text);
}

function watchMaps() {
  const canvas = $("#overlay");
  const probe = $("#probe");
  canvas.addEventListener("pointermove", (event) => {
    const of = page.explained.find((e) => e.label === seen.label);
    const { map, values } = current(of);
    const box = canvas.getBoundingClientRect();
    const cell = (at, length, count) =>
      Math.max(0, Math.min(count - 1, Math.floor((at / length) * count)));
    const column = cell(event.clientX - box.left, box.width, map.width);
    const row = cell(event.clientY - box.top, box.height, map.height);
    probe.textContent = `weight here: ${digits(weight(of, values[row * map.width + column]))}`;
  });
  canvas.addEventListener("pointerleave", () => (probe.textContent = ""));
}
