// What the layers see: weights over an image.

const seen = { of: null, image: 0, block: 0, view: 0, scale: 0, among: 0 };
const looks = { opacity: 70, colour: false };
const nameOf = (of) => `${named(of.label)} on ${say(of.dataset)}`;
const explainedNow = () => page.explained.find((e) => nameOf(e) === seen.of);
const grids = (k) => (k ? `${k}×${k}` : "all");

function showMaps() {
  const section = $("#maps");
  if (!present(section, page.explained.length > 0)) return;
  const names = page.explained.map(nameOf);
  const before = seen.of;
  seen.of = among(seen.of, names);
  const of = explainedNow();
  if (seen.of !== before) Object.assign(seen, liveliest(of));
  keep($("#maps-which"), names, () => {
    if (names.length < 2) return [];
    const options = names.map((name) => [name, name]);
    return [group("Network", options, (n) => n === seen.of, (n) => ((seen.of = n), showMaps()))];
  });
  keep($("#maps-note"), of.note, () => sentences(of.note));
  const usable = of.images.length > 0 && of.blocks.length > 0;
  $(".viewer", section).hidden = $(".all", section).hidden = !usable;
  if (usable) showViewer(of);
  showHistogram(of);
}

/**
 * Where there is most to see: the block whose mean weights differ most between places, and in it
 * the channel that does.
 */
function liveliest(of) {
  const spans = (block, view) =>
    of.images.reduce((sum, { maps }) => sum + spanOf(maps[block][view][0]), 0) *
    (of.blocks[block].ranges[view][1] - of.blocks[block].ranges[view][0]);
  const most = (list) => Math.max(0, list.indexOf(Math.max(...list)));
  const block = most(of.blocks.map((_, i) => spans(i, 0)));
  const views = of.images.length && of.blocks.length ? of.images[0].maps[block] : [];
  return { block, view: most(views.map((_, v) => spans(block, v))), scale: 0 };
}

/** From the least to the greatest value of a map. */
function spanOf(map) {
  const values = bytes(map.values);
  return Math.max(...values) - Math.min(...values);
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
  keep($("#pictures"), [seen.of, of.images.map((i) => [i.label, i.image.length])], () => {
    const made = group(
      "Picture",
      of.images.map((_, i) => [i, ""]),
      (i) => i === seen.image,
      set("image"),
    );
    made.classList.add("thumbs");
    $$("label span", made).forEach((slot, i) => {
      const alt = judged(of.images[i]);
      slot.append(h("img", { src: of.images[i].image, alt, title: alt }));
    });
    return [made];
  });
  keep($("#block"), [seen.of, of.blocks.length], () => blockKnob(of, set("block")));
  const range = $("#block input");
  if (range) {
    range.value = seen.block;
    range.setAttribute("aria-valuetext", `${block.name}, ${placeIn(of)}`);
  }
  $("#block output").textContent = `${block.name} · stage ${block.stage}`;
  keep($("#scale"), [seen.of, block.scales, seen.scale < 0], () => [
    group(
      "Scale",
      [0, ...block.scales].map((k, i) => [i, grids(k)]),
      (i) => i === seen.scale,
      set("scale"),
    ),
  ]);
  const views = ["mean", ...block.shown.map((c) => `#${c}`)];
  keep($("#channel"), [seen.of, views], () => [
    group(
      "Channel",
      views.map((v, i) => [i, v]),
      (i) => i === seen.view,
      set("view"),
    ),
  ]);
  keep($("#opacity"), "opacity", looksKnobs);
  const { image, label } = of.images[seen.image];
  keep($("#plain"), [image.length, image.slice(-80), label], () => [
    h("img", { src: image, alt: label }),
    h("span", {}, "the picture"),
  ]);
  paint(of);
}

/** Which of the network's blocks it is, and how many there are to choose from. */
function placeIn(of) {
  const some = of.blocks.length < of.depth ? `; ${of.blocks.length} shown` : "";
  return `${of.blocks[seen.block].number} of ${of.depth}${some}`;
}

/** How the weights lie over the picture. */
function looksKnobs() {
  const again = (key, value) => {
    looks[key] = value;
    paint(explainedNow());
  };
  const value = String(looks.opacity);
  const input = h("input", { type: "range", min: "0", max: "100", step: "5", value });
  input.addEventListener("input", () => again("opacity", Number(input.value)));
  const tick = h("input", { type: "checkbox", checked: looks.colour });
  tick.addEventListener("change", () => again("colour", tick.checked));
  return [
    h("label", { class: "range" }, h("span", {}, "Opacity of the weights"), input),
    h("label", { class: "tick" }, tick, "picture in colour"),
  ];
}

function blockKnob(of, set) {
  const last = of.blocks.length - 1;
  if (!last) return [fact("Block", h("output"))];
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
