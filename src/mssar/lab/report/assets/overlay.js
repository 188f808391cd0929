// Weights painted over a picture.

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
const LINED = 8; // regions a side, at most, that are worth lines

/** 0 … 255 as a colour, dark to bright. */
function shade(byte) {
  const at = (byte / 255) * (STOPS.length - 1);
  const i = Math.min(Math.floor(at), STOPS.length - 2);
  const mix = STOPS[i].map((v, c) => Math.round(v + (STOPS[i + 1][c] - v) * (at - i)));
  return `rgb(${mix.join(",")})`;
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

const greys = new WeakMap(); // by picture

/**
 * The picture in grey, so that colour is left to the weights: as bright as its brightest part of
 * red, green and blue, or shapes of equal luminance would be lost, and from black to white.
 */
function grey(image) {
  if (!greys.has(image)) {
    const canvas = h("canvas", { width: image.naturalWidth, height: image.naturalHeight });
    const to = canvas.getContext("2d");
    to.drawImage(image, 0, 0);
    const pixels = to.getImageData(0, 0, canvas.width, canvas.height);
    const { data } = pixels;
    let [low, high] = [255, 1];
    for (let i = 0; i < data.length; i += 4) {
      const value = Math.max(data[i], data[i + 1], data[i + 2]);
      data.fill(value, i, i + 3);
      [low, high] = [Math.min(low, value), Math.max(high, value)];
    }
    for (let i = 0; i < data.length; i += 4) {
      data.fill((255 * (data[i] - low)) / Math.max(1, high - low), i, i + 3);
    }
    to.putImageData(pixels, 0, 0);
    greys.set(image, canvas);
  }
  return greys.get(image);
}

const bytes = (text) => Uint8Array.from(atob(text), (c) => c.charCodeAt(0));

function current(of) {
  const image = of.images[seen.image];
  const map = image.maps[seen.block][seen.view][seen.scale];
  return { image, map, values: bytes(map.values) };
}

function paint(of) {
  const { image, map, values } = current(of);
  overlaid($("#overlay"), image, map, SIDE);
  ramp(of);
  describe(of, image, values);
  showGallery(of);
}

/** A picture under a map's weights, so many pixels at its longer side. */
function overlaid(canvas, image, map, side) {
  const values = bytes(map.values);
  const most = Math.max(image.width, image.height, 1);
  const [wide, tall] = [image.width, image.height].map((s) => Math.round((side * s) / most));
  if (canvas.width !== wide) canvas.width = wide;
  if (canvas.height !== tall) canvas.height = tall;
  const to = canvas.getContext("2d");
  to.clearRect(0, 0, wide, tall);
  const under = picture(image.image);
  to.imageSmoothingEnabled = Math.max(image.width, image.height) > side / 2;
  if (under.complete && under.naturalWidth) {
    to.drawImage(looks.colour ? under : grey(under), 0, 0, wide, tall);
  }
  to.globalAlpha = looks.opacity / 100;
  const x = (i) => Math.round((i * wide) / map.width);
  const y = (i) => Math.round((i * tall) / map.height);
  for (let row = 0; row < map.height; row++) {
    for (let column = 0; column < map.width; column++) {
      to.fillStyle = shade(values[row * map.width + column]);
      to.fillRect(x(column), y(row), x(column + 1) - x(column), y(row + 1) - y(row));
    }
  }
  to.globalAlpha = 1;
  if (Math.max(map.width, map.height) <= LINED) lines(to, map, x, y);
}

/** Thin lines between the regions. */
function lines(to, map, x, y) {
  const { canvas } = to;
  const thick = Math.max(2, Math.round((1.5 * canvas.width) / (canvas.clientWidth || canvas.width)));
  to.fillStyle = "rgb(255 255 255 / 60%)";
  for (let i = 1; i < map.width; i++) to.fillRect(x(i) - 1, 0, thick, y(map.height));
  for (let i = 1; i < map.height; i++) to.fillRect(0, y(i) - 1, x(map.width), thick);
}

/** The bar lies over grey as the weights do, so that its colours are those in the picture. */
function ramp(of) {
  const to = $("#ramp").getContext("2d");
  to.globalAlpha = 1;
  to.fillStyle = "#808080";
  to.fillRect(0, 0, 256, 1);
  to.globalAlpha = looks.opacity / 100;
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

/** Which class a picture is of, and which it was taken for. */
function judged(image) {
  const [label, guess] = [image.label, image.guess].map((name) => name.replaceAll("_", " "));
  return guess === label ? `${label}, named correctly` : `${label}, taken for ${guess}`;
}

function describe(of, image, values) {
  const block = of.blocks[seen.block];
  const what = seen.view
    ? `channel ${block.shown[seen.view - 1]}`
    : `the mean over ${block.channels} channels`;
  const scale = seen.scale ? `scale ${grids(block.scales[seen.scale - 1])}` : "all scales together";
  const [low, high] = [Math.min(...values), Math.max(...values)].map((b) => digits(weight(of, b)));
  const span = low === high ? `${low} everywhere` : `${low} to ${high}`;
  const text = `${nameOf(of)}. Picture: ${judged(image)}. Block ${block.name} (stage ${block.stage}, ${placeIn(of)}), ${scale}, ${what}: weights ${span}.`;
  const shown = $("#shown");
  if (shown.textContent !== text) shown.textContent = text;
  $("#overlay").setAttribute("aria-label", text);
}

function watchMaps() {
  const canvas = $("#overlay");
  const probe = $("#probe");
  canvas.addEventListener("pointermove", (event) => {
    const of = explainedNow();
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
